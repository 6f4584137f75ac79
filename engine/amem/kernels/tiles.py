"""A group's keys and values as tiles of float32: 16 KB, which stay in the first cache while every query row uses them.

Codes are unpacked in the order that takes the fewest instructions. Of 64 codes in W units of C codes each (`vectors`),
code ``C u + j`` stands at place ``j W + u``. Keys per channel put a group's *tokens* in that order, its slots, and its
values follow them. Keys and values per token have the *dims* of a row in that order; a query is put in the same order,
and the matrix that undoes a value's rotation undoes its order too.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

from amem.kernels.vectors import (
    CODES,
    brain,
    brains,
    half,
    halves,
    put,
    single,
    transpose8,
    unpack2,
    unpack2_short,
    unpack3,
    unpack3_short,
    unpack4,
    unpack4_short,
    unpack8,
    unpack8_short,
)

GROUP = 64
AT_ONCE = 16  #: numbers that `halves` and `brains` widen
#: How a codec stores keys and values: codes of keys per channel, codes of keys per token, plain numbers.
CHANNEL, TOKEN, PLAIN = 0, 1, 2
#: Dtypes of scales and of plain numbers.
FLOAT16, BFLOAT16, FLOAT32 = 0, 1, 2

Floats = npt.NDArray[np.float32]
Addresses = npt.NDArray[np.int64]

compiled = nb.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})


def n_units(kind: int, bits: int) -> int:
    """Units of a group's 64 tokens, on which their slots depend; as many as tokens leave them in their order."""
    return GROUP // CODES[bits] if kind == CHANNEL else GROUP


