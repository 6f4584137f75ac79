"""Runs: stretches of whole groups in memory, and the lane of runs that a group of like layers owns in one sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from amem.kv.attention import Stretch
from amem.kv.codec import GROUP, Codec, Shape
from amem.kv.pool import Allocation, Pool

BLOCK_GROUPS = 4  #: groups in a block of 256 tokens
_MERGE_AT = 4  #: own runs of a lane from which on growing merges them, so that attention reads few pieces


def group_nbytes(codec: Codec, shape: Shape, n_layers: int) -> int:
    """Bytes of one stored group of 64 tokens, all layers of a lane."""
    return n_layers * sum(int(np.prod(dims)) * dtype.size for dims, dtype in codec.part_shapes(shape).values())


class Run:
    """Room for some groups of every layer of a lane, and the groups that are in it.

    A run is written from its start and never rewritten, so several sequences can read the same one; who may append is
    decided by its lane.
    """

    def __init__(self, pool: Pool, capacity: int, nbytes: int, layers: list[dict[str, mx.array]]) -> None:
        self.capacity = capacity
        self.allocation: Allocation = pool.allocate(nbytes)
        self.frozen = False  #: two sequences read it: neither may append
        self._layers = layers
        self._stretches: dict[int, Stretch] = {}  # what was last read of each layer

    def write(self, layer: int, at: int, parts: Mapping[str, mx.array]) -> None:
        """Put the parts of some groups of one layer at group ``at``."""
        self._stretches.pop(layer, None)  # its arrays are not those any more
        arrays = self._layers[layer]
        for name, new in parts.items():
            old = arrays[name]
            arrays[name] = new if new.shape[0] == self.capacity else _put(old, new, at)

    def parts(self, layer: int, start: int, stop: int) -> dict[str, mx.array]:
        """The parts of groups ``start..stop-1`` of one layer."""
        return {name: array[start:stop] for name, array in self._layers[layer].items()}

    def stretch(self, layer: int, start_group: int, n_groups: int) -> Stretch:
        """The first groups of one layer, which are at ``start_group`` of the sequence: the same until it is written."""
        start, n_tokens = start_group * GROUP, n_groups * GROUP
        known = self._stretches.get(layer)
        if known is None or (known.start, known.n_tokens) != (start, n_tokens):
            known = self._stretches[layer] = Stretch(self.parts(layer, 0, n_groups), start, n_tokens)
        return known

    def arrays(self) -> list[mx.array]:
        """Every array, to be evaluated."""
        return [array for layer in self._layers for array in layer.values()]

    def release(self) -> None:
        """Drop one reference; the last one drops the tensors too."""
        self.allocation.release()
        if self.allocation.references == 0:
            self._layers, self._stretches = [], {}


def _put(old: mx.array, new: mx.array, at: int) -> mx.array:
    old[at : at + new.shape[0]] = new
    return old


@dataclass
class Span:
    """The part of a run that a lane reads: ``n_groups`` groups from the run's first on."""

    run: Run
    start_group: int  #: of the sequence, at the run's group 0
    n_groups: int = 0


@dataclass(frozen=True)
class Piece:
    """Room for ``count`` groups at group ``at`` of a run; they are the claimed groups ``first..first+count-1``."""

    run: Run
    at: int
    first: int
    count: int


