"""A text fed through the caches of one codec, with the logits of every position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from amem.kv.cache import BatchQuantizedKVCache
from amem.kv.codec import make_codec
from amem.kv.pool import Pool
from amem.kv.sequence import SequenceState, StateLayout
from amem.model import blas
from amem.model.spec import ModelCacheSpec
from amem.run.threads import PREFILL

Logits = npt.NDArray[np.float32]

CHUNK = 128  #: tokens of a step, as the engine prefills on a CPU

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class Fed(Protocol):
    """Anything that takes a text piece by piece and says what it expects next."""

    def feed(self, token_ids: Sequence[int]) -> Logits:
        """Logits ``[L, V]``, one row after each of the tokens."""
        ...


def exact_layout(spec: ModelCacheSpec) -> StateLayout:
    """A model's state at full precision: everything in the dtype that the model computes in."""
    return StateLayout(spec, make_codec("exact", compute_dtype=_DTYPES[spec.dtype]))


class Replay:
    """Feeds tokens to a model over one sequence, which may hold tokens already.

    The sequence's caches are those of the engine: what a position sees of earlier groups is read from their stored
    form, whatever the chunks are. It belongs to the thread that made it.

    Args:
        model: as mlx-lm loads it, its attention hooked (`amem.model.hook.install`).
        sequence: is released by whoever made it.
        chunk: the most tokens of one step.
    """

    def __init__(self, model: Any, sequence: SequenceState, chunk: int = CHUNK) -> None:
        self._model = model
        self._chunk = chunk
        self.sequence = sequence

    @classmethod
    def fresh(cls, model: Any, layout: StateLayout, chunk: int = CHUNK) -> Replay:
        """One with an empty sequence of its own, in no budget."""
        return cls(model, SequenceState(layout, Pool(1 << 60)), chunk)

    def feed(self, token_ids: Sequence[int]) -> Logits:
        """Logits ``[L, V]``, one row after each of the tokens."""
        pieces = [token_ids[at : at + self._chunk] for at in range(0, len(token_ids), self._chunk)]
        return np.concatenate([self._step(piece) for piece in pieces])

    def skip(self, token_ids: Sequence[int]) -> None:
        """Feed tokens whose logits nobody wants; at most a chunk of them."""
        cache = self._begin(token_ids)
        self._model(mx.array([list(token_ids)]), cache=cache.layers)
        mx.eval(cache.end(len(token_ids)))

    def _step(self, piece: Sequence[int]) -> Logits:
        cache = self._begin(piece)
        logits = self._model(mx.array([list(piece)]), cache=cache.layers)[0].astype(mx.float32)
        mx.eval(logits, cache.end(len(piece)))
        return np.array(logits)

    def _begin(self, piece: Sequence[int]) -> BatchQuantizedKVCache:
        blas.set_threads(PREFILL)
        cache = BatchQuantizedKVCache([self.sequence], lambda: make_prompt_cache(self._model))
        cache.begin(len(piece))
        return cache
