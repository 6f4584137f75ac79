"""The memory budget: every byte of hot K/V is allocated here before it is used."""

from __future__ import annotations

from amem.errors import AmemError, MemoryBudgetError
from amem.sizes import format_size


class PoolError(AmemError):
    """An allocation was freed twice, or was never this pool's: a fault in amem itself."""


class Allocation:
    """A counted share of a pool. It holds its tensors, and drops them when the last reference is released."""

    def __init__(self, pool: Pool, nbytes: int) -> None:
        self._pool = pool
        self.nbytes = nbytes
        self.references = 1
        self.tensors: dict[str, object] = {}

    def retain(self) -> Allocation:
        """Add a reference.

        Raises
        ------
            PoolError: it was freed already.
        """
        if self.references == 0:
            raise PoolError("a freed allocation was used again")
        self.references += 1
        return self

    def release(self) -> None:
        """Drop a reference; the last one gives the bytes back.

        Raises
        ------
            PoolError: it was freed already.
        """
        self._pool.release(self)


class Pool:
    """A budget in bytes. ``free + used == total`` holds after every call; ``peak`` is the most that was ever used."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.peak = 0
        self._live: set[Allocation] = set()

    @property
    def free(self) -> int:
        return self.total - self.used

    def allocate(self, nbytes: int) -> Allocation:
        """Take bytes from the budget.

        Raises
        ------
            MemoryBudgetError: fewer are free. Nothing has changed then.
        """
        if nbytes < 0:
            raise PoolError(f"cannot allocate {nbytes} bytes")
        if nbytes > self.free:
            raise MemoryBudgetError(
                f"{format_size(nbytes)} of K/V memory are needed and {format_size(self.free)} of the budget of "
                f"{format_size(self.total)} are free: evict or unpin an agent, or raise the memory budget."
            )
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        allocation = Allocation(self, nbytes)
        self._live.add(allocation)
        return allocation

    def release(self, allocation: Allocation) -> None:
        """Drop one reference to an allocation of this pool.

        Raises
        ------
            PoolError: it is another pool's, or was freed already.
        """
        if allocation not in self._live:
            raise PoolError("an allocation was freed twice, or belongs to another pool")
        allocation.references -= 1
        if allocation.references == 0:
            self._live.discard(allocation)
            allocation.tensors.clear()
            self.used -= allocation.nbytes

    @property
    def n_live(self) -> int:
        return len(self._live)
