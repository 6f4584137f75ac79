"""A request as its caller sees it: events to iterate over, in a thread or an event loop, and a handle to end it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from amem.results import Event, Reply

if TYPE_CHECKING:
    from amem.run.request import Request


class ReplyStream(Iterator[Event]):
    """The events of one request, and the handle to it: `cancel` ends it, from any thread.

    Closed or dropped before its end, even before its first event, it is cancelled.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._finished = False

    def __next__(self) -> Event:
        if self._finished:
            raise StopIteration
        try:
            event = self._request.events.get()
        except BaseException:
            self.close()
            raise
        if isinstance(event, BaseException):
            self._finished = True
            raise event
        self._finished = event.reply is not None
        return event

    def reply(self) -> Reply:
        """The reply, when it is there; the events before it are taken.

        Raises
        ------
            AmemError: whatever ended the request.
        """
        return next(event.reply for event in self if event.reply is not None)

    def cancel(self) -> None:
        """Ask that the request ends, without waiting for it. Any thread may call this, and more than once.

        It ends at its next step; who reads the stream then gets `Cancelled`, and the agent is as it was. Other requests
        are not touched. A request that has ended already stays as it is.
        """
        if not self._finished:
            self._request.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether it was asked to end before it did."""
        return self._request.cancelled

    def close(self) -> None:
        """Cancel, and wait until the agent is as it was; a second interrupt stops the waiting."""
        if self._finished:
            return
        self._finished = True
        self._request.cancel()
        while True:
            event = self._request.events.get()
            if isinstance(event, BaseException) or event.reply is not None:
                return

    def __del__(self) -> None:
        self.cancel()


async def last_reply(events: AsyncIterator[Event]) -> Reply:
    """The reply that a request's events end with."""
    reply: Reply | None = None
    async for event in events:
        reply = event.reply or reply
    assert reply is not None, "the last event of a stream has the reply"
    return reply


async def queued_request(queued: Future[Request]) -> Request:
    """A request, once it is queued; a caller that is cancelled meanwhile takes it along."""
    try:
        return await asyncio.wrap_future(queued)
    except asyncio.CancelledError:
        _cancel_queued(queued)
        raise


async def events_of(request: Request) -> AsyncGenerator[Event, None]:
    """A request's events; whoever stops taking them before the last cancels it. No thread waits meanwhile.

    Raises
    ------
        AmemError: whatever ended the request.
    """
    loop, came = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
            loop.call_soon_threadsafe(came.set)

    finished = False
    request.events.wake(wake)
    try:
        while not finished:
            came.clear()
            event = request.events.get_nowait()
            if event is None:
                await came.wait()
                continue
            if isinstance(event, BaseException):
                finished = True
                raise event
            finished = event.reply is not None
            yield event
    finally:
        if not finished:
            request.cancel()


def wait_for(queued: Future[Request]) -> Request:
    """A request, once it is queued; a caller that is interrupted meanwhile cancels it."""
    try:
        return queued.result()
    except BaseException:
        _cancel_queued(queued)  # interrupted while it was being queued: nobody will hold it
        raise


def _cancel_queued(queued: Future[Request]) -> None:
    if not queued.cancel():
        queued.add_done_callback(lambda done: done.result().cancel() if done.exception() is None else None)
