"""Work of the engine that the event loop waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run work in a thread to its end, even if the task is cancelled meanwhile: what it made must be known."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        running.exception()  # else it is logged as one that nobody asked for, with words that may be a client's
        raise
