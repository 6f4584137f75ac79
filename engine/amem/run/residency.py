"""Which agents stay in memory: least recently used ones go first, running and pinned ones never."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from amem.kv.pool import Pool


class Resident(Protocol):
    """An agent that may hold K/V in memory."""

    last_used: int  #: a counter, not a time: clocks can be set back
    pinned: bool

    @property
    def is_running(self) -> bool: ...

    @property
    def hot_bytes(self) -> int: ...

    def evict(self) -> None: ...


def make_room(pool: Pool, nbytes: int, residents: Iterable[Resident], keep: Resident | None = None) -> bool:
    """Evict until ``nbytes`` are free; nothing is written, since every turn was committed. False if it does not help.

    A fork's bytes are freed only with the last agent that reads them, so the pool is asked after each eviction.
    """
    candidates = sorted(
        (r for r in residents if r is not keep and r.hot_bytes and not r.pinned and not r.is_running),
        key=lambda resident: resident.last_used,
    )
    for resident in candidates:
        if pool.free >= nbytes:
            break
        resident.evict()
    return pool.free >= nbytes
