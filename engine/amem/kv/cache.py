"""What mlx-lm's models receive as their cache: one view for each layer over a ragged batch of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import ArraysCache, CacheList

from amem.kv import attention as reference
from amem.kv.attention import LayerView
from amem.kv.backend import Attend, Evaluated
from amem.kv.sequence import SequenceState

Floats = npt.NDArray[np.float32]


class LayerCache:
    """The cache of one attention layer for one step.

    It follows the protocol that models really use: ``offset``, ``make_mask``, ``update_and_fetch``; the model's call of
    ``scaled_dot_product_attention`` then comes to `attend`, which needs neither the K and V nor the mask it is given.
    It knows nothing that leads back to it, so that the K and V that it has seen are free as soon as the step is over.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceState],
        slot: int,
        offset: int | mx.array,
        attention: Attend,
        evaluated: Evaluated | None = None,
    ) -> None:
        self._offset = offset
        self._evaluated = evaluated
        self._sequences = sequences
        self._slot = slot
        self._attention = attention
        self._views: list[LayerView] = []

    @property
    def offset(self) -> int | mx.array:
        """Tokens before this step: an int, or ``[B]`` for a batch of several."""
        return self._offset

    @property
    def positions(self) -> tuple[int, ...] | None:
        """The same as numbers, of each sequence; None if `attend_evaluated` is not to be called."""
        return tuple(sequence.n_tokens for sequence in self._sequences) if self._evaluated is not None else None

    def make_mask(self, *_args: object, **_kwargs: object) -> None:
        """No mask: `attend` makes its own."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a step's K and V ``[B, H, L, D]``, row by row."""
        self._views = [
            sequence.append(self._slot, keys[row], values[row]) for row, sequence in enumerate(self._sequences)
        ]
        return keys, values

    def attend(self, queries: mx.array, *, scale: float, mask: object, sinks: mx.array | None) -> mx.array:
        """Attention of ``queries [B, Hq, L, D]``, each row over its own sequence."""
        del mask  # the model's own: positions decide here
        rows = [
            self._attention(
                queries[row], view, start=sequence.n_tokens, scale=scale, codec=sequence.layout.codec, sinks=sinks
            )
            for row, (view, sequence) in enumerate(zip(self._views, self._sequences, strict=True))
        ]
        return mx.stack(rows)

    def attend_evaluated(self, q: Floats, k: Floats, v: Floats, scale: float) -> Floats:
        """Append a step's K and V ``[B, H, L, D]``, float32, and attend to all with ``q``; gives ``[B, Hq, L, Dv]``.

        The same as `update_and_fetch` and `attend`, but single tokens wait for nothing of MLX's.
        """
        assert self._evaluated is not None
        rows = []
        for row, sequence in enumerate(self._sequences):
            view = sequence.append(self._slot, mx.array(k[row]), mx.array(v[row]), self._evaluated.join)
            start, codec = sequence.n_tokens, sequence.layout.codec
            rows.append(self._evaluated.attend(q[row], view, start=start, scale=scale, codec=codec))
        return np.stack(rows)


class BatchQuantizedKVCache:
    """A step's cache over sequences of any lengths: no padding, nothing merged or copied when one joins or leaves.

    ``template`` makes the model's own cache objects (`mlx_lm.models.cache.make_prompt_cache`): attention slots are
    replaced by ours, recurrent ones are filled with the sequences' states.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceState],
        template: Callable[[], list[Any]],
        attention: Attend = reference.attend,
        evaluated: Evaluated | None = None,
    ) -> None:
        self._attention, self._evaluated = attention, evaluated
        self.sequences = list(sequences)
        self.offset: int | mx.array = (
            self.sequences[0].n_tokens
            if len(self.sequences) == 1
            else mx.array([sequence.n_tokens for sequence in self.sequences])
        )
        self._recurrent: dict[int, ArraysCache] = {}
        self._slot = 0
        self.layers = [self._adopt(cache) for cache in template()]

    def _adopt(self, cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(self._adopt(part) for part in cache.caches))
        slot = self._slot
        self._slot += 1
        if not isinstance(cache, ArraysCache):
            return LayerCache(self.sequences, slot, self.offset, self._attention, self._evaluated)
        rows = []
        for sequence in self.sequences:
            row = ArraysCache(len(cache.cache))
            state: list[Any] = sequence.recurrent.get(slot) or [None] * len(cache.cache)
            row.cache = list(state)
            rows.append(row)
        joined = rows[0] if len(rows) == 1 else ArraysCache.merge(rows)
        self._recurrent[slot] = joined
        return joined

    def begin(self, length: int) -> None:
        """Prepare a step of ``length`` tokens for every sequence."""
        for sequence in self.sequences:
            sequence.begin_step(length)

    def end(self, length: int) -> list[mx.array]:
        """Count the step; the arrays that are to be evaluated with its logits."""
        for row, sequence in enumerate(self.sequences):
            for slot, cache in self._recurrent.items():
                own = cache if len(self.sequences) == 1 else cache.extract(row)
                sequence.recurrent[slot] = [*own.cache]
            sequence.end_step(length)
        return [array for sequence in self.sequences for array in sequence.pending()]
