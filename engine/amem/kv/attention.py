"""Attention over stored groups and an exact open group, in MLX operations that run on any device.

The rule, one for all codecs: a query at position t sees a group quantized if the group lies before t's own group of 64
tokens, and exactly if it is t's own. Only positions decide, so chunking, batching, eviction and restore cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import mlx.core as mx

from amem.kv.codec import GROUP, Codec, Parts

SHORT_QUERY = 8  #: up to this many query tokens the quantized product is cheaper than to dequantize every key


@dataclass(frozen=True)
class Stretch:
    """Stored groups that lie one after another in one run; each part's first axis counts groups."""

    parts: Parts
    start: int  #: position of the first token
    n_tokens: int
    #: Where each part lies in memory, once a kernel has asked; a stretch is dropped when its run is written to.
    addresses: list[int] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class LayerView:
    """Everything that the queries of one layer and one sequence can see."""

    stretches: Sequence[Stretch]
    first: tuple[mx.array, mx.array] | None  #: exact K, V [H, n, D] of positions 0..n-1, if they are stored
    k_exact: mx.array  # [H, E, Dk]
    v_exact: mx.array  # [H, E, Dv]
    exact_start: int  #: position of the first exact token, a multiple of 64
    window: int | None


def attend(
    q: mx.array, view: LayerView, *, start: int, scale: float, codec: Codec, sinks: mx.array | None = None
) -> mx.array:
    """Attention of ``q [Hq, L, Dk]`` at positions ``start..start+L-1``; gives ``[Hq, L, Dv]`` in the queries' dtype.

    ``sinks [Hq]`` are learned logits that take part in the softmax and have no value (gpt-oss).
    """
    if q.shape[1] <= SHORT_QUERY:
        return _attend_packed(q, view, start, scale, codec, sinks)
    return _attend_dense(q, view, start, scale, codec, sinks)


def _attend_packed(
    q: mx.array, view: LayerView, start: int, scale: float, codec: Codec, sinks: mx.array | None
) -> mx.array:
    heads_q, length, dim = q.shape
    heads = view.k_exact.shape[0]
    rows = q.astype(mx.float32).reshape(heads, -1, dim) * scale  # [H, R, Dk], R = repeats * L
    k_exact, v_exact = view.k_exact.astype(mx.float32), codec.to_value_space(view.v_exact.astype(mx.float32))
    scores = [codec.scores(rows, stretch.parts) for stretch in view.stretches]
    n_first = 0
    if view.first is not None:
        n_first = view.first[0].shape[1]
        exact = rows @ view.first[0].astype(mx.float32).swapaxes(-1, -2)
        scores[0] = mx.concatenate([exact, scores[0][..., n_first:]], axis=-1)
    scores.append(rows @ k_exact.swapaxes(-1, -2))
    logits = mx.concatenate(scores, axis=-1) if len(scores) > 1 else scores[0]  # [H, R, S + E]
    n_keys = logits.shape[-1]
    mask = visible(start, length, _spans(view), view.exact_start, k_exact.shape[1], view.window)
    if mask is not None:
        shaped = logits.reshape(heads, -1, length, n_keys)
        logits = mx.where(mask, shaped, -mx.inf).reshape(heads, -1, n_keys)
    if sinks is not None:
        column = mx.repeat(sinks.astype(mx.float32).reshape(heads, -1), length, axis=-1)[..., None]
        logits = mx.concatenate([logits, column], axis=-1)
    weights = mx.softmax(logits, axis=-1)[..., :n_keys]
    # one sum over all groups: how they lie in runs must not change its order, or a restore would change bits
    outs = [(weights[..., n_keys - k_exact.shape[1] :] @ v_exact)[None]]
    at = 0
    for i, stretch in enumerate(view.stretches):
        part = weights[..., at : at + stretch.n_tokens]
        if i == 0 and view.first is not None:
            outs.append((part[..., :n_first] @ codec.to_value_space(view.first[1].astype(mx.float32)))[None])
            part = mx.concatenate([mx.zeros_like(part[..., :n_first]), part[..., n_first:]], axis=-1)
        outs.append(codec.weighted_values(part, stretch.parts))
        at += stretch.n_tokens
    out = mx.concatenate(outs, axis=0).sum(axis=0)
    return codec.from_value_space(out).reshape(heads_q, length, -1).astype(q.dtype)


def _attend_dense(
    q: mx.array, view: LayerView, start: int, scale: float, codec: Codec, sinks: mx.array | None
) -> mx.array:
    keys, values = [], []
    for i, stretch in enumerate(view.stretches):
        k, v = codec.dequantize(stretch.parts, q.dtype)
        if i == 0 and view.first is not None:
            n_first = view.first[0].shape[1]
            keys.append(view.first[0].astype(q.dtype))
            values.append(codec.to_value_space(view.first[1]).astype(q.dtype))
            k, v = k[:, n_first:], v[:, n_first:]
        keys.append(k)
        values.append(v)
    keys.append(view.k_exact.astype(q.dtype))
    values.append(codec.to_value_space(view.v_exact).astype(q.dtype))
    k = mx.concatenate(keys, axis=1) if len(keys) > 1 else keys[0]
    v = mx.concatenate(values, axis=1) if len(values) > 1 else values[0]
    mask = visible(start, q.shape[1], _spans(view), view.exact_start, view.k_exact.shape[1], view.window)
    out = mx.fast.scaled_dot_product_attention(
        q[None], k[None], v[None], scale=scale, mask=mask, sinks=None if sinks is None else sinks.astype(q.dtype)
    )
    return codec.from_value_space(out[0])


def _spans(view: LayerView) -> tuple[tuple[int, int], ...]:
    return tuple((stretch.start, stretch.n_tokens) for stretch in view.stretches)


@lru_cache(maxsize=32)
def visible(
    start: int,
    length: int,
    stored: tuple[tuple[int, int], ...],
    exact_start: int,
    n_exact: int,
    window: int | None,
) -> mx.array | None:
    """Which keys ``[stored | exact]`` each query sees: bool ``[L, S + E]``, or None where all see all.

    ``stored`` gives (first position, tokens) of each stretch. The same for all layers of a kind, hence the cache.
    """
    own_group = exact_start // GROUP
    last = start + length - 1
    first_key = min([exact_start, *(at for at, _ in stored)])
    windowed = window is not None and first_key <= last - window
    ends_before = all(at + n <= exact_start for at, n in stored)
    if length == 1 and own_group == start // GROUP and ends_before and not windowed:
        return None
    t = mx.arange(start, start + length)[:, None]
    allowed, positions = [], []
    for at, n in stored:
        j = mx.arange(at, at + n)[None]
        positions.append(j)
        allowed.append((j // GROUP) < (t // GROUP))
    j = mx.arange(exact_start, exact_start + n_exact)[None]
    positions.append(j)
    allowed.append(((j // GROUP) == (t // GROUP)) & (j <= t))
    mask = mx.concatenate(allowed, axis=-1)
    if window is not None:
        mask = mask & (mx.concatenate(positions, axis=-1) > t - window)
    mx.eval(mask)  # a lazy array could not be read by another engine's thread
    return mask
