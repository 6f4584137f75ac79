"""What a request tells whoever asked: a queue that a thread can wait at, and an event loop can be woken by."""

from __future__ import annotations

import queue
from collections.abc import Callable

from amem.results import Event


class Events:
    """Events of one request, in order; an error ends them. Any thread may put and get."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None

    def put(self, event: Event | BaseException) -> None:
        """Add an event."""
        self._queue.put(event)
        if self._wake is not None:
            self._wake()

    def get(self) -> Event | BaseException:
        """The next event; waits for it."""
        return self._queue.get()

    def get_nowait(self) -> Event | BaseException | None:
        """The next event, or None."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def wake(self, call: Callable[[], None]) -> None:
        """Call this after each event, in the thread that puts it; events that are there already were put before."""
        self._wake = call
