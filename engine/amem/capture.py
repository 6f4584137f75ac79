"""What a model's attention held and saw while it read one text: queries, K and V, and the weights of each head.

For lessons and for looking into a model. It runs the model on its own cache at full precision, beside any engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from amem.errors import InputError, UnsupportedModel

if TYPE_CHECKING:
    from mlx import nn

    from amem.model.hook import AttentionCall

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LayerCapture:
    """One attention layer over T tokens: Hq query heads, H KV heads, each of which serves Hq / H of them in a row."""

    slot: int  #: place among the model's cache slots, as in `ModelCacheSpec`; the layer's number in most models
    queries: Floats  # [Hq, T, Dk], with positions (RoPE) applied
    keys: Floats  # [H, T, Dk], as they are cached
    values: Floats  # [H, T, Dv]
    mask: Bools  # [T, T]: which keys (columns) each query (row) sees
    scale: float  #: of the scores
    sinks: Floats | None  # [Hq]: learned logits without a key (gpt-oss)

    def weights(self) -> Floats:
        """How much each query takes of each value: ``[Hq, T, T]``.

        Rows sum to 1; to less where learned sinks take their part.
        """
        repeats = self.queries.shape[0] // self.keys.shape[0]
        scores = self.scale * self.queries @ np.repeat(self.keys, repeats, axis=0).swapaxes(-1, -2)
        scores = np.where(self.mask, scores, -np.inf)
        peak = scores.max(axis=-1, keepdims=True)
        if self.sinks is not None:
            peak = np.maximum(peak, self.sinks[:, None, None])
        found = np.exp(scores - peak)
        total = found.sum(axis=-1, keepdims=True)
        if self.sinks is not None:
            total = total + np.exp(self.sinks[:, None, None] - peak)
        return np.asarray(found / total, dtype=np.float32)


@dataclass(frozen=True)
class Capture:
    """A text as a model read it."""

    logits: Floats  # [T, V]: after each token
    layers: tuple[LayerCapture, ...]  #: attention layers in the order in which they ran


def capture_attention(
    model: nn.Module,
    token_ids: Sequence[int],
    *,
    slots: Collection[int] | None = None,
    visible: Bools | None = None,
) -> Capture:
    """Run a model over some tokens in one step, and keep what its attention layers were given.

    Takes about ``4 T (Hq + 2 H) D`` bytes for each layer that is kept.

    Parameters
    ----------
    model
        Of `amem.model.load.load`, or any model of mlx-lm. Call it from the thread that loaded it.
    token_ids
        The text, T tokens.
    slots
        Which layers to keep, by their cache slot; all of them by default.
    visible
        ``[T, T]``, which tokens (columns) each token (row) may see, in every layer, beside what the model's own masks
        allow. For questions such as what a window costs.

    Raises
    ------
    InputError
        No tokens, a slot that is none of an attention layer, or a mask of another shape or in which a token does not
        see itself.
    UnsupportedModel
        A layer's attention is not computed from keys, values and a plain mask (latent attention), or not by mlx-lm's
        function.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import ArraysCache, make_prompt_cache

    from amem.model import blas
    from amem.model.hook import install, spy
    from amem.model.probe import flatten_caches
    from amem.run.threads import PREFILL

    n_tokens = len(token_ids)
    if not n_tokens:
        raise InputError("there are no tokens to read.")
    if visible is not None:
        _check_visible(visible, n_tokens)
    install(model)
    caches = make_prompt_cache(model)
    places = {id(cache): slot for slot, cache in enumerate(flatten_caches(caches))}
    attention = [cache for cache in flatten_caches(caches) if not isinstance(cache, ArraysCache)]
    unknown = sorted(set(slots or ()) - {places[id(cache)] for cache in attention})
    if unknown:
        raise InputError(f"cache slot {unknown[0]} is none of an attention layer; see `amem.model.probe.probe`.")
    if visible is not None:
        for cache in attention:
            _restrict(cache, mx.array(visible))
    blas.set_threads(PREFILL)
    with spy() as calls:
        logits = model(mx.array([list(token_ids)]), cache=caches)[0].astype(mx.float32)
        mx.eval(logits)
    seen = {places[id(call.cache)] for call in calls if id(call.cache) in places}
    if len(seen) < len(attention):
        raise UnsupportedModel("some layers compute their attention themselves, so that it cannot be captured.")
    kept = [call for call in calls if slots is None or places[id(call.cache)] in slots]
    return Capture(np.array(logits), tuple(_layer(places[id(call.cache)], call, n_tokens) for call in kept))


def _check_visible(visible: Bools, n_tokens: int) -> None:
    if visible.shape != (n_tokens, n_tokens) or visible.dtype != np.bool_:
        raise InputError(
            f"visible must be a boolean array [{n_tokens}, {n_tokens}] for {n_tokens} tokens, not {visible.dtype} "
            f"{list(visible.shape)}."
        )
    if not visible.diagonal().all():
        raise InputError(f"token {int(visible.diagonal().argmin())} does not see itself: its attention is undefined.")


def _restrict(cache: Any, visible: Any) -> None:
    """Let a cache make masks that allow no more than ``visible``."""
    make_mask = cache.make_mask

    def restricted(n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        del return_array  # a mask of single tokens is always an array
        own = make_mask(n, return_array=True, window_size=window_size)
        return visible if own is None else own & visible

    cache.make_mask = restricted


def _layer(slot: int, call: AttentionCall, n_tokens: int) -> LayerCapture:
    import mlx.core as mx

    if not all(isinstance(array, mx.array) and array.ndim == 4 for array in (call.keys, call.values)):
        raise UnsupportedModel(f"the layer of cache slot {slot} keeps no plain keys and values.")
    return LayerCapture(
        slot,
        queries=_floats(call.queries[0]),
        keys=_floats(call.keys[0]),
        values=_floats(call.values[0]),
        mask=_mask(slot, call.mask, n_tokens),
        scale=float(call.scale),
        sinks=None if call.sinks is None else _floats(call.sinks),
    )


def _mask(slot: int, mask: Any, n_tokens: int) -> Bools:
    """What a layer's mask allows, as it reads a text from its start."""
    import mlx.core as mx

    if mask is None or isinstance(mask, str):  # one token alone, or "causal"
        return np.tri(n_tokens, dtype=np.bool_)
    if mask.dtype != mx.bool_:
        raise UnsupportedModel(f"the layer of cache slot {slot} adds scores of its own to its mask (latent attention).")
    return np.array(mask, dtype=np.bool_).reshape(n_tokens, n_tokens)


def _floats(array: Any) -> Floats:
    import mlx.core as mx

    return np.array(array.astype(mx.float32))