@dataclass
class Lane:
    """The stored groups of all layers of one kind and shape in one sequence.

    A full lane grows by runs of amortized size; a windowed one by runs of a block each, which it drops (and uses again)
    as soon as no later query can see them.
    """

    pool: Pool
    codec: Codec
    shape: Shape
    n_layers: int
    window: int | None
    spans: list[Span] = field(default_factory=list)
    spare: list[Run] = field(default_factory=list)
    n_groups: int = 0  #: groups of the sequence that were stored, dropped ones included

    @property
    def group_nbytes(self) -> int:
        return group_nbytes(self.codec, self.shape, self.n_layers)

    @property
    def nbytes(self) -> int:
        return sum(run.allocation.nbytes for run in self._runs())

    def _runs(self) -> list[Run]:
        return [span.run for span in self.spans] + self.spare

    @property
    def n_own_groups(self) -> int:
        """Groups held in runs that no other sequence reads."""
        return sum(span.n_groups for span in self.spans if not span.run.frozen)

    @property
    def first_group(self) -> int:
        """The first group that is still held."""
        return self.spans[0].start_group if self.spans else self.n_groups

    def room(self) -> int:
        """Groups that can be appended without an allocation."""
        last = self.spans[-1] if self.spans else None
        tail = last.run.capacity - last.n_groups if last and not last.run.frozen else 0
        return tail + sum(run.capacity for run in self.spare)

    def missing_nbytes(self, n_groups: int) -> int:
        """Bytes that `reserve` would allocate."""
        return self._missing_groups(n_groups) * self.group_nbytes

    def _missing_groups(self, n_groups: int) -> int:
        if n_groups <= self.room():
            return 0
        return -(-(n_groups - self.room()) // BLOCK_GROUPS) * BLOCK_GROUPS

    def reserve(self, n_groups: int) -> None:
        """Make room for this many more groups.

        Raises
        ------
            MemoryBudgetError: the budget does not have it. Nothing has changed then.
        """
        missing = self._missing_groups(n_groups)
        if not missing:
            return
        if self.window is not None:
            if missing * self.group_nbytes > self.pool.free:
                self._new_run(missing)  # raises, with the figures
            self.spare.extend(self._new_run(BLOCK_GROUPS) for _ in range(missing // BLOCK_GROUPS))
            return
        own = [span for span in self.spans if not span.run.frozen]
        if len(own) >= _MERGE_AT and self._merge(own, missing):
            return
        self.spare.append(self._new_run(missing))

    def _new_run(self, capacity: int) -> Run:
        shapes = self.codec.part_shapes(self.shape).items()
        layers = [
            {name: mx.zeros((capacity, *dims), dtype=dtype) for name, (dims, dtype) in shapes}
            for _ in range(self.n_layers)
        ]
        return Run(self.pool, capacity, capacity * self.group_nbytes, layers)

    def _merge(self, own: list[Span], missing: int) -> bool:
        """Copy this lane's own runs into one with more room. False if the budget cannot hold both for a moment."""
        if self.spans[-len(own) :] != own:
            return False
        n_groups = sum(span.n_groups for span in own)
        capacity = n_groups + missing + n_groups // 4
        if capacity * self.group_nbytes > self.pool.free:
            return False
        merged = Span(self._new_run(capacity), own[0].start_group)
        for span in own:
            for layer in range(self.n_layers):
                merged.run.write(layer, merged.n_groups, span.run.parts(layer, 0, span.n_groups))
            merged.n_groups += span.n_groups
        mx.eval(merged.run.arrays())
        for span in own:
            span.run.release()
        for run in self.spare:
            run.release()
        self.spare = []
        self.spans[-len(own) :] = [merged]
        return True

    def claim(self, n_groups: int) -> list[Piece]:
        """Take room for groups that every layer writes in this step.

        Raises
        ------
            MemoryBudgetError: no room was reserved and the budget has none.
        """
        if n_groups > self.room():
            self.reserve(n_groups)
        pieces: list[Piece] = []
        done = 0
        while done < n_groups:
            last = self.spans[-1] if self.spans else None
            if last is None or last.run.frozen or last.n_groups == last.run.capacity:
                last = Span(self.spare.pop(0), self.n_groups)
                self.spans.append(last)
            count = min(n_groups - done, last.run.capacity - last.n_groups)
            pieces.append(Piece(last.run, last.n_groups, done, count))
            last.n_groups += count
            self.n_groups += count
            done += count
        return pieces

    def drop_before(self, position: int) -> None:
        """Let go of runs that lie wholly before a position's block; only for windowed lanes.

        A run need not begin where a block does (after a fork), and a block is stored when its last group is there: all
        of its groups must be held until then.
        """
        position = position // (GROUP * BLOCK_GROUPS) * (GROUP * BLOCK_GROUPS)
        while self.spans and (self.spans[0].start_group + self.spans[0].n_groups) * GROUP <= position:
            span = self.spans[0]
            if span.n_groups < span.run.capacity and span is self.spans[-1]:
                return
            self.spans.pop(0)
            if span.run.frozen:
                span.run.release()
            else:
                self.spare.append(span.run)

    def truncate(self, n_groups: int) -> bool:
        """Forget groups from ``n_groups`` on. False if some of the rest were dropped already: then nothing changes."""
        if n_groups < self.first_group:
            return False
        while self.spans and self.spans[-1].start_group >= n_groups and n_groups < self.n_groups:
            span = self.spans.pop()
            if span.run.frozen:
                span.run.release()
            else:
                self.spare.insert(0, span.run)
        if self.spans:
            self.spans[-1].n_groups = n_groups - self.spans[-1].start_group
        self.n_groups = n_groups
        return True

    def read(self, layer: int, name: str, start_group: int, n_groups: int) -> mx.array:
        """One part of some groups of one layer, joined across runs: ``[n_groups, ...]``."""
        pieces, end = [], start_group + n_groups
        for span in self.spans:
            first, last = max(start_group, span.start_group), min(end, span.start_group + span.n_groups)
            if first < last:
                part = span.run.parts(layer, first - span.start_group, last - span.start_group)
                pieces.append(part[name])
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=0)

    def adopt(self, runs: Sequence[Mapping[str, mx.array]], first_group: int, end_group: int) -> None:
        """Take over restored groups: parts ``[layers, groups, ...]`` of each run, full but for the last.

        Raises
        ------
            MemoryBudgetError: the budget does not have the room.
        """
        self.n_groups = first_group
        for parts in runs:
            capacity = next(iter(parts.values())).shape[1]
            # views (an index instead of a slice would copy): they share memory, so that a later write copies, too
            layers = [
                {name: array[layer : layer + 1].squeeze(0) for name, array in parts.items()}
                for layer in range(self.n_layers)
            ]
            run = Run(self.pool, capacity, capacity * self.group_nbytes, layers)
            count = min(capacity, end_group - self.n_groups)
            self.spans.append(Span(run, self.n_groups, count))
            self.n_groups += count

    def fork(self) -> Lane:
        """A lane that reads the same runs. Both append to new ones from now on."""
        for span in self.spans:
            span.run.frozen = True
            span.run.allocation.retain()
        spans = [Span(span.run, span.start_group, span.n_groups) for span in self.spans]
        return Lane(self.pool, self.codec, self.shape, self.n_layers, self.window, spans, [], self.n_groups)

    def trim(self) -> None:
        """Give back room that was reserved and not used."""
        for run in self.spare:
            run.release()
        self.spare = []

    def release(self) -> None:
        """Let go of everything."""
        for run in self._runs():
            run.release()
        self.spans, self.spare, self.n_groups = [], [], 0
