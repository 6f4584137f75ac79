"""What an engine is made of, shared by its agents: the model, the layout of its state, memory, store and threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amem.errors import MemoryBudgetError
from amem.kv.codec import GROUP
from amem.kv.pool import Pool
from amem.kv.run import BLOCK_GROUPS, group_nbytes
from amem.kv.sequence import StateLayout
from amem.model.prompt import Prompter
from amem.run.residency import Resident, make_room
from amem.run.runner import Runner
from amem.run.scheduler import Scheduler
from amem.run.worker import Workers
from amem.sizes import format_size
from amem.store import Store
from amem.store.records import Realm

if TYPE_CHECKING:
    from amem.prefetch import Prefetch
    from amem.session import AgentSession


@dataclass
class EngineParts:
    """Built once by the engine; belongs to the owner thread, except the executors."""

    model_name: str
    realm: Realm
    layout: StateLayout
    prompter: Prompter
    context_length: int
    eos_token_ids: frozenset[int]
    prefill_chunk: int
    pool: Pool
    runner: Runner
    store: Store
    scheduler: Scheduler
    readers: Workers  #: reads of stored blocks
    writer: Workers  #: one thread, so that blocks are written in order
    sessions: Callable[[], Iterable[AgentSession]] = tuple  #: whoever may hold memory
    prefetch: Prefetch | None = None  #: None: nobody is expected
    _ticks: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def tick(self) -> int:
        """A number that grows with each use of an agent: a clock that nobody can set back."""
        return next(self._ticks)

    def make_room(self, nbytes: int, keep: Resident | None = None, spared: Collection[Resident] = ()) -> bool:
        """Evict other agents until this many bytes are free."""
        return make_room(self.pool, nbytes, self.sessions(), [keep, *spared])

    def no_room(self, nbytes: int, asking: AgentSession) -> MemoryBudgetError:
        """Why an agent gets no memory although nobody else is running: what it needs, and what is in the way.

        Agents of other spaces are counted and not named: they may be somebody else's.
        """
        pinned = [s for s in self.sessions() if s.pinned and s.hot_bytes and s is not asking]
        named = [repr(session.name) for session in pinned if session.store.space == asking.store.space]
        n_others = len(pinned) - len(named)
        names = ", ".join(named + ([f"{n_others} of other spaces"] if n_others else []))
        in_the_way = f"; unpin agents to make room (pinned: {names})" if names else ""
        return MemoryBudgetError(
            f"this request needs {format_size(nbytes)} of K/V memory and the budget is {format_size(self.pool.total)}"
            f"{in_the_way}; or raise it with memory=, lower max_tokens, or shorten the conversation (rewind)."
        )

    def sequence_nbytes(self, n_tokens: int) -> int:
        """The most that a new sequence takes in memory for a turn up to this many tokens, open groups included."""
        chunk = -(-self.prefill_chunk // GROUP)
        # own runs begin wherever a restore or a fork ended, and are rounded up to whole blocks
        runs = self._runs_nbytes(n_tokens, more=2 * BLOCK_GROUPS, more_in_window=chunk + BLOCK_GROUPS)
        return self.layout.open_nbytes + self.layout.turn_nbytes + runs

    def loaded_nbytes(self, n_tokens: int) -> int:
        """The most that a sequence takes just after this many tokens were loaded into it."""
        return self.layout.open_nbytes + self._runs_nbytes(n_tokens, more=0, more_in_window=0)

    def _runs_nbytes(self, n_tokens: int, *, more: int, more_in_window: int) -> int:
        n_blocks = -(-n_tokens // (GROUP * BLOCK_GROUPS))
        total = 0
        for lane, group in enumerate(self.layout.spec.groups):
            n = n_blocks * BLOCK_GROUPS + more
            if group.window is not None:
                n_seen = -(-group.window // (GROUP * BLOCK_GROUPS)) + 3
                n = min(n, n_seen * BLOCK_GROUPS + more_in_window)
            total += n * self.lane_group_nbytes(lane)
        return total

    def lane_group_nbytes(self, lane: int) -> int:
        """Bytes of one stored group, all layers of a lane."""
        group = self.layout.spec.groups[lane]
        return group_nbytes(self.layout.codec, self.layout.shape(lane), len(group.layers))

    def lane_open_token_nbytes(self, lane: int) -> int:
        """Bytes of one exact token, all layers of a lane."""
        group = self.layout.spec.groups[lane]
        return len(group.layers) * group.n_kv_heads * (group.k_dim + group.v_dim) * self.layout.dtype.size

    def lane_label(self, lane: int) -> str:
        """For example ``layers 0-29, full attention``."""
        group = self.layout.spec.groups[lane]
        kind = f"window of {group.window}" if group.window else "full attention"
        return f"layers {_ranges(group.layers)}, {kind}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """``0-4, 6-10``."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][-1] + 1:
            out[-1][1:] = [number]
        else:
            out.append([number])
    return ", ".join("-".join(str(n) for n in part) for part in out)
