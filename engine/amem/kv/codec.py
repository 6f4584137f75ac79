"""How K and V of whole groups are stored: one small class for each codec.

A group is 64 consecutive tokens. A codec turns the exact K and V of whole groups into *parts*, named arrays whose first
axis counts groups, and attends to them in that form. Nothing here knows of positions, masks or open groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from amem.model.spec import CHANNEL_BITS, WIDE, ModelCacheSpec, can_rotate, packing_group, unknown_codec

GROUP = 64
MOST_FLOAT16 = 65504.0
_HEADROOM = 16  #: how much larger than in the self-check K/V may become; it sees a few tokens only
Parts = Mapping[str, mx.array]


@dataclass(frozen=True)
class Shape:
    """The shape of one layer's K and V: KV heads and the head dims."""

    n_kv_heads: int
    k_dim: int
    v_dim: int


class Codec(Protocol):
    """What the runs and the attention ask of a codec. G groups, H KV heads, R query rows, D head dim."""

    name: str
    n_exact: int  #: tokens at the very start that stay exact for good

    def part_shapes(self, shape: Shape) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
        """Shape and dtype of each part of one group."""
        ...

    def quantize(self, k: mx.array, v: mx.array) -> dict[str, mx.array]:
        """Parts of ``k [H, G*64, Dk]`` and ``v [H, G*64, Dv]``."""
        ...

    def scores(self, q: mx.array, parts: Parts) -> mx.array:
        """Products of ``q [H, R, Dk]`` (float32) with all keys: ``[H, R, G*64]``."""
        ...

    def weighted_values(self, p: mx.array, parts: Parts) -> mx.array:
        """``p [H, R, G*64]`` (float32) times the values, in value space, group by group: ``[G, H, R, Dv]``."""
        ...

    def dequantize(self, parts: Parts, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """``k [H, G*64, Dk]``, and ``v [H, G*64, Dv]`` in value space."""
        ...

    def to_value_space(self, v: mx.array) -> mx.array:
        """Rotate exact values as the stored ones are; the last axis is the head dim."""
        ...

    def from_value_space(self, out: mx.array) -> mx.array:
        """Undo `to_value_space`."""
        ...


def _rotate(x: mx.array) -> mx.array:
    return mx.hadamard_transform(x.astype(mx.float32)).astype(x.dtype)


def _pack(x: mx.array, group: int, bits: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Affine codes along the last axis, with scales and biases in 16 bits."""
    codes, scales, biases = mx.quantize(x.astype(mx.float32), group_size=group, bits=bits)
    return codes, _narrow(scales, dtype), _narrow(biases, dtype)


def _narrow(x: mx.array, dtype: mx.Dtype) -> mx.array:
    if dtype == mx.float16:
        # an infinite bias would turn a whole channel into NaN; what was clipped is found when its block is exported
        x = mx.clip(x, -MOST_FLOAT16, MOST_FLOAT16)
    return x.astype(dtype)


def _by_group(x: mx.array) -> mx.array:
    """``[H, G*64, D] -> [G, H, 64, D]``."""
    heads, tokens, dim = x.shape
    return x.reshape(heads, tokens // GROUP, GROUP, dim).swapaxes(0, 1)


def _join(x: mx.array) -> mx.array:
    """``[G, H, 64, D] -> [H, G*64, D]``."""
    groups, heads, tokens, dim = x.shape
    return x.swapaxes(0, 1).reshape(heads, groups * tokens, dim)


def _join_scores(x: mx.array) -> mx.array:
    """``[G, H, R, 64] -> [H, R, G*64]``."""
    groups, heads, rows, tokens = x.shape
    return x.transpose(1, 2, 0, 3).reshape(heads, rows, groups * tokens)


def _split_weights(p: mx.array) -> mx.array:
    """``[H, R, G*64] -> [G, H, R, 64]``."""
    heads, rows, tokens = p.shape
    return p.reshape(heads, rows, tokens // GROUP, GROUP).transpose(2, 0, 1, 3)


@dataclass(frozen=True)
class _Packed:
    """Codes of one array with their scales, along the last axis of each group's matrix."""

    label: str
    bits: int
    scale_dtype: mx.Dtype

    def shapes(self, heads: int, rows: int, columns: int, group: int) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
        scales = ((heads, rows, columns // group), self.scale_dtype)
        codes = ((heads, rows, columns * self.bits // 32), mx.uint32)
        return {f"{self.label}.codes": codes, f"{self.label}.scales": scales, f"{self.label}.biases": scales}

    def pack(self, x: mx.array, group: int) -> dict[str, mx.array]:
        codes, scales, biases = _pack(x, group, self.bits, self.scale_dtype)
        return {f"{self.label}.codes": codes, f"{self.label}.scales": scales, f"{self.label}.biases": biases}

    def _arrays(self, parts: Parts) -> tuple[mx.array, mx.array, mx.array, int]:
        codes, scales, biases = (parts[f"{self.label}.{name}"] for name in ("codes", "scales", "biases"))
        group = codes.shape[-1] * 32 // self.bits // scales.shape[-1]
        # 16-bit scales would round each dequantized value to 16 bits; the product below is in float32
        return codes, scales.astype(mx.float32), biases.astype(mx.float32), group

    def product(self, x: mx.array, parts: Parts, *, transpose: bool) -> mx.array:
        codes, scales, biases, group = self._arrays(parts)
        return mx.quantized_matmul(x, codes, scales, biases, transpose=transpose, group_size=group, bits=self.bits)

    def unpack(self, parts: Parts) -> mx.array:
        codes, scales, biases, group = self._arrays(parts)
        return mx.dequantize(codes, scales, biases, group_size=group, bits=self.bits)


class ChannelCodec:
    """Keys per channel along the 64 tokens of a group, values per token and rotated; the first four tokens exact.

    Keys have outlier channels (KIVI, arXiv 2402.02750, section 3), so a key channel gets its own scale. The Hadamard
    rotation spreads a value's outliers over its head (QuaRot, arXiv 2404.00456, section 3). The product with a group
    is ``sum_d q_d (s_d n_td + b_d)``, so scales fold into the query once per group.
    """

    n_exact = 4

    def __init__(self, name: str, bits: int, scale_dtype: mx.Dtype = mx.float16) -> None:
        self.name = name
        self._k = _Packed("k", bits, scale_dtype)
        self._v = _Packed("v", bits, scale_dtype)

    def part_shapes(self, shape: Shape) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
        heads = shape.n_kv_heads
        return self._k.shapes(heads, shape.k_dim, GROUP, GROUP) | self._v.shapes(
            heads, GROUP, shape.v_dim, packing_group(shape.v_dim)
        )

    def quantize(self, k: mx.array, v: mx.array) -> dict[str, mx.array]:
        by_channel = _by_group(k).swapaxes(-1, -2)  # [G, H, Dk, 64]
        values = _by_group(self.to_value_space(v.astype(mx.float32)))
        return self._k.pack(by_channel, GROUP) | self._v.pack(values, packing_group(v.shape[-1]))

    def scores(self, q: mx.array, parts: Parts) -> mx.array:
        return _join_scores(self._k.product(q[None], parts, transpose=False))

    def weighted_values(self, p: mx.array, parts: Parts) -> mx.array:
        return self._v.product(_split_weights(p), parts, transpose=False)

    def dequantize(self, parts: Parts, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        k = self._k.unpack(parts).swapaxes(-1, -2)
        return _join(k).astype(dtype), _join(self._v.unpack(parts)).astype(dtype)

    def to_value_space(self, v: mx.array) -> mx.array:
        return _rotate(v) if can_rotate(v.shape[-1]) else v

    def from_value_space(self, out: mx.array) -> mx.array:
        return self.to_value_space(out)  # the normalized transform is its own inverse


class TokenCodec:
    """Keys and values per token along the head dim, no rotation: the paper's Q4 (arXiv 2603.04428, section 3)."""

    n_exact = 0

    def __init__(self, name: str, bits: int, scale_dtype: mx.Dtype = mx.float16) -> None:
        self.name = name
        self._k = _Packed("k", bits, scale_dtype)
        self._v = _Packed("v", bits, scale_dtype)

    def part_shapes(self, shape: Shape) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
        heads = shape.n_kv_heads
        return self._k.shapes(heads, GROUP, shape.k_dim, packing_group(shape.k_dim)) | self._v.shapes(
            heads, GROUP, shape.v_dim, packing_group(shape.v_dim)
        )

    def quantize(self, k: mx.array, v: mx.array) -> dict[str, mx.array]:
        return self._k.pack(_by_group(k), packing_group(k.shape[-1])) | self._v.pack(
            _by_group(v), packing_group(v.shape[-1])
        )

    def scores(self, q: mx.array, parts: Parts) -> mx.array:
        return _join_scores(self._k.product(q[None], parts, transpose=True))

    def weighted_values(self, p: mx.array, parts: Parts) -> mx.array:
        return self._v.product(_split_weights(p), parts, transpose=False)

    def dequantize(self, parts: Parts, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        return _join(self._k.unpack(parts)).astype(dtype), _join(self._v.unpack(parts)).astype(dtype)

    def to_value_space(self, v: mx.array) -> mx.array:
        return v

    def from_value_space(self, out: mx.array) -> mx.array:
        return out


class PlainCodec:
    """Keys and values as numbers of one dtype, not quantized."""

    n_exact = 0

    def __init__(self, name: str, dtype: mx.Dtype) -> None:
        self.name = name
        self._dtype = dtype

    def part_shapes(self, shape: Shape) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
        heads = shape.n_kv_heads
        return {"k": ((heads, GROUP, shape.k_dim), self._dtype), "v": ((heads, GROUP, shape.v_dim), self._dtype)}

    def quantize(self, k: mx.array, v: mx.array) -> dict[str, mx.array]:
        return {"k": _narrow(_by_group(k), self._dtype), "v": _narrow(_by_group(v), self._dtype)}

    def scores(self, q: mx.array, parts: Parts) -> mx.array:
        return _join_scores(q[None] @ parts["k"].astype(q.dtype).swapaxes(-1, -2))

    def weighted_values(self, p: mx.array, parts: Parts) -> mx.array:
        return _split_weights(p) @ parts["v"].astype(p.dtype)

    def dequantize(self, parts: Parts, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        return _join(parts["k"]).astype(dtype), _join(parts["v"]).astype(dtype)

    def to_value_space(self, v: mx.array) -> mx.array:
        return v

    def from_value_space(self, out: mx.array) -> mx.array:
        return out


def make_codec(name: str, *, compute_dtype: mx.Dtype = mx.float32) -> Codec:
    """The codec of this name. ``exact`` keeps everything in the model's compute dtype; the self-check uses it.

    Raises
    ------
        InputError: there is no such codec.
    """
    plain = name.removesuffix(WIDE)
    dtype = mx.bfloat16 if plain != name else mx.float16
    if plain in CHANNEL_BITS:
        return ChannelCodec(name, CHANNEL_BITS[plain], dtype)
    if plain == "q4-affine":
        return TokenCodec(name, 4, dtype)
    if plain == "fp16":
        return PlainCodec(name, dtype)
    if name == "exact":
        return PlainCodec(name, compute_dtype)
    raise unknown_codec(name)


def codec_for(name: str, spec: ModelCacheSpec) -> Codec:
    """The codec for a model: float16 gives way to bfloat16 where K/V may be too large for it.

    The name of the codec says so (``q4/bf16``), and is recorded with all that is stored.

    Raises
    ------
        InputError: there is no such codec.
    """
    wide = spec.kv_peak * _HEADROOM > MOST_FLOAT16 and not name.endswith(WIDE)
    return make_codec(name + WIDE if wide else name)
