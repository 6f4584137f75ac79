"""A response of server-sent events that ends its request with it, however it ends."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


def server_event(data: Mapping[str, object], name: str | None = None) -> str:
    """One server-sent event."""
    heading = f"event: {name}\n" if name else ""
    return f"{heading}data: {json.dumps(data, ensure_ascii=False)}\n\n"


class EventStream(Response):
    """Sends events as they come.

    It does not listen for the client's end: whoever made the events does, and ends them.

    Parameters
    ----------
    events
        The text of each event.
    stack
        What has to be closed when the stream has ended.
    tell
        The event that tells of an error; None: nothing is told.
    """

    def __init__(
        self, events: AsyncIterator[str], stack: contextlib.AsyncExitStack, tell: Callable[[Exception], str | None]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._stack = stack
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them all."""
        del scope, receive
        async with self._stack:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            except Exception as error:  # noqa: BLE001  # the status is out: an event is all that can tell of it
                told = self._tell(error)
                if told is not None:
                    await send({"type": "http.response.body", "body": told.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
