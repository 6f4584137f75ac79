"""The model's forward pass over sequences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from greenlet import greenlet

from amem.kv.backend import REFERENCE, Backend
from amem.kv.cache import BatchQuantizedKVCache
from amem.kv.sequence import SequenceState
from amem.model import blas
from amem.model.hook import gated
from amem.run.threads import PREFILL, ThreadChoice


class PrefillChunk:
    """One chunk of a prompt on its way through the model, which can be left and taken up again between two layers.

    Where it is paused changes no bit of it, unlike a smaller chunk, so it may depend on the time. Until it is done its
    sequence holds K and V that it does not count yet. The model's own call is what is paused, so it runs on a stack of
    its own (a greenlet), in the thread that advances it.
    """

    def __init__(self, compute: Callable[[Callable[[], None]], None]) -> None:
        self._stack = greenlet(lambda: compute(self._pause))
        self._until = 0.0
        self.seconds = 0.0  #: computed so far

    def advance(self, seconds: float) -> bool:
        """Compute for about this long, a layer at least. True: it is done."""
        blas.set_threads(PREFILL)
        started = time.perf_counter()
        self._until = started + seconds
        self._stack.switch()
        self.seconds += time.perf_counter() - started
        return bool(self._stack.dead)

    def _pause(self) -> None:
        """Called after each layer: goes back to who advances this chunk if the time is over."""
        if time.perf_counter() >= self._until:
            assert self._stack.parent is not None
            self._stack.parent.switch()


class Runner:
    """Feeds tokens to the model. ``template`` makes the model's own cache objects.

    A decode step leaves the gates to MLX: for one token they take less time than to evaluate them.
    """

    def __init__(
        self,
        model: Callable[..., mx.array],
        template: Callable[[], list[Any]],
        backend: Backend = REFERENCE,
    ) -> None:
        self._attention = backend.attend
        self._gate, self._evaluated = backend.gate, backend.evaluated
        self._model = model
        self._template = template
        self._threads = ThreadChoice()

    def prefill(self, sequence: SequenceState, token_ids: Sequence[int]) -> PrefillChunk:
        """Begin to compute the K and V of some tokens. No logits: the output head costs nothing.

        Raises
        ------
            MemoryBudgetError: no room was reserved and the budget has none.
        """

        def compute(pause: Callable[[], None]) -> None:
            def pausing(attend: Callable[..., Any]) -> Callable[..., Any]:
                def attend_and_pause(*args: Any, **options: Any) -> Any:
                    out = attend(*args, **options)
                    pause()  # an attention that evaluates its arrays has computed all layers up to here
                    return out

                return attend_and_pause

            evaluated = self._evaluated and replace(self._evaluated, attend=pausing(self._evaluated.attend))
            cache = BatchQuantizedKVCache([sequence], self._template, pausing(self._attention), evaluated)
            with gated(self._gate):
                self._model(mx.array([list(token_ids)]), cache=cache.layers)
            for array in cache.end(len(token_ids)):
                mx.eval(array)
                pause()

        sequence.begin_step(len(token_ids))
        return PrefillChunk(compute)

    def score(self, sequence: SequenceState, token_ids: Sequence[int]) -> mx.array:
        """Feed some tokens to a sequence: float32 logits ``[L, V]``, one row after each of them, evaluated."""
        blas.set_threads(PREFILL)
        cache = BatchQuantizedKVCache([sequence], self._template, self._attention, self._evaluated)
        cache.begin(len(token_ids))
        with gated(self._gate):
            logits = self._model(mx.array([list(token_ids)]), cache=cache.layers)[0].astype(mx.float32)
        mx.eval(logits, cache.end(len(token_ids)))
        return logits

    def decode(self, sequences: Sequence[SequenceState], token_ids: Sequence[int]) -> mx.array:
        """Feed one token to each sequence: float32 logits ``[B, V]``, evaluated."""
        choosing = len(sequences) == 1 and not blas.rows_sent()  # the library has nothing to do otherwise
        choice = self._threads.pick() if choosing else PREFILL
        started = time.perf_counter()
        blas.set_threads(choice)
        cache = BatchQuantizedKVCache(sequences, self._template, self._attention, self._evaluated)
        cache.begin(1)
        logits = self._model(mx.array([[token] for token in token_ids]), cache=cache.layers)[:, -1].astype(mx.float32)
        mx.eval(logits, cache.end(1))
        if choosing:
            self._threads.record(choice, time.perf_counter() - started)
        return logits
