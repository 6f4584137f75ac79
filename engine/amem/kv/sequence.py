"""The attention state of one sequence in memory, and its plain form: named numpy buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem.errors import UnsupportedModel
from amem.kv.attention import LayerView
from amem.kv.codec import GROUP, MOST_FLOAT16, Codec, Shape
from amem.kv.pool import Allocation, Pool
from amem.kv.run import BLOCK_GROUPS, Lane, Piece
from amem.model.spec import WIDE, LayerGroup, ModelCacheSpec

if TYPE_CHECKING:
    from amem.kv.restore import RestoreBuffers

Buffer = npt.NDArray[Any]
Buffers = Mapping[str, Buffer]
Exact = tuple[mx.array, mx.array]
Join = Callable[[mx.array, mx.array], mx.array]

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def to_numpy(array: mx.array) -> Buffer:
    """The bits of an array; bfloat16, which numpy lacks, as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=True)


def to_mlx(buffer: Buffer, dtype: mx.Dtype) -> mx.array:
    """Undo `to_numpy`."""
    array = mx.array(buffer)
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array


def _join(one: mx.array, other: mx.array) -> mx.array:
    """``[H, n, D]`` and ``[H, m, D]`` as ``[H, n + m, D]``."""
    return mx.concatenate([one, other], axis=1)


@dataclass(frozen=True)
class StateLayout:
    """How a model's K/V are stored: its cache spec and a codec. All sequences of an engine share one."""

    spec: ModelCacheSpec
    codec: Codec

    @property
    def dtype(self) -> mx.Dtype:
        """Of open groups: the model's compute dtype."""
        return _DTYPES[self.spec.dtype]

    def shape(self, lane: int) -> Shape:
        return shape_of(self.spec.groups[lane])

    def slots(self) -> dict[int, tuple[int, int]]:
        """Cache slot -> (lane, layer within the lane)."""
        return {
            slot: (lane, layer)
            for lane, group in enumerate(self.spec.groups)
            for layer, slot in enumerate(group.layers)
        }

    def exact_nbytes(self, n_tokens: int) -> int:
        """Bytes of this many tokens in the compute dtype, all attention layers."""
        per_token = sum(
            len(group.layers) * group.n_kv_heads * (group.k_dim + group.v_dim) for group in self.spec.groups
        )
        return n_tokens * per_token * self.dtype.size

    @property
    def open_nbytes(self) -> int:
        """Bytes that a sequence takes beside its runs: its open group, first tokens, recurrent state."""
        return self.exact_nbytes(GROUP + self.codec.n_exact) + self.spec.state_nbytes

    @property
    def turn_nbytes(self) -> int:
        """Bytes that a running turn takes besides: the group before the open one; its checkpoint's group and state."""
        return self.exact_nbytes(2 * GROUP) + self.spec.state_nbytes


@dataclass
class _OpenLayer:
    """The exact groups of one layer."""

    exact: Exact | None = None  #: K, V [H, n, D] of the open group, 1..64 tokens
    before: Exact | None = None  #: of the group before it, while the turn may still be cut back
    first: Exact | None = None  #: of the first tokens, where the codec keeps them


@dataclass(frozen=True)
class Checkpoint:
    """A point to which a sequence can be rolled back, as long as nothing that it needs was dropped."""

    n_tokens: int
    n_open: int
    groups: tuple[tuple[int, int], ...]  #: (first held, end) of each lane
    layers: dict[int, _OpenLayer]
    recurrent: dict[int, list[mx.array | None]]