def places(bits: int, dim: int, n_scales: int) -> npt.NDArray[np.int64]:
    """Where the unpacked dims of one token stand in a row of a tile: ``[dim]``."""
    code = np.arange(dim // n_scales)
    units = len(code) // CODES[bits]
    place = code % CODES[bits] * units + code // CODES[bits]
    return (np.arange(n_scales)[:, None] * len(code) + place).reshape(-1)


@compiled
def slot(token: int, units: int) -> int:
    """The place of a group's token in a tile."""
    per_unit = GROUP // units
    return (token % per_unit) * units + token // per_unit


@compiled
def _widen(address: int, n: int, dtype: int, out: int) -> None:
    """``n`` numbers of a dtype as float32, from one address to another."""
    i = 0
    if dtype == FLOAT16:
        while i + AT_ONCE <= n:
            halves(address + 2 * i, out + 4 * i)
            i += AT_ONCE
        for k in range(i, n):
            put(out + 4 * k, half(address + 2 * k))
    elif dtype == BFLOAT16:
        while i + AT_ONCE <= n:
            brains(address + 2 * i, out + 4 * i)
            i += AT_ONCE
        for k in range(i, n):
            put(out + 4 * k, brain(address + 2 * k))
    else:
        for k in range(n):
            put(out + 4 * k, single(address + 4 * k))


@compiled
def _unpack(
    bits: int,
    n_codes: int,
    codes: int,
    next_codes: int,
    scales: int,
    biases: int,
    step: int,
    out: int,
    next_out: int,
    n: int,
) -> None:
    """``n`` rows of 64 or 32 codes; see `vectors.unpack4`."""
    if n_codes == GROUP:
        if bits == 4:
            unpack4(codes, next_codes, scales, biases, step, out, next_out, n)
        elif bits == 3:
            unpack3(codes, next_codes, scales, biases, step, out, next_out, n)
        elif bits == 2:
            unpack2(codes, next_codes, scales, biases, step, out, next_out, n)
        else:
            unpack8(codes, next_codes, scales, biases, step, out, next_out, n)
    elif bits == 4:
        unpack4_short(codes, next_codes, scales, biases, step, out, next_out, n)
    elif bits == 3:
        unpack3_short(codes, next_codes, scales, biases, step, out, next_out, n)
    elif bits == 2:
        unpack2_short(codes, next_codes, scales, biases, step, out, next_out, n)
    else:
        unpack8_short(codes, next_codes, scales, biases, step, out, next_out, n)


@compiled
def _unpack_tokens(
    bits: int, codes: int, dim: int, n_scales: int, scales: int, biases: int, units: int, out: int, next_out: int
) -> None:
    """Codes of 64 tokens, one row after another, as rows in the order of slots; each token has so many scales."""
    per_unit, per_scale = GROUP // units, dim // n_scales
    next_codes = dim * bits // 8
    for token in range(per_unit):  # with it one token of each unit
        for s in range(n_scales):
            at = 4 * (token * n_scales + s)
            _unpack(
                bits,
                per_scale,
                codes + token * next_codes + s * per_scale * bits // 8,
                per_unit * next_codes,
                scales + at,
                biases + at,
                4 * per_unit * n_scales,
                out + token * units * next_out + 4 * s * per_scale,
                next_out,
                units,
            )


@compiled
def transpose(source: int, n_rows: int, columns: int, tile: int) -> None:
    """Rows of so many columns, one after another, as the first columns of a tile of rows of 64."""
    next_source, next_out = 4 * columns, 4 * GROUP
    whole_rows, whole_columns = n_rows // 8 * 8, columns // 8 * 8
    for row in range(0, whole_rows, 8):
        for column in range(0, whole_columns, 8):
            from_, to = source + row * next_source + 4 * column, tile + column * next_out + 4 * row
            transpose8(from_, next_source, to, next_out)
    for row in range(n_rows):
        for column in range(whole_columns if row < whole_rows else 0, columns):
            put(tile + column * next_out + 4 * row, single(source + row * next_source + 4 * column))


@compiled
def key_tile(
    kind: int,
    bits: int,
    dtype: int,
    codes: int,
    stored_scales: int,
    stored_biases: int,
    head: int,
    dim: int,
    n_scales: int,
    scales: int,
    rows: int,
    tile: int,
) -> None:
    """A group's keys as a tile ``[dim, slot]``, the dims of keys per token as they are unpacked.

    There is room for twice as many ``scales`` as a group has, and for its keys in ``rows``.
    """
    if kind == PLAIN:
        size = 4 if dtype == FLOAT32 else 2
        _widen(codes + head * GROUP * dim * size, GROUP * dim, dtype, rows)
        transpose(rows, GROUP, dim, tile)
        return
    n = dim if kind == CHANNEL else GROUP * n_scales
    biases = scales + 4 * n
    _widen(stored_scales + head * n * 2, n, dtype, scales)
    _widen(stored_biases + head * n * 2, n, dtype, biases)
    codes += head * (GROUP * dim * bits // 8)
    if kind == CHANNEL:
        _unpack(bits, GROUP, codes, GROUP * bits // 8, scales, biases, 4, tile, 4 * GROUP, dim)
    else:
        _unpack_tokens(bits, codes, dim, n_scales, scales, biases, GROUP, rows, 4 * dim)
        transpose(rows, GROUP, dim, tile)


@compiled
def value_tile(
    bits: int,
    dtype: int,
    codes: int,
    stored_scales: int,
    stored_biases: int,
    head: int,
    dim: int,
    n_scales: int,
    scales: int,
    units: int,
    tile: int,
    width: int,
) -> None:
    """A group's values as a tile ``[slot, width]``, codes in the order in which they are unpacked. No bits: numbers."""
    if bits == 0:
        size = 4 if dtype == FLOAT32 else 2
        for token in range(GROUP):
            _widen(codes + (head * GROUP + token) * dim * size, dim, dtype, tile + token * 4 * width)
        return
    n = GROUP * n_scales
    biases = scales + 4 * n
    _widen(stored_scales + head * n * 2, n, dtype, scales)
    _widen(stored_biases + head * n * 2, n, dtype, biases)
    codes += head * (GROUP * dim * bits // 8)
    _unpack_tokens(bits, codes, dim, n_scales, scales, biases, units, tile, 4 * width)


@compiled
def table(runs: Addresses, sizes: Addresses) -> tuple[Addresses, Addresses]:
    """Addresses of each group's parts ``[G, 6]``, and the groups' numbers, from those of whole runs: see `attend`."""
    n_groups = 0
    for run in range(len(runs)):
        n_groups += runs[run, 1]
    parts, groups = np.empty((n_groups, 6), np.int64), np.empty(n_groups, np.int64)
    at = 0
    for run in range(len(runs)):
        for i in range(runs[run, 1]):
            groups[at] = runs[run, 0] + i
            for part in range(6):
                parts[at, part] = runs[run, 2 + part] + i * sizes[part]
            at += 1
    return parts, groups
