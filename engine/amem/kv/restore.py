"""The memory of a restore: what blocks are read straight into, in the form that attention reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem.kv.codec import GROUP
from amem.kv.memory import unfilled, views_of
from amem.kv.run import BLOCK_GROUPS
from amem.kv.sequence import StateLayout, first_block_seen

Buffer = npt.NDArray[Any]
Parts = dict[str, mx.array]


class RestoreBuffers:
    """Room for the stored groups of a sequence of ``n_tokens``; nothing is copied between the files and attention.

    Made, and given to `SequenceState.adopt`, in the owner thread. In between any thread fills the views that `block`
    gives; different blocks may be filled at the same time. A full lane is one run; a windowed one has a run for each
    block that its window touches.
    """

    def __init__(self, layout: StateLayout, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.n_groups = n_tokens // GROUP
        self._groups = layout.spec.groups
        self.first_groups = [  #: the first group held of each lane
            min(first_block_seen(group, n_tokens) * BLOCK_GROUPS, self.n_groups) for group in self._groups
        ]
        shapes = {
            (lane, run, name): ((len(group.layers), size, *dims), dtype)
            for lane, group in enumerate(self._groups)
            for run, size in enumerate(self._run_sizes(lane))
            for name, (dims, dtype) in layout.codec.part_shapes(layout.shape(lane)).items()
        }
        arrays = unfilled({" ".join(map(str, key)): shape for key, shape in shapes.items()})
        buffers = views_of(arrays)
        self.runs: list[list[Parts]] = [[{} for _ in self._run_sizes(lane)] for lane in range(len(self._groups))]
        self._views: list[list[dict[str, Buffer]]] = [[{} for _ in runs] for runs in self.runs]
        for lane, run, name in shapes:
            key = f"{lane} {run} {name}"
            self.runs[lane][run][name] = arrays[key]  # [layers, groups, ...]
            self._views[lane][run][name] = buffers[key]
        self._clear_what_no_block_fills()
        self.first = self._first_tokens(layout)  #: exact first tokens, ``<lane>.<k or v>.first``

    def _run_sizes(self, lane: int) -> list[int]:
        """Groups of each run of a lane."""
        held = self.n_groups - self.first_groups[lane]
        if self._groups[lane].window is None:
            return [held] if held else []
        return [BLOCK_GROUPS] * -(-held // BLOCK_GROUPS)

    def _clear_what_no_block_fills(self) -> None:
        """Room for groups to come in a windowed lane's last run: what was in memory before must not stay there."""
        for lane, views in enumerate(self._views):
            n_filled = (self.n_groups - self.first_groups[lane]) % BLOCK_GROUPS
            if views and n_filled and self._groups[lane].window is not None:
                for view in views[-1].values():
                    view[:, n_filled:] = 0

    def _first_tokens(self, layout: StateLayout) -> dict[str, Buffer]:
        dtype = np.dtype(np.uint16 if layout.dtype == mx.bfloat16 else layout.spec.dtype)
        return {
            f"{lane}.{name}.first": np.empty((len(group.layers), group.n_kv_heads, layout.codec.n_exact, dim), dtype)
            for lane, group in enumerate(self._groups)
            for name, dim in (("k", group.k_dim), ("v", group.v_dim))
            if layout.codec.n_exact and self.n_groups and self.first_groups[lane] == 0
        }

    @property
    def n_blocks(self) -> int:
        """Blocks that hold the stored groups."""
        return -(-self.n_groups // BLOCK_GROUPS)

    def block(self, index: int) -> dict[str, Buffer]:
        """Where a block's tensors belong: views by name, ``[layers, groups, ...]``, of lanes that still see the block.

        Of a block in which the sequence ends there is room for its first groups only: see `put`.
        """
        start = index * BLOCK_GROUPS
        count = min(BLOCK_GROUPS, self.n_groups - start)
        targets: dict[str, Buffer] = {}
        for lane, group in enumerate(self._groups):
            at = start - self.first_groups[lane]
            if at >= 0 and count > 0:
                run, at = (0, at) if group.window is None else (at // BLOCK_GROUPS, 0)
                targets |= {f"{lane}.{name}": view[:, at : at + count] for name, view in self._views[lane][run].items()}
        return targets | self.first if index == 0 else targets

    def put(self, index: int, tensors: Mapping[str, Buffer]) -> None:
        """Copy what the sequence has of a block from the whole block's tensors, where they cannot be read in place."""
        for name, target in self.block(index).items():
            target[...] = tensors[name] if name in self.first else tensors[name][:, : target.shape[1]]
