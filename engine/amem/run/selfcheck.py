"""The check at load: a few tokens through a model's own caches and through ours must give the same logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from amem.errors import UnsupportedModel
from amem.kv.backend import REFERENCE, Backend
from amem.kv.cache import BatchQuantizedKVCache, LayerCache
from amem.kv.codec import make_codec
from amem.kv.pool import Pool
from amem.kv.sequence import SequenceState, StateLayout, to_mlx
from amem.model.hook import gated, install, spy
from amem.model.spec import LayerKind, ModelCacheSpec

#: Prompt lengths. The first crosses group boundaries inside its chunks, the second one while decoding.
_PROMPTS = (150, 62)
_CHUNK = 64
_STEPS = 5
#: Logits are compared at the last tokens of each piece: a large vocabulary at every token would take a gigabyte.
_COMPARED = 8

#: Differences of logits that rounding explains, as a part of their token's spread. Half-precision attention of mlx-lm
#: rounds between its steps and ours does not, which many layers amplify.
_ROUNDING = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}


def self_check(model: Module, spec: ModelCacheSpec, backend: Backend = REFERENCE) -> float:
    """Run two prompts, chunked and then as a ragged batch, on both kinds of cache, and compare all logits.

    Gives the largest value of K, or norm of a token's V in one head, that it met. Ours keeps everything at full
    precision here, so that only a fault makes a difference. Takes two prefills of 212 tokens and 19 decode steps.

    Raises
    ------
    UnsupportedModel
        The model does not run on our caches, some of its attention does not reach them, or its logits differ.
    """
    install(model)
    check = _Check(model, spec, backend)
    with spy() as calls:
        try:
            prompts = [_token_ids(model, length, seed) for seed, length in enumerate(_PROMPTS)]
            replies = [_token_ids(model, _STEPS, seed) for seed in (7, 8)]
            expected = [
                _run(model, [*_chunks(prompt), *([token] for token in reply)])
                for prompt, reply in zip(prompts, replies, strict=True)
            ]
            calls.clear()
            found = check.logits(prompts, replies)
        except Exception as error:
            raise UnsupportedModel(f"the model does not run on amem's caches: {error}") from error
    carried = sum(isinstance(call.cache, LayerCache) for call in calls)
    wanted = check.n_calls * sum(layer.kind is not LayerKind.RECURRENT for layer in spec.layers)
    if not carried == wanted == len(calls):
        raise UnsupportedModel(
            f"{len(calls)} attention calls were made in the self-check and {carried} of them reached amem's caches; "
            f"{wanted} were expected."
        )
    for ours, stock in zip(found, expected, strict=True):
        for phase, part in (("in prefill", slice(0, -_STEPS)), ("in a batch", slice(-_STEPS, None))):
            apart = _apart(ours[part], stock[part])
            if not apart <= _ROUNDING[spec.dtype]:
                raise UnsupportedModel(
                    f"the model's logits differ on amem's caches {phase}: by {apart:.2g} of their spread, where "
                    f"{_ROUNDING[spec.dtype]:g} is explained by rounding."
                )
    return check.kv_peak


class _Check:
    """Runs a model on our caches, and counts how often it was called."""

    def __init__(self, model: Module, spec: ModelCacheSpec, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        dtype = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[spec.dtype]
        self._layout = StateLayout(spec, make_codec("exact", compute_dtype=dtype))
        self.n_calls = 0
        self.kv_peak = 0.0

    def logits(self, prompts: Sequence[list[int]], replies: Sequence[list[int]]) -> list[mx.array]:
        """Logits ``[n, V]`` of each prompt, prefilled alone, with its reply, decoded as one batch."""
        pool = Pool(1 << 60)
        sequences = [SequenceState(self._layout, pool) for _ in prompts]
        pieces = [
            [self._step([sequence], [chunk])[0] for chunk in _chunks(prompt)]
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]
        for step in range(_STEPS):
            rows = self._step(sequences, [[reply[step]] for reply in replies])
            for row, piece in enumerate(pieces):
                piece.append(rows[row])
        for sequence in sequences:
            self.kv_peak = max(self.kv_peak, _kv_peak(sequence))
            sequence.release()
        return [mx.concatenate(piece) for piece in pieces]

    def _step(self, sequences: list[SequenceState], token_ids: list[list[int]]) -> mx.array:
        length = len(token_ids[0])
        backend = self._backend
        cache = BatchQuantizedKVCache(
            sequences, lambda: make_prompt_cache(self._model), backend.attend, backend.evaluated
        )
        cache.begin(length)
        with gated(backend.gate if length > 1 else None):
            logits = _last(self._model(mx.array(token_ids), cache=cache.layers))
        mx.eval(logits, cache.end(length))
        self.n_calls += 1
        return logits


def _kv_peak(sequence: SequenceState) -> float:
    """The largest value of K and norm of V in a sequence of less than a block that keeps both as they are."""
    buffers = sequence.export_snapshot() | (sequence.export_block(0, sequence.n_groups) if sequence.n_groups else {})
    peak = 0.0
    for name, buffer in buffers.items():
        kind = name.split(".")[1]
        if kind in ("k", "v"):
            values = to_mlx(buffer, sequence.layout.dtype).astype(mx.float32)
            largest = mx.abs(values).max() if kind == "k" else mx.linalg.norm(values, axis=-1).max()
            peak = max(peak, cast("float", largest.item()))
    return peak


def _run(model: Any, pieces: list[list[int]]) -> mx.array:
    """Logits ``[n, V]`` of a sequence fed piece by piece on the model's own caches."""
    caches = make_prompt_cache(model)
    logits = []
    for piece in pieces:
        logits.append(_last(model(mx.array([piece]), cache=caches))[0])
        mx.eval(logits[-1])
    return mx.concatenate(logits)


def _last(logits: mx.array) -> mx.array:
    return logits[:, -_COMPARED:].astype(mx.float32)


def _chunks(prompt: list[int]) -> list[list[int]]:
    """Chunks that end on group boundaries; the last token is alone, as in every request."""
    body = [prompt[at : min(at + _CHUNK, len(prompt) - 1)] for at in range(0, len(prompt) - 1, _CHUNK)]
    return [*body, prompt[-1:]]


def _token_ids(model: Any, length: int, seed: int) -> list[int]:
    """Fixed token ids that every vocabulary has, spread over its first part."""
    logits = model(mx.array([[0]]), cache=make_prompt_cache(model))  # for its shape: never evaluated
    vocabulary = min(1000, logits.shape[-1])
    return [(seed * 101 + at * at * 7 + at * 37) % vocabulary for at in range(length)]


def _apart(logits: mx.array, stock: mx.array) -> float:
    """How far logits ``[n, V]`` are apart, as a part of their spread: the upper quartile over tokens.

    Not the worst token: a single one may flip an expert on noise.
    """
    spread = mx.maximum(stock.max(axis=-1) - stock.min(axis=-1), 1e-6)
    worst = mx.sort(mx.abs(logits - stock).max(axis=-1) / spread)  # [n]
    return cast("float", worst[(3 * worst.size) // 4].item())
