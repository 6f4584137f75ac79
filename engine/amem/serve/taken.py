"""A request that the engine was given: its events, and that it ends with whoever took it in."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from amem.errors import AmemError
from amem.results import Event, Reply
from amem.stream import events_of

if TYPE_CHECKING:
    from amem.run.request import Request


class Taken(AsyncIterator[Event]):
    """A queued request's events. Closed before the last of them, even before the first, it is cancelled.

    Parameters
    ----------
    request
        In the engine's queue.
    note
        Is told the reply, even one that was committed after nobody listened any more.
    """

    def __init__(self, request: Request, note: Callable[[Reply], None] | None = None) -> None:
        self.request = request
        self._note = note
        self._events = events_of(request)
        self._has_ended = False

    async def __anext__(self) -> Event:
        """The next event; whatever ended the request is raised."""
        try:
            event = await anext(self._events)
        except Exception:
            self._has_ended = True
            raise
        self._read(event)
        return event

    async def aclose(self) -> None:
        """End it, and wait until it has ended: only then its agent is as it will be."""
        await self._events.aclose()
        if self._has_ended:
            return
        self.request.cancel()
        with contextlib.suppress(AmemError):
            async for event in events_of(self.request):
                self._read(event)

    def _read(self, event: Event) -> None:
        if event.reply is not None:
            self._has_ended = True
            if self._note is not None:
                self._note(event.reply)
