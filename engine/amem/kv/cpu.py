"""A layer's attention and gate by the compiled kernels: arrays are evaluated at once and read where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem.kernels import attention as kernels
from amem.kernels import gate as gates
from amem.kernels import team, tiles
from amem.kernels.vectors import WIDTH
from amem.kv.attention import LayerView, Stretch
from amem.kv.codec import GROUP, Codec, Parts
from amem.model.spec import WIDE

#: How each codec stores K and V, and the bits of a code: none for plain numbers.
_KINDS = {
    "q8": (tiles.CHANNEL, 8),
    "q4": (tiles.CHANNEL, 4),
    "q3": (tiles.CHANNEL, 3),
    "q2": (tiles.CHANNEL, 2),
    "q4-affine": (tiles.TOKEN, 4),
    "fp16": (tiles.PLAIN, 0),
    "exact": (tiles.PLAIN, 0),
}
Floats = npt.NDArray[np.float32]
_DTYPES = {mx.float16: tiles.FLOAT16, mx.bfloat16: tiles.BFLOAT16, mx.float32: tiles.FLOAT32}
WORTH = 1_000_000  #: multiplications that are worth a thread
_QUANTIZED, _PLAIN = ("k.codes", "k.scales", "k.biases", "v.codes", "v.scales", "v.biases"), ("k", "v")


def n_threads() -> int:
    """How many threads may compute attention; they are started, if need be."""
    return team.start() + 1


def attend(
    q: mx.array, view: LayerView, *, start: int, scale: float, codec: Codec, sinks: mx.array | None = None
) -> mx.array:
    """The same as `amem.kv.attention.attend`, on the CPU and evaluated.

    A query's result depends on its position and on what it sees alone: any chunking of the queries, and any way in
    which the groups lie in runs, give the same bits.
    """
    exact = [q, view.k_exact, view.v_exact, *(view.first or ()), *(() if sinks is None else (sinks,))]
    exact = [array if array.dtype == mx.float32 else array.astype(mx.float32) for array in exact]
    mx.eval(exact, _new_parts(view))
    buffers = [np.asarray(array) for array in exact]
    first = (buffers[3], buffers[4]) if view.first is not None else None
    logits = None if sinks is None else buffers[-1]
    out = _attend(buffers[0], view, buffers[1:3], first, logits, start=start, scale=scale, codec=codec)
    result = mx.array(out)
    return result if q.dtype == mx.float32 else result.astype(q.dtype)


def attend_evaluated(q: Floats, view: LayerView, *, start: int, scale: float, codec: Codec) -> Floats:
    """The same for ``q [Hq, L, Dk]`` and a view whose exact tokens are float32.

    It waits for no other thread, which for a single token takes as long as its attention.
    """
    mx.eval(view.k_exact, view.v_exact, view.first or (), _new_parts(view))  # in most steps nothing is left to do
    exact = [np.asarray(view.k_exact), np.asarray(view.v_exact)]
    first = None if view.first is None else (np.asarray(view.first[0]), np.asarray(view.first[1]))
    return _attend(q, view, exact, first, None, start=start, scale=scale, codec=codec)


def _new_parts(view: LayerView) -> list[mx.array]:
    """Of the stored groups whose addresses are not known yet."""
    return [part for stretch in view.stretches if not stretch.addresses for part in stretch.parts.values()]


def join(one: mx.array, other: mx.array) -> mx.array:
    """``[H, n, D]`` and ``[H, m, D]`` as ``[H, n + m, D]``, of evaluated float32 arrays, and evaluated."""
    return mx.array(np.concatenate([np.asarray(one), np.asarray(other)], axis=1))


def _attend(
    q: Floats,
    view: LayerView,
    exact: Sequence[Floats],
    first: tuple[Floats, Floats] | None,
    sinks: Floats | None,
    *,
    start: int,
    scale: float,
    codec: Codec,
) -> Floats:
    kind, bits = _KINDS[codec.name.removesuffix(WIDE)]
    heads_q, length, k_dim = q.shape
    heads, _, v_dim = exact[1].shape
    names = _QUANTIZED if bits else _PLAIN
    stretches = [stretch for stretch in view.stretches if stretch.n_tokens]
    rows = np.multiply(q, np.float32(scale), order="C").reshape(heads, -1, k_dim)
    out = np.empty((*rows.shape[:2], v_dim), np.float32)
    none = [np.empty((heads, 0, d), np.float32) for d in (k_dim, v_dim)]
    logits = np.full(heads_q, -np.inf, np.float32) if sinks is None else sinks
    dtype, k_scales, v_scales, sizes = _form(stretches[0].parts, names) if stretches else (tiles.FLOAT32, 1, 1, _NONE)
    kept: list[npt.NDArray[Any]] = []
    runs = [(s.start // GROUP, s.n_tokens // GROUP, *_addresses(s, names, kept)) for s in stretches]
    arrays = (
        rows,
        rows if kind != tiles.TOKEN else np.take(rows, _unpacked_order(k_dim, k_scales, bits), axis=-1),
        out,
        np.array(runs, np.int64).reshape(-1, 8),
        sizes,
        *(np.ascontiguousarray(array) for array in (*(first or none), *exact)),
        logits,
        _unmix(codec, v_dim, v_scales, bits),  # type: ignore[arg-type]  # a codec is hashable, as every plain object
    )
    units, window = tiles.n_units(kind, bits), view.window or 0
    numbers = (kind, bits, dtype, units, view.exact_start, start, length, k_scales, v_scales, window)
    n_keys = sum(stretch.n_tokens for stretch in stretches) + GROUP
    n_blocks = heads * -(-rows.shape[1] // kernels.ROW_BLOCK)
    work = rows.shape[0] * rows.shape[1] * n_keys * (k_dim + v_dim)
    kernels.attend(arrays, numbers, max(1, min(n_threads(), n_blocks, work // WORTH)))
    del kept  # until here: the kernel reads them by their addresses
    return out.reshape(heads_q, length, v_dim)


_NONE = np.zeros(6, np.int64)
_COLUMNS = {_QUANTIZED: range(6), _PLAIN: (0, 3)}  # of keys and values, if nothing else is there


def _form(parts: Parts, names: tuple[str, ...]) -> tuple[int, int, int, npt.NDArray[np.int64]]:
    """The dtype of scales or plain numbers, scales of one token's K and V, and the bytes of a group's parts ``[6]``."""
    sizes = np.zeros(6, np.int64)
    for column, name in zip(_COLUMNS[names], names, strict=True):
        sizes[column] = parts[name].nbytes // parts[name].shape[0]
    if names == _PLAIN:
        return _DTYPES[parts["k"].dtype], 1, 1, sizes
    return _DTYPES[parts["k.scales"].dtype], parts["k.scales"].shape[-1], parts["v.scales"].shape[-1], sizes


def _addresses(stretch: Stretch, names: tuple[str, ...], kept: list[npt.NDArray[Any]]) -> list[int]:
    """Where the parts of evaluated groups lie ``[6]``; what is only there while ``kept`` is, is not remembered."""
    if stretch.addresses:
        return stretch.addresses
    addresses, copies = [0] * 6, []
    for column, name in zip(_COLUMNS[names], names, strict=True):
        array = stretch.parts[name]
        buffer = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
        if not buffer.flags.c_contiguous:
            buffer = np.ascontiguousarray(buffer)
            copies.append(buffer)
        addresses[column] = buffer.__array_interface__["data"][0]
    if copies:
        kept.extend(copies)
    else:
        stretch.addresses.extend(addresses)
    return addresses


@lru_cache(maxsize=16)
def _unpacked_order(dim: int, n_scales: int, bits: int) -> npt.NDArray[np.int64]:
    """Which dim stands at each place of an unpacked row ``[dim]``."""
    return np.argsort(tiles.places(bits, dim, n_scales)) if bits else np.arange(dim)


@lru_cache(maxsize=16)
def _unmix(codec: Codec, dim: int, n_scales: int, bits: int) -> npt.NDArray[np.float32]:
    """What turns stored values ``[Dv]``, in the order of a tile, into the model's: ``[W, W]``, zeros beyond Dv."""
    back = np.array(codec.from_value_space(mx.eye(dim)))  # row d: what value d alone becomes
    width = -(-dim // WIDTH) * WIDTH
    wide = np.zeros((width, width), np.float32)
    wide[:dim, :dim] = back[_unpacked_order(dim, n_scales, bits)]
    return wide


def swiglu(gate: mx.array, x: mx.array) -> mx.array | None:
    """``silu(gate) * x`` of float32 arrays of one shape, evaluated; None for others."""
    if not (gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape):
        return None
    mx.eval(gate, x)
    out = np.empty(gate.size, np.float32)
    gates.swiglu(*(np.ascontiguousarray(np.asarray(array)).reshape(-1) for array in (gate, x)), out)
    return mx.array(out.reshape(gate.shape))
