"""The memory budget as a state machine."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from amem.errors import MemoryBudgetError
from amem.kv.pool import Pool, PoolError

TOTAL = 1000


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocations, references and releases keeps the books."""

    handles = Bundle("handles")

    def __init__(self):
        super().__init__()
        self.pool = Pool(TOTAL)
        self.counts = {}

    @rule(target=handles, nbytes=st.integers(0, 400))
    def allocate(self, nbytes):
        used = sum(allocation.nbytes for allocation in self.counts)
        if used + nbytes > TOTAL:
            with pytest.raises(MemoryBudgetError):
                self.pool.allocate(nbytes)
            allocation = Pool(TOTAL).allocate(1)  # a stranger, for the other rules
        else:
            allocation = self.pool.allocate(nbytes)
            allocation.tensors["k"] = object()
            self.counts[allocation] = 1
        return allocation

    @rule(target=handles, handle=consumes(handles))
    def retain(self, handle):
        if handle in self.counts:
            handle.retain()
            self.counts[handle] += 1
        return handle

    @rule(target=handles, handle=consumes(handles))
    def release(self, handle):
        if handle not in self.counts:
            with pytest.raises(PoolError):
                self.pool.release(handle)
            return handle
        handle.release()
        self.counts[handle] -= 1
        if self.counts[handle]:
            assert handle.tensors
            return handle
        del self.counts[handle]
        assert not handle.tensors
        with pytest.raises(PoolError):
            handle.release()
        with pytest.raises(PoolError):
            handle.retain()
        return multiple()

    @invariant()
    def books_are_kept(self):
        used = sum(allocation.nbytes for allocation in self.counts)
        assert used == self.pool.used
        assert TOTAL == self.pool.free + self.pool.used
        assert used <= self.pool.peak <= TOTAL
        assert len(self.counts) == self.pool.n_live


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=100, deadline=None)


def test_an_allocation_of_less_than_nothing_is_refused():
    """A negative size is a fault of the caller."""
    with pytest.raises(PoolError):
        Pool(TOTAL).allocate(-1)
