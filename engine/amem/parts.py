"""What an engine is made of, shared by its agents: the model, the layout of its state, memory, store and threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amem.kv.codec import GROUP
from amem.kv.pool import Pool
from amem.kv.run import group_nbytes
from amem.kv.sequence import StateLayout
from amem.model.prompt import Prompter
from amem.run.residency import Resident, make_room
from amem.run.scheduler import Scheduler
from amem.run.worker import Workers
from amem.store import Store
from amem.store.records import Realm

if TYPE_CHECKING:
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
    store: Store
    scheduler: Scheduler
    readers: Workers  #: reads of stored blocks
    writer: Workers  #: one thread, so that blocks are written in order
    sessions: Callable[[], Iterable[AgentSession]]
    _ticks: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def tick(self) -> int:
        """A number that grows with each use of an agent: a clock that nobody can set back."""
        return next(self._ticks)

    def make_room(self, nbytes: int, keep: Resident | None = None) -> bool:
        """Evict other agents until this many bytes are free."""
        return make_room(self.pool, nbytes, self.sessions(), keep)

    def sequence_nbytes(self, n_tokens: int) -> int:
        """The most that a new sequence takes in memory for a turn up to this many tokens, open groups included."""
        total = self.layout.open_nbytes + self.layout.turn_nbytes
        groups = -(-n_tokens // GROUP) + 4  # restored runs are rounded up to whole blocks
        chunk = -(-self.prefill_chunk // GROUP)
        for lane, group in enumerate(self.layout.spec.groups):
            if group.window is None:
                n = groups + 4
            else:
                n = min(groups, (-(-group.window // (4 * GROUP)) + 3) * 4 + chunk) + 4
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