class SequenceState:
    """All layers of one sequence. Not thread-safe: it belongs to the owner thread."""

    def __init__(self, layout: StateLayout, pool: Pool) -> None:
        self.layout = layout
        self.n_tokens = 0
        self._n_open = 0  # tokens in the open group: 0 only when the sequence is empty or a turn has just closed
        self._pool = pool
        self.lanes = [
            Lane(pool, layout.codec, shape_of(group), len(group.layers), group.window) for group in layout.spec.groups
        ]
        self.recurrent: dict[int, list[mx.array | None]] = {}
        self._slots = layout.slots()
        self._pieces: list[list[Piece]] = []
        self._open = {slot: _OpenLayer() for slot in self._slots}
        self._fixed: Allocation = pool.allocate(layout.open_nbytes)
        self._turn: Allocation | None = None  # while a turn runs

    @property
    def n_groups(self) -> int:
        """Groups that are stored in quantized form."""
        return (self.n_tokens - self._n_open) // GROUP

    # -- memory ------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes in memory; runs that a fork shares are counted here too."""
        turn = self._turn.nbytes if self._turn is not None else 0
        return self._fixed.nbytes + turn + sum(lane.nbytes for lane in self.lanes)

    def reserve(self, n_tokens: int, chunk: int = 0) -> None:
        """Make room for a turn up to this many tokens in all, prefilled in chunks of ``chunk``; `settle` ends it.

        Raises
        ------
            MemoryBudgetError: the budget does not have it. Nothing has changed then.
        """
        missing = self.missing_nbytes(n_tokens, chunk)
        if missing > self._pool.free:
            self._pool.allocate(missing)  # raises, with the figures
        self._begin_turn()
        for lane in self.lanes:
            lane.reserve(self._groups_to_reserve(lane, n_tokens, chunk))

    def missing_nbytes(self, n_tokens: int, chunk: int = 0) -> int:
        """Bytes that `reserve` would allocate."""
        turn = self.layout.turn_nbytes if self._turn is None else 0
        return turn + sum(lane.missing_nbytes(self._groups_to_reserve(lane, n_tokens, chunk)) for lane in self.lanes)

    def _begin_turn(self) -> None:
        if self._turn is None:
            self._turn = self._pool.allocate(self.layout.turn_nbytes)

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.release()
            self._turn = None

    def _groups_to_reserve(self, lane: Lane, n_tokens: int, chunk: int) -> int:
        more = max(0, -(-n_tokens // GROUP) - lane.n_groups)
        if lane.window is None:
            return more
        most = (-(-lane.window // (GROUP * BLOCK_GROUPS)) + 2) * BLOCK_GROUPS + -(-chunk // GROUP)
        return min(more, max(0, most - lane.n_own_groups))

    def release(self) -> None:
        """Give all memory back. The sequence cannot be used afterwards."""
        for lane in self.lanes:
            lane.release()
        self._end_turn()
        self._fixed.release()
        self._open, self.recurrent = {}, {}

    # -- one step of the model -----------------------------------------------------------------------------------

    def begin_step(self, length: int) -> None:
        """Prepare a step of ``length`` tokens: claim room for the groups that it completes.

        Raises
        ------
            MemoryBudgetError: no room was reserved and the budget has none.
        """
        n_sealed = (self._n_open + length - 1) // GROUP  # the last group stays open, even if it is full
        self._begin_turn()
        self._drop_unseen()
        self._pieces = [lane.claim(n_sealed) if n_sealed else [] for lane in self.lanes]

    def _drop_unseen(self) -> None:
        for lane in self.lanes:
            if lane.window is not None:
                lane.drop_before(self.n_tokens - lane.window + 1)

    def append(self, slot: int, k: mx.array, v: mx.array, join: Join = _join) -> LayerView:
        """Add a step's K and V ``[H, L, D]`` to one layer, by ``join``; gives what the step's queries see."""
        lane_index, layer = self._slots[slot]
        lane, held = self.lanes[lane_index], self._open[slot]
        open_start = self.n_tokens - self._n_open
        if held.exact is not None:
            k, v = join(held.exact[0], k), join(held.exact[1], v)
        cut = self._write_groups(lane_index, layer, held, k, v)
        held.exact = (_copy(k[:, cut:]), _copy(v[:, cut:])) if cut else (k, v)
        exact_start = self.n_tokens // GROUP * GROUP
        skip = exact_start - open_start
        if skip:
            k, v = k[:, skip:], v[:, skip:]
        stretches = [span.run.stretch(layer, span.start_group, span.n_groups) for span in lane.spans]
        first = held.first if stretches and lane.first_group == 0 else None
        return LayerView(stretches, first, k, v, exact_start, lane.window)

    def _write_groups(self, lane_index: int, layer: int, held: _OpenLayer, k: mx.array, v: mx.array) -> int:
        """Quantize the step's complete groups of one layer into their claimed room; the tokens that they take."""
        pieces = self._pieces[lane_index]
        cut = sum(piece.count for piece in pieces) * GROUP
        if not cut:
            return 0
        codec = self.layout.codec
        if codec.n_exact and held.first is None:
            held.first = (_copy(k[:, : codec.n_exact]), _copy(v[:, : codec.n_exact]))
        parts = codec.quantize(k[:, :cut], v[:, :cut])
        for piece in pieces:
            some = {name: array[piece.first : piece.first + piece.count] for name, array in parts.items()}
            piece.run.write(layer, piece.at, some)
        held.before = (_copy(k[:, cut - GROUP : cut]), _copy(v[:, cut - GROUP : cut]))
        return cut

    def end_step(self, length: int) -> None:
        """Count the step's tokens. All layers must have been appended to."""
        self.n_tokens += length
        self._n_open = (self._n_open + length - 1) % GROUP + 1

    def pending(self) -> list[mx.array]:
        """Arrays of the last step that are still to be evaluated."""
        arrays = [
            array
            for held in self._open.values()
            for pair in (held.exact, held.before, held.first)
            if pair
            for array in pair
        ]
        written = {id(piece.run): piece.run for pieces in self._pieces for piece in pieces}
        for run in written.values():
            arrays.extend(run.arrays())
        arrays.extend(array for state in self.recurrent.values() for array in state if array is not None)
        return arrays

    # -- ends of turns -------------------------------------------------------------------------------------------

    def close_turn(self) -> None:
        """Seal a full open group, so that what is kept depends on the number of tokens alone."""
        if self._n_open == GROUP:
            self._pieces = [lane.claim(1) for lane in self.lanes]
            for slot, (lane_index, layer) in self._slots.items():
                held = self._open[slot]
                if held.exact is not None:
                    self._write_groups(lane_index, layer, held, *held.exact)
                held.exact = None
            self._n_open = 0
            mx.eval(self.pending())
        for held in self._open.values():
            held.before = None

    def settle(self) -> None:
        """Give back what only a running turn needs. What is to be stored of a turn must have been exported before."""
        for held in self._open.values():
            held.before = None
        self._pieces = []
        self._drop_unseen()
        for lane in self.lanes:
            lane.trim()
        self._end_turn()

    def cut(self, n_tokens: int) -> bool:
        """Forget the tokens from ``n_tokens`` on. False (and nothing changes) where that is not possible.

        Possible back into the group before the open one while its exact form is held; never with recurrent layers.
        """
        if n_tokens == self.n_tokens:
            return True
        sealed = self.n_tokens - self._n_open
        if n_tokens > self.n_tokens or self.recurrent:
            return False
        if n_tokens < sealed:
            held = next(iter(self._open.values()), None)
            if n_tokens < sealed - GROUP or held is None or held.before is None:
                return False
            if not all(lane.truncate(sealed // GROUP - 1) for lane in self.lanes):
                return False
            for layer in self._open.values():
                layer.exact, layer.before = layer.before, None
                if sealed == GROUP:
                    layer.first = None
            sealed -= GROUP
        keep = n_tokens - sealed
        for layer in self._open.values():
            if layer.exact is not None:
                layer.exact = (_copy(layer.exact[0][:, :keep]), _copy(layer.exact[1][:, :keep])) if keep else None
        self.n_tokens, self._n_open, self._pieces = n_tokens, keep, []
        mx.eval(self.pending())
        return True

    def checkpoint(self) -> Checkpoint:
        """Remember this point; costs nothing, since arrays are never changed in place."""
        return Checkpoint(
            self.n_tokens,
            self._n_open,
            tuple((lane.first_group, lane.n_groups) for lane in self.lanes),
            {slot: replace(held) for slot, held in self._open.items()},
            {slot: list(state) for slot, state in self.recurrent.items()},
        )

    def rollback(self, to: Checkpoint) -> bool:
        """Go back to a checkpoint. False where groups that it needs were dropped: then the sequence is of no use."""
        for lane, (first_group, n_groups) in zip(self.lanes, to.groups, strict=True):
            if lane.first_group != first_group or not lane.truncate(n_groups):
                return False
        self.n_tokens, self._n_open, self._pieces = to.n_tokens, to.n_open, []
        self._open = {slot: replace(held) for slot, held in to.layers.items()}
        self.recurrent = {slot: list(state) for slot, state in to.recurrent.items()}
        return True

    def fork(self) -> SequenceState:
        """A second sequence at the same point: it reads the same runs and copies nothing.

        Raises
        ------
            MemoryBudgetError: the budget has no room for another open group.
        """
        twin = SequenceState(self.layout, self._pool)
        twin.lanes = [lane.fork() for lane in self.lanes]
        twin.n_tokens, twin._n_open = self.n_tokens, self._n_open
        twin._open = {slot: replace(held, before=None) for slot, held in self._open.items()}
        twin.recurrent = {slot: list(state) for slot, state in self.recurrent.items()}
        return twin

    # -- plain form ------------------------------------------------------------------------------------------------

    def export_block(self, start_group: int, n_groups: int) -> dict[str, Buffer]:
        """Stored groups as buffers ``<lane>.<part> [layers, groups, ...]``; the first block has the exact tokens.

        Raises
        ------
            UnsupportedModel: float16 was too small for some of them.
        """
        out: dict[str, Buffer] = {}
        for index, lane in enumerate(self.lanes):
            for name in lane.codec.part_shapes(lane.shape):
                layers = [lane.read(layer, name, start_group, n_groups) for layer in range(lane.n_layers)]
                out[f"{index}.{name}"] = np.stack([to_numpy(array) for array in layers])
                _check_range(out[f"{index}.{name}"], lane.codec.name)
        if start_group == 0:
            out |= self._export_exact("first", lambda held: held.first)
        return out

    def export_snapshot(self) -> dict[str, Buffer]:
        """The open group as ``<lane>.k.open [layers, H, n, D]``, and recurrent state as ``r<slot>.<i>``."""
        out = self._export_exact("open", lambda held: held.exact)
        for slot, state in self.recurrent.items():
            out |= {f"r{slot}.{i}": to_numpy(array) for i, array in enumerate(state) if array is not None}
        return out

    def _export_exact(self, label: str, pick: Callable[[_OpenLayer], Exact | None]) -> dict[str, Buffer]:
        out: dict[str, Buffer] = {}
        for index, group in enumerate(self.layout.spec.groups):
            pairs = [pair for slot in group.layers if (pair := pick(self._open[slot])) is not None]
            for i, name in enumerate("kv"):
                if pairs:
                    out[f"{index}.{name}.{label}"] = np.stack([to_numpy(pair[i]) for pair in pairs])
        return out

    def adopt(self, stored: RestoreBuffers, snapshot: Buffers) -> None:
        """Take over restored state, whose buffers have been filled; the sequence must be empty.

        Raises
        ------
            MemoryBudgetError: the budget does not have the room.
        """
        dtype = self.layout.dtype
        for index, (lane, group) in enumerate(zip(self.lanes, self.layout.spec.groups, strict=True)):
            lane.adopt(stored.runs[index], stored.first_groups[index], stored.n_groups)
            for layer, slot in enumerate(group.layers):
                held = self._open[slot]
                held.exact = _pair(snapshot, index, "open", layer, dtype)
                held.first = _pair(stored.first, index, "first", layer, dtype)
        for name, buffer in snapshot.items():
            if name.startswith("r"):
                slot, i = (int(x) for x in name[1:].split("."))
                state = self.recurrent.setdefault(slot, [])
                state.extend([None] * (i + 1 - len(state)))
                state[i] = to_mlx(buffer, _state_dtype(buffer, dtype))
        self.n_tokens, self._n_open = stored.n_tokens, stored.n_tokens - stored.n_groups * GROUP
        self._pieces = [[Piece(span.run, 0, 0, 0) for span in lane.spans] for lane in self.lanes]
        mx.eval(self.pending())


def first_block_seen(group: LayerGroup, n_tokens: int) -> int:
    """The first block that a query at position ``n_tokens`` can see in these layers."""
    if group.window is None:
        return 0
    return max(0, n_tokens - group.window + 1) // (GROUP * BLOCK_GROUPS)


def _pair(buffers: Buffers, lane: int, label: str, layer: int, dtype: mx.Dtype) -> Exact | None:
    if f"{lane}.k.{label}" not in buffers:
        return None
    return tuple(to_mlx(buffers[f"{lane}.{name}.{label}"][layer], dtype) for name in "kv")  # type: ignore[return-value]


def _check_range(buffer: Buffer, codec: str) -> None:
    if buffer.dtype == np.float16 and buffer.size and np.abs(buffer).max() >= MOST_FLOAT16:
        raise UnsupportedModel(
            f"the model's keys or values are too large for codec {codec!r}, whose 16-bit numbers end at 65504: "
            f'open the engine with codec="{codec}{WIDE}".'
        )


def _state_dtype(buffer: Buffer, compute: mx.Dtype) -> mx.Dtype:
    return compute if buffer.dtype == np.uint16 else mx.float32


def _copy(x: mx.array) -> mx.array:
    """A slice that does not keep its source alive."""
    return mx.contiguous(x)


def shape_of(group: LayerGroup) -> Shape:
    """The K and V shape of a lane."""
    return Shape(group.n_kv_heads, group.k_dim, group.v_dim)
