"""A text fed through the caches of one codec, with the logits of every position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from amem.kv.backend import REFERENCE, Backend
from amem.kv.codec import make_codec
from amem.kv.pool import Pool
from amem.kv.sequence import SequenceState, StateLayout
from amem.model.spec import ModelCacheSpec
from amem.run.runner import Runner

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
    form, whatever the chunks are. It belongs to the thread that made the sequence, and who made it releases it.
    """

    def __init__(self, runner: Runner, sequence: SequenceState, chunk: int = CHUNK) -> None:
        self._runner = runner
        self._sequence = sequence
        self._chunk = chunk  # the most tokens of one step

    @classmethod
    def fresh(cls, model: Any, layout: StateLayout, *, backend: Backend = REFERENCE, chunk: int = CHUNK) -> Replay:
        """One with an empty sequence of its own, in no budget. The model's attention is hooked already."""
        runner = Runner(model, lambda: make_prompt_cache(model), backend)
        return cls(runner, SequenceState(layout, Pool(1 << 60)), chunk)

    def feed(self, token_ids: Sequence[int]) -> Logits:
        """Logits ``[L, V]``, one row after each of the tokens."""
        pieces = [token_ids[at : at + self._chunk] for at in range(0, len(token_ids), self._chunk)]
        return np.concatenate([np.array(self._runner.score(self._sequence, piece)) for piece in pieces])
