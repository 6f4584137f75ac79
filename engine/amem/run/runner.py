"""The model's forward pass over sequences."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from amem.kv.cache import BatchQuantizedKVCache
from amem.kv.sequence import SequenceState
from amem.model import blas
from amem.run.threads import PREFILL, ThreadChoice


class PrefillChunk:
    """One chunk of a prompt on its way through the model: laid out at once, computed layer by layer.

    Where it is paused changes no bit of it, unlike a smaller chunk, so it may depend on the time. Until it is done its
    sequence counts tokens whose K and V are not there yet.
    """

    def __init__(self, pending: Sequence[mx.array]) -> None:
        self._pending = deque(pending)
        self.seconds = 0.0  #: computed so far

    def advance(self, seconds: float) -> bool:
        """Compute for about this long, a layer at least. True: it is done."""
        blas.set_threads(PREFILL)
        started = time.perf_counter()
        while self._pending:
            mx.eval(self._pending.popleft())
            if time.perf_counter() - started >= seconds:
                break
        self.seconds += time.perf_counter() - started
        return not self._pending


class Runner:
    """Feeds tokens to the model. ``template`` makes the model's own cache objects."""

    def __init__(self, model: Callable[..., mx.array], template: Callable[[], list[Any]]) -> None:
        self._model = model
        self._template = template
        self._threads = ThreadChoice()

    def prefill(self, sequence: SequenceState, token_ids: Sequence[int]) -> PrefillChunk:
        """Begin to compute the K and V of some tokens. No logits: the output head costs nothing."""
        cache = BatchQuantizedKVCache([sequence], self._template)
        cache.begin(len(token_ids))
        self._model(mx.array([list(token_ids)]), cache=cache.layers)
        return PrefillChunk(cache.end(len(token_ids)))

    def decode(self, sequences: Sequence[SequenceState], token_ids: Sequence[int]) -> mx.array:
        """Feed one token to each sequence: float32 logits ``[B, V]``, evaluated."""
        choice = self._threads.pick() if len(sequences) == 1 else PREFILL
        started = time.perf_counter()
        blas.set_threads(choice)
        cache = BatchQuantizedKVCache(sequences, self._template)
        cache.begin(1)
        logits = self._model(mx.array([[token] for token in token_ids]), cache=cache.layers)[:, -1].astype(mx.float32)
        mx.eval(logits, cache.end(1))
        if len(sequences) == 1:
            self._threads.record(choice, time.perf_counter() - started)
        return logits
