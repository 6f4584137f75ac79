"""Connections: how many at once, how long one may say nothing or read nothing, and that its end is always noticed."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from uvicorn.protocols.http.h11_impl import H11Protocol

from amem.serve.errors import HttpError

if TYPE_CHECKING:
    from amem.serve.limits import Limits

_PIPELINED = 65_536  # bytes that may come after a request before its reply has ended


def connections(limits: Limits) -> type[H11Protocol]:
    """The protocol of a server with these limits, as uvicorn takes it."""
    return type("Connection", (_Connection,), {"limits": limits})


class _Connection(H11Protocol):
    """uvicorn's own, which would wait for ever for a request's first lines, and for a client to read."""

    limits: Limits
    _timer: asyncio.TimerHandle | None = None  # of the first lines
    _stall: asyncio.TimerHandle | None = None  # of unread bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, or tell the client that there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.write(_too_many())
            transport.close()
            return
        self._timer = self.loop.call_later(self.limits.head_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, whoever ended it."""
        for timer in (self._timer, self._stall):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and note whether a request's first lines are still to come."""
        if self.transport.is_closing():
            return  # it was refused, or is about to end
        super().data_received(data)
        is_asked = self.cycle is not None and not self.cycle.response_complete
        if is_asked and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not is_asked and self._timer is None:
            self._timer = self.loop.call_later(self.limits.head_s, self.transport.abort)
        if is_asked and not self.cycle.more_body:
            # the next request came early: uvicorn reads no more until then, and would not see that the client goes away
            if len(self.conn.trailing_data[0]) > _PIPELINED:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def pause_writing(self) -> None:
        """The client does not read: wait for it, but not for ever."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.limits.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def _too_many() -> bytes:
    told = HttpError(
        503, "too many connections are open: come back later.", kind="server_error", code="too_many_connections"
    ).openai()
    body = json.dumps(told).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
