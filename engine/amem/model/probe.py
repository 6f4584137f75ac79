"""Learning a model's `ModelCacheSpec` from the model itself: its own caches, and three tokens run with a spy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from amem.errors import UnsupportedModel
from amem.model.hook import AttentionCall, install, spy
from amem.model.spec import DTYPE_NBYTES, LayerKind, LayerSpec, ModelCacheSpec

_TOKENS = (1, 2, 3)


def flatten_caches(caches: Iterable[Any]) -> list[Any]:
    """A model's cache slots in order, those inside `CacheList` (falcon_h1) included."""
    slots: list[Any] = []
    for cache in caches:
        slots.extend(flatten_caches(cache.caches) if isinstance(cache, CacheList) else [cache])
    return slots


def probe(model: Module) -> ModelCacheSpec:
    """Find out what a model caches, layer by layer, without knowing its name.

    Also installs the attention hook for it. A few milliseconds for a small model; three tokens of prefill otherwise.

    Raises
    ------
    UnsupportedModel
        One of its layers cannot be carried exactly; the text names the layer and why.
    """
    install(model)
    caches = make_prompt_cache(model)
    slots = flatten_caches(caches)
    for index, cache in enumerate(slots):
        _check_class(index, cache)
    masks = _MaskLog(slots)
    with spy() as calls:
        try:
            mx.eval(model(mx.array([_TOKENS]), cache=caches))
        except Exception as error:
            raise UnsupportedModel(f"the model cannot run {len(_TOKENS)} tokens on its own cache: {error}") from error
    for call in calls:
        if not any(call.cache is cache for cache in slots):
            given = "no cache" if call.cache is None else f"a {type(call.cache).__name__}"
            raise UnsupportedModel(
                f"a layer computes attention with {given} instead of its own cache slot (shared keys and values, a "
                "sparse index); that is not carried."
            )
    layers = []
    for index, cache in enumerate(slots):
        if isinstance(cache, ArraysCache):
            layers.append(_recurrent(index, cache))
        else:
            layers.append(_attention(index, cache, [call for call in calls if call.cache is cache], masks))
    return ModelCacheSpec(tuple(layers), _dtype(calls, slots))


def _check_class(index: int, cache: Any) -> None:
    if type(cache) not in {KVCache, RotatingKVCache, ArraysCache}:
        raise UnsupportedModel(f"cache slot {index} is a {type(cache).__name__}, a kind of cache that is not carried.")
    if isinstance(cache, RotatingKVCache) and cache.keep:
        raise UnsupportedModel(
            f"cache slot {index} keeps its first {cache.keep} tokens beside its window; only plain windows are carried."
        )


class _Mask(str):
    """The string "causal", with the window that it stands for."""

    __slots__ = ("window",)
    window: int | None


@dataclass(frozen=True)
class _MadeMask:
    mask: Any
    window: int | None


class _MaskLog:
    """Which window each attention mask stands for, learned from the caches that make them.

    Three tokens fit any window, so the masks look all alike; a model that sets a window on a cache without one (or a
    wider one) would only go wrong far into a text. So the masks are told apart by what was asked for.
    """

    def __init__(self, slots: Iterable[Any]) -> None:
        self._made: list[_MadeMask] = []
        for cache in slots:
            if not isinstance(cache, ArraysCache):
                self._watch(cache)

    def _watch(self, cache: Any) -> None:
        make_mask = cache.make_mask

        def recording(n: int, return_array: bool = False, window_size: int | None = None) -> Any:
            mask = make_mask(n, return_array=return_array, window_size=window_size)
            window = window_size or getattr(cache, "max_size", None)
            if isinstance(mask, str):
                mask = _Mask(mask)
                mask.window = window
            else:
                self._made.append(_MadeMask(mask, window))  # the reference keeps its identity unique
            return mask

        cache.make_mask = recording

    def window(self, index: int, mask: Any) -> int | None:
        """The window of a mask, None for full causal attention.

        Raises
        ------
        UnsupportedModel
            The mask does not come from a cache as it was made.
        """
        if isinstance(mask, _Mask):
            return mask.window
        for made in self._made:
            if made.mask is mask and mask is not None:
                return made.window
        if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            raise UnsupportedModel(
                f"the layer of cache slot {index} adds scores of its own to the attention mask, as latent attention "
                "(MLA) does; such scores are not carried."
            )
        raise UnsupportedModel(
            f"the layer of cache slot {index} masks attention in a way of its own; only causal masks and windows made "
            "by its cache are carried."
        )


