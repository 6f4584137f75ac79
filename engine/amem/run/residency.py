"""Which agents stay in memory: least recently used ones go first, running and pinned ones never."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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


def make_room(pool: Pool, nbytes: int, residents: Iterable[Resident], kept: Collection[Resident | None] = ()) -> bool:
    """Evict others than ``kept`` until ``nbytes`` are free. False if that does not help.

    Nothing is written, since every turn was committed. A fork's bytes are freed only with the last agent that reads
    them, so the pool is asked after each eviction.
    """
    may_go = [
        resident
        for resident in residents
        if resident.hot_bytes and not resident.pinned and all(resident is not other for other in kept)
    ]
    may_go = [resident for resident in may_go if not resident.is_running]
    if pool.free + sum(resident.hot_bytes for resident in may_go) < nbytes:
        return False  # and nobody has to go in vain
    for resident in sorted(may_go, key=lambda resident: resident.last_used):
        if pool.free >= nbytes:
            break
        resident.evict()
    return pool.free >= nbytes
