"""A layer's attention and gate by the compiled kernels: arrays are evaluated at once and read where they lie."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem.kernels import attention as kernels
from amem.kernels import cores
from amem.kernels import gate as gates
from amem.kernels.vectors import WIDTH
from amem.kv import attention as reference
from amem.kv.attention import LayerView
from amem.kv.codec import GROUP, Codec
from amem.model.spec import WIDE

_KINDS = {"q4": kernels.CHANNEL, "q4-affine": kernels.TOKEN, "fp16": kernels.PLAIN, "exact": kernels.PLAIN}
_DTYPES = {mx.float16: kernels.FLOAT16, mx.bfloat16: kernels.BFLOAT16, mx.float32: kernels.FLOAT32}
_QUANTIZED = ("k.codes", "k.scales", "k.biases", "v.codes", "v.scales", "v.biases")
_WORD = 8  # codes in 32 bits


def attend(
    q: mx.array, view: LayerView, *, start: int, scale: float, codec: Codec, sinks: mx.array | None = None
) -> mx.array:
    """The same as `amem.kv.attention.attend`, on the CPU and evaluated.

    A query's result depends on its position and on what it sees alone: any chunking of the queries, and any way in
    which the groups lie in runs, give the same bits.
    """
    kind = _KINDS.get(codec.name.removesuffix(WIDE))
    if kind is None:
        return reference.attend(q, view, start=start, scale=scale, codec=codec, sinks=sinks)
    heads_q, length, k_dim = q.shape
    heads, _, v_dim = view.v_exact.shape
    names = ("k", "v") if kind == kernels.PLAIN else _QUANTIZED
    stretches = [stretch for stretch in view.stretches if stretch.n_tokens]
    stored = [stretch.parts[name] for stretch in stretches for name in names]
    exact = [q, view.k_exact, view.v_exact, *(view.first or ()), *(() if sinks is None else (sinks,))]
    exact = [array if array.dtype == mx.float32 else array.astype(mx.float32) for array in exact]
    mx.eval(exact, stored)
    dtype, k_scales, v_scales = kernels.FLOAT32, 1, 1
    if stretches:
        parts = stretches[0].parts
        dtype = _DTYPES[parts["k" if kind == kernels.PLAIN else "k.scales"].dtype]
        if kind != kernels.PLAIN:
            k_scales, v_scales = parts["k.scales"].shape[-1], parts["v.scales"].shape[-1]
    buffers = [np.ascontiguousarray(np.asarray(array)) for array in exact]
    rows = np.multiply(buffers[0], np.float32(scale)).reshape(heads, -1, k_dim)
    out = np.empty((*rows.shape[:2], v_dim), np.float32)
    first = buffers[3:5] if view.first is not None else [np.empty((heads, 0, d), np.float32) for d in (k_dim, v_dim)]
    logits = np.full(heads_q, -np.inf, np.float32) if sinks is None else buffers[-1]
    table, kept = _addresses(stored, [stretch.n_tokens // GROUP for stretch in stretches], names)
    groups = [np.arange(s.start // GROUP, (s.start + s.n_tokens) // GROUP) for s in stretches]
    given = (
        rows,
        out,
        table,
        np.concatenate(groups) if groups else np.empty(0, np.int64),
        kind,
        dtype,
        *first,
        *buffers[1:3],
        view.exact_start,
        start,
        length,
        k_scales,
        v_scales,
        view.window or 0,
        logits,
        _unmix(codec, v_dim, kind),  # type: ignore[arg-type]  # a codec is hashable, as every plain object
    )
    n_keys = len(table) * GROUP + GROUP
    n_blocks = heads * -(-rows.shape[1] // kernels.ROW_BLOCK)
    cores.share(
        partial(kernels.attend, *given), work=rows.shape[0] * rows.shape[1] * n_keys * (k_dim + v_dim), most=n_blocks
    )
    del kept  # until here: the kernel reads them by their addresses
    result = mx.array(out.reshape(heads_q, length, v_dim))
    return result if q.dtype == mx.float32 else result.astype(q.dtype)


def _addresses(
    stored: list[mx.array], counts: list[int], names: tuple[str, ...]
) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[Any]]]:
    """Where the parts of each group lie ``[G, 6]``, and what must be kept alive while that is used."""
    table = np.zeros((sum(counts), 6), np.int64)
    columns = (0, 3) if len(names) == 2 else range(6)  # of keys and values, if nothing else is there
    kept = []
    at = 0
    for index, n_groups in enumerate(counts):
        for column, array in zip(columns, stored[index * len(names) :], strict=False):
            buffer = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
            if not buffer.flags.c_contiguous:
                buffer = np.ascontiguousarray(buffer)
            kept.append(buffer)
            base = buffer.__array_interface__["data"][0]
            table[at : at + n_groups, column] = base + np.arange(n_groups) * (buffer.nbytes // n_groups)
        at += n_groups
    return table, kept


@lru_cache(maxsize=16)
def _unmix(codec: Codec, dim: int, kind: int) -> npt.NDArray[np.float32]:
    """What turns stored values ``[Dv]``, in the order of a tile, into the model's: ``[W, W]``, zeros beyond Dv."""
    back = np.array(codec.from_value_space(mx.eye(dim)))  # row d: what value d alone becomes
    n_words = dim // _WORD
    column = np.arange(dim)
    order = column if kind == kernels.PLAIN else column % n_words * _WORD + column // n_words
    width = -(-dim // WIDTH) * WIDTH
    wide = np.zeros((width, width), np.float32)
    wide[:dim, :dim] = back[order]
    return wide


def swiglu(gate: mx.array, x: mx.array) -> mx.array | None:
    """``silu(gate) * x`` of float32 arrays of one shape, evaluated; None for others."""
    if not (gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape):
        return None
    mx.eval(gate, x)
    out = np.empty(gate.size, np.float32)
    gates.swiglu(*(np.ascontiguousarray(np.asarray(array)).reshape(-1) for array in (gate, x)), out)
    return mx.array(out.reshape(gate.shape))
