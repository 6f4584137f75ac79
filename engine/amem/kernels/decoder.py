"""What a decoder layer computes for some tokens, but for its attention.

MLX dispatches each operation to a thread of its own: for a token's row of some hundred values that costs more than to
compute it, and of a prompt's rows all but the products is computed on one core, several times over memory. Here is what
lies before a layer's attention in one call, and what lies after it in another. All arrays are float32. Up to twelve
rows (four, if their matrices are not packed) get each the bits that they have alone.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

from amem.kernels.gate import swiglu
from amem.kernels.product import COLUMNS, rows_times
from amem.kernels.vectors import single

Floats = npt.NDArray[np.float32]
Entries = npt.NDArray[np.int64]

#: The layer's matrices in `Entries [7, COLUMNS + 1]`: each has the columns of `amem.kernels.product.table`, and the
#: address of its bias or 0.
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741
BIAS = COLUMNS

_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract"}}
_compiled = nb.njit(**_OPTIONS)
_rows, _row, _entries, _row_of_entries = nb.f4[:, ::1], nb.f4[::1], nb.i8[:, ::1], nb.i8[::1]
_float, _int = nb.f4, nb.i8
_BEFORE = nb.void(
    _rows, _entries, _row, _float, _row, _row, _float, _int, _rows, _rows, nb.types.boolean, _rows, _rows, _rows
)
_NORM = nb.void(_rows, _row, _float, _rows)
_PROJECT = nb.void(_row_of_entries, _rows, _rows)
_AFTER = nb.void(_rows, _rows, _entries, _row, _float, _rows)


@nb.njit(_NORM, **_OPTIONS)
def rms_norm(x: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    """``x / sqrt(mean(x**2) + eps) * weight`` of each row ``[n, D]`` (arXiv 1910.07467); ``out`` may be x."""
    dim = x.shape[1]
    for row in range(len(x)):
        total = np.float32(0.0)
        for i in range(dim):
            total += x[row, i] * x[row, i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(dim) + eps)
        for i in range(dim):
            out[row, i] = x[row, i] * scale * weight[i]


@_compiled
def rope(x: Floats, head_dim: int, cos: Floats, sin: Floats, traditional: bool) -> None:
    """Rotate the first dims of each head in place (arXiv 2104.09864): ``x [n, H * D]``, ``cos, sin [n, dims/2]``.

    A pair is (i, i + dims/2), or (2i, 2i + 1) in the traditional form.
    """
    half = cos.shape[1]
    step, apart = (2, 1) if traditional else (1, half)
    for row in range(len(x)):
        for head in range(0, x.shape[1], head_dim):
            for i in range(half):
                at = head + i * step
                one, other = x[row, at], x[row, at + apart]
                x[row, at] = one * cos[row, i] - other * sin[row, i]
                x[row, at + apart] = one * sin[row, i] + other * cos[row, i]


@_compiled
def _add(x: Floats, out: Floats) -> None:
    for row in range(len(x)):
        for i in range(x.shape[1]):
            out[row, i] += x[row, i]


@_compiled
def _add_bias(address: int, out: Floats) -> None:
    for row in range(len(out) if address else 0):
        for i in range(out.shape[1]):
            out[row, i] += single(address + 4 * i)


@nb.njit(_PROJECT, **_OPTIONS)
def project(entry: Entries, x: Floats, out: Floats) -> None:
    """A linear layer ``[n, N]`` of some rows ``x [n, K]``."""
    rows_times(entry, x, out)
    _add_bias(entry[BIAS], out)


@nb.njit(_BEFORE, **_OPTIONS)
def before_attention(
    x: Floats,
    entries: Entries,
    norm: Floats,
    eps: np.float32,
    q_norm: Floats,
    k_norm: Floats,
    head_eps: np.float32,
    head_dim: int,
    cos: Floats,
    sin: Floats,
    traditional: bool,
    q: Floats,
    k: Floats,
    v: Floats,
) -> None:
    """Queries ``[n, Hq * Dk]``, keys ``[n, H * Dk]`` and values ``[n, H * Dv]`` of a layer's input ``x [n, D]``.

    ``q_norm`` and ``k_norm`` are the weights ``[Dk]`` of norms over each head, or empty; for the rest see `rope`.
    """
    normed = np.empty_like(x)
    rms_norm(x, norm, eps, normed)
    project(entries[Q], normed, q)
    project(entries[K], normed, k)
    project(entries[V], normed, v)
    if len(q_norm):
        q_heads, k_heads = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
        rms_norm(q_heads, q_norm, head_eps, q_heads)
        rms_norm(k_heads, k_norm, head_eps, k_heads)
    rope(q, head_dim, cos, sin, traditional)
    rope(k, head_dim, cos, sin, traditional)


@nb.njit(_AFTER, **_OPTIONS)
def after_attention(x: Floats, attended: Floats, entries: Entries, norm: Floats, eps: np.float32, out: Floats) -> None:
    """A layer's output ``[n, D]`` from its input ``x`` and its attention ``[n, Hq * Dv]``; ``out`` may not be x."""
    project(entries[O], attended, out)
    _add(x, out)
    normed = np.empty_like(x)
    rms_norm(out, norm, eps, normed)
    gate = np.empty((len(x), entries[GATE, 1]), np.float32)
    up = np.empty_like(gate)
    project(entries[GATE], normed, gate)
    project(entries[UP], normed, up)
    swiglu(gate.reshape(-1), up.reshape(-1), gate.reshape(-1))
    project(entries[DOWN], gate, normed)
    _add(normed, out)