def _recurrent(index: int, cache: Any) -> LayerSpec:
    if cache.empty():
        raise UnsupportedModel(f"cache slot {index} ({type(cache).__name__}) is never filled.")
    arrays = [array for array in cache.cache if array is not None]
    shapes = tuple(() if array is None else tuple(array.shape) for array in cache.cache)
    nbytes = sum(array.nbytes for array in arrays)
    return LayerSpec(index, LayerKind.RECURRENT, state_shapes=shapes, state_nbytes=nbytes)


def _attention(index: int, cache: Any, calls: list[AttentionCall], masks: _MaskLog) -> LayerSpec:
    if not calls and cache.empty():
        raise UnsupportedModel(f"cache slot {index} ({type(cache).__name__}) is never filled.")
    if not calls:
        raise UnsupportedModel(
            f"the layer of cache slot {index} computes its attention itself (a softcap on the scores, block-sparse "
            "attention and the like) instead of calling mlx-lm's scaled_dot_product_attention."
        )
    if len(calls) > 1:
        raise UnsupportedModel(
            f"{len(calls)} attention layers read cache slot {index}: layers that share another one's keys and values "
            "are not carried."
        )
    call = calls[0]
    window = _window(index, cache, masks.window(index, call.mask))
    keys, values = cache.keys_and_values()
    if not (_same(call.keys, keys) and _same(call.values, values)):
        raise UnsupportedModel(
            f"the layer of cache slot {index} attends to other keys and values than its cache holds, as latent "
            "attention (MLA) does."
        )
    _, n_kv_heads, _, k_dim = keys.shape
    v_dim = values.shape[-1]
    for name, dim in (("key", k_dim), ("value", v_dim)):
        if dim % 32:
            raise UnsupportedModel(f"the {name} head dim {dim} of cache slot {index} is not a multiple of 32.")
    return LayerSpec(
        index,
        LayerKind.FULL if window is None else LayerKind.WINDOW,
        n_kv_heads=n_kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        n_q_heads=call.queries.shape[1],
        window=window,
        has_sinks=call.sinks is not None,
        scale=float(call.scale),
    )


def _window(index: int, cache: Any, masked: int | None) -> int | None:
    """The one window that a layer's cache and its mask agree on."""
    held = getattr(cache, "max_size", None)
    if held is not None and held != masked:
        raise UnsupportedModel(
            f"cache slot {index} holds the last {held} tokens, but its mask shows {masked or 'all'} of them."
        )
    return masked


def _same(given: Any, held: mx.array) -> bool:
    return (
        isinstance(given, mx.array) and given.shape == held.shape and bool(mx.array_equal(given, held, equal_nan=True))
    )


def _dtype(calls: list[AttentionCall], slots: list[Any]) -> str:
    """The one dtype of all K and V; of the state, for a model that has none."""
    arrays = [array for call in calls for array in (call.keys, call.values)]
    if not arrays:
        arrays = [slot.cache[0] for slot in slots]
    names = sorted({str(array.dtype).removeprefix("mlx.core.") for array in arrays})
    if len(names) != 1 or names[0] not in DTYPE_NBYTES:
        raise UnsupportedModel(f"keys and values come as {' and '.join(names)}; one floating-point type is expected.")
    return names[0]
