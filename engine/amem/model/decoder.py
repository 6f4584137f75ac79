"""Decoder layers of a known form, which are two calls of our kernels around the model's attention.

Where MLX computes on Linux's CPU it hands each of a layer's twenty operations to another thread, and for one token that
takes longer than to compute them. So the layers of some model files, those with the form of Llama's, get a class that
computes over our caches by `amem.kernels.decoder`: single tokens of some sequences, or some tokens of one. It leaves
all else to the class that it comes from. The self-check compares the result with the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.rope_utils import Llama3RoPE

from amem.kernels import decoder as kernels
from amem.kernels import product
from amem.model import blas, hook, packed

Floats = npt.NDArray[np.float32]

_FILES = (llama, qwen2, qwen3)
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_EMPTY: Floats = np.empty(0, np.float32)


class Rope:
    """Rotary positions of one kind: the cosines and sines of a step, for all layers that share them."""

    def __init__(self, module: nn.Module) -> None:
        self.traditional = bool(module.traditional)
        if type(module) is Llama3RoPE:
            self._scale, inverse = np.float32(1.0), np.float32(1.0) / np.array(module._freqs)  # noqa: SLF001
        else:
            # by the operations that MLX itself uses: a last bit that differs grows with the position
            half = module.dims // 2
            step = np.log(np.float32(module.base)) / np.float32(half)
            inverse = np.array(mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * mx.array(step)))
            self._scale = np.float32(module.scale)
        self._inverse: Floats = inverse.astype(np.float32)
        self._positions: Sequence[int] = ()
        self._found: tuple[Floats, Floats] = (_EMPTY, _EMPTY)

    @property
    def key(self) -> tuple[bool, float, bytes]:
        """The same for modules that rotate alike."""
        return self.traditional, float(self._scale), self._inverse.tobytes()

    def at(self, positions: Sequence[int]) -> tuple[Floats, Floats]:
        """Cosines and sines ``[n, dims / 2]`` at some positions."""
        if positions != self._positions:
            angles = np.array(positions, np.float32)[:, None] * self._scale * self._inverse
            self._found, self._positions = (np.cos(angles), np.sin(angles)), positions
        return self._found


class Flow:
    """The array that a model hands on from one of our parts to the next, in a step of single tokens.

    A norm and an output matrix are called for prompts, too: they take a step by this array, which is no other.
    """

    def __init__(self) -> None:
        self._last: mx.array | None = None

    def put(self, rows: Floats, shape: tuple[int, ...]) -> mx.array:
        """Some evaluated rows as what is handed on."""
        self._last = mx.array(rows.reshape(shape))
        return self._last

    def has(self, array: mx.array) -> bool:
        """Whether an array is what was handed on last."""
        return array is self._last


class Step:
    """One layer's weights, as the kernels take them, and its computation."""

    def __init__(self, layer: Any, flow: Flow, ropes: dict[Any, Rope]) -> None:
        self._flow = flow
        attention, mlp = layer.self_attn, layer.mlp
        modules = [getattr(attention if name in attention else mlp, name) for name in _MATRICES]
        self._kept = [packed.entry(module, product) for module in modules]
        self._entries = np.array([values for values, _ in self._kept], np.int64)
        rope = Rope(attention.rope)
        self._rope = ropes.setdefault(rope.key, rope)
        self._norms = [_floats(norm.weight) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        self._eps = [np.float32(norm.eps) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        per_head = [attention[name] for name in ("q_norm", "k_norm") if name in attention]
        self._head_norms = [_floats(norm.weight) for norm in per_head] or [_EMPTY, _EMPTY]
        self._head_eps = np.float32(per_head[0].eps if per_head else 0.0)
        self._heads = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
        self._widths = [module.weight.shape[0] for module in modules[:3]]
        self._scale = attention.scale

    def __call__(self, x: mx.array, layer_cache: Any) -> mx.array:
        """The layer's output for ``x [B, 1, D]`` or ``[1, L, D]``."""
        n_sequences, length, dim = x.shape
        n = n_sequences * length
        rows = np.asarray(x).reshape(n, dim)
        starts = layer_cache.positions
        cos, sin = self._rope.at(starts if length == 1 else tuple(range(starts[0], starts[0] + length)))
        outs = [np.empty((n, width), np.float32) for width in self._widths]
        kernels.before_attention(
            rows,
            self._entries,
            self._norms[0],
            self._eps[0],
            *self._head_norms,
            self._head_eps,
            self._widths[0] // self._heads[0],
            cos,
            sin,
            self._rope.traditional,
            *outs,
        )
        q, k, v = (
            np.ascontiguousarray(out.reshape(n_sequences, length, heads, -1).swapaxes(1, 2))
            for out, heads in zip(outs, self._heads, strict=True)
        )
        if hook.spied():
            arrays = mx.array(q), mx.array(k), mx.array(v)
            hook.report(hook.AttentionCall(layer_cache, *arrays, self._scale, None, None))
        attended = layer_cache.attend_evaluated(q, k, v, self._scale).swapaxes(1, 2).reshape(n, -1)
        out = np.empty_like(rows)
        kernels.after_attention(rows, attended, self._entries, self._norms[1], self._eps[1], out)
        # a prompt's logits are not wanted, so they must stay to be computed
        return self._flow.put(out, x.shape) if length == 1 else mx.array(out.reshape(x.shape))


def _floats(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32))


@cache
def _stepping(base: Any) -> type:
    """A class of layers that have a `Step`, for layers of a class."""

    class DecoderLayer(base):  # type: ignore[misc]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            computed = getattr(cache, "positions", None) is not None  # only our caches have them
            if not computed or x.dtype != mx.float32 or (x.shape[0] > 1 and x.shape[1] > 1):
                return cast("mx.array", super().__call__(x, mask, cache))
            return cast("mx.array", self.step(x, cache))

    return DecoderLayer


class Ending:
    """What comes after the last layer: a norm, and the output matrix."""

    def __init__(self, norm: nn.RMSNorm, head: nn.Module, flow: Flow) -> None:
        self._flow = flow
        self._norm, self._eps = _floats(norm.weight), np.float32(norm.eps)
        values, self._kept = packed.entry(head, product)
        self._entry = np.array(values, np.int64)
        self._width = head.weight.shape[0]

    def norm(self, x: mx.array) -> mx.array | None:
        """The norm of a step's last output; None for anything else."""
        if not self._flow.has(x):
            return None
        rows = np.asarray(x).reshape(-1, x.shape[-1])
        out = np.empty_like(rows)
        kernels.rms_norm(rows, self._norm, self._eps, out)
        return self._flow.put(out, x.shape)

    def project(self, x: mx.array) -> mx.array | None:
        """The logits of what `norm` gave; None for anything else."""
        if not self._flow.has(x):
            return None
        rows = np.asarray(x).reshape(-1, x.shape[-1])
        out = np.empty((len(rows), self._width), np.float32)
        kernels.project(self._entry, rows, out)
        return mx.array(out.reshape(*x.shape[:-1], -1))


class _FinalNorm(nn.RMSNorm):
    def __call__(self, x: mx.array) -> mx.array:
        found = self.ending.norm(x)
        return cast("mx.array", nn.RMSNorm.__call__(self, x) if found is None else found)


class _Head(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        found = self.ending.project(x)
        return cast("mx.array", nn.Linear.__call__(self, x) if found is None else found)


class _TiedHead(nn.Embedding):
    def as_linear(self, x: mx.array) -> mx.array:
        found = self.ending.project(x)
        return cast("mx.array", nn.Embedding.as_linear(self, x) if found is None else found)


def adopt(model: nn.Module) -> int:
    """Let the layers of a loaded float32 model compute by the kernels; how many do. Others are left alone.

    The model's weights may not be replaced afterwards. Doing it again changes nothing.
    """
    if not blas.rows_sent():
        return 0  # the products could not be compiled
    known = sum(hasattr(module, "step") for _, module in model.named_modules())
    if known:
        return known
    ropes: dict[Any, Rope] = {}
    flow = Flow()
    layers = [module for _, module in model.named_modules() if _is_known(module)]
    for layer in layers:
        step = Step(layer, flow, ropes)
        layer.__class__ = _stepping(type(layer))  # type: ignore[arg-type]  # a class is hashable
        layer.step = step
    if layers and type(model) in [file.Model for file in _FILES]:
        _adopt_ending(model, flow)
    return len(layers)


def _adopt_ending(model: Any, flow: Flow) -> None:
    norm = model.model.norm
    head = model.lm_head if "lm_head" in model else model.model.embed_tokens
    if type(norm) is nn.RMSNorm and type(head) in (nn.Linear, nn.Embedding) and head.weight.dtype == mx.float32:
        ending = Ending(norm, head, flow)
        norm.__class__ = _FinalNorm
        head.__class__ = _Head if type(head) is nn.Linear else _TiedHead
        norm.ending = head.ending = ending


def _is_known(module: nn.Module) -> bool:
    """Whether a module is a decoder layer that consists of nothing but what a step computes."""
    for file in _FILES:
        if type(module) is file.TransformerBlock:
            attention, mlp = module.self_attn, module.mlp
            linear = [getattr(attention if name in attention else mlp, name) for name in _MATRICES]
            return (
                type(attention) is file.Attention
                and type(mlp) is file.MLP
                and type(attention.rope) in (nn.RoPE, Llama3RoPE)
                and all(type(part) is nn.Linear and part.weight.dtype == mx.float32 for part in linear)
            )
    return False
