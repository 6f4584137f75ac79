"""Fused attention over stored groups, compiled for this machine's processor by numba.

One tile at a time: a group's keys (or values) are unpacked, and every query row of a block is multiplied with them
while they are in the first cache. The sums of a row run over its tokens group by group, in the order of their slots
(`tiles`), and over nothing else: so a row's bits depend neither on the other rows (chunking, batches) nor on how groups
lie in runs (restores, forks).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from amem.kernels import team
from amem.kernels.exponential import exp_below_zero, exponentials, greatest
from amem.kernels.rows import hide_before, score_own, score_stored, weigh, weigh_first, weigh_own, weigh_stored
from amem.kernels.tiles import (
    GROUP,
    Addresses,
    Floats,
    compiled,
    key_tile,
    slot,
    table,
    transpose,
    value_tile,
)
from amem.kernels.vectors import pointer

ROW_BLOCK = 64  #: query rows that share an unpacked tile: a whole multiple of `vectors.ROWS`


@compiled
def _softmax(scores: int, n_groups: int, sink: np.float32) -> np.float32:
    """Turn a row's scores into weights in place, up to a factor, which it gives; the sink has a weight and no value."""
    top = greatest(scores, n_groups, sink)
    total = exponentials(scores, n_groups, top)
    factor: np.float32 = np.float32(1.0) / (total + exp_below_zero(sink - top))
    return factor


@compiled
def _seen(groups: Addresses, earliest: int, latest: int, window: int) -> tuple[int, int]:
    """Which stored groups rows at these positions see, as a range of indices."""
    begin = 0
    while window and begin < len(groups) and (groups[begin] + 1) * GROUP <= earliest - window + 1:
        begin += 1
    end = begin
    while end < len(groups) and groups[end] < latest // GROUP:
        end += 1
    return begin, end


@compiled
def _scores(
    q: Floats,
    q_stored: Floats,
    parts: Addresses,
    groups: Addresses,
    span: tuple[int, int, int, int],
    form: tuple[int, int, int, int],
    k_scales: int,
    k_first: Floats,
    k_own: Floats,
    own_start: int,
    window: int,
    head: int,
    at: int,
    positions: Addresses,
    count: int,
    scales: Floats,
    plain: Floats,
    keys: Floats,
    scores: Floats,
) -> None:
    """Scores of a block of rows with the stored groups that they see, and after those with each row's own group."""
    begin, end, own_begin, own_end = span
    kind, bits, dtype, units = form
    n_rows, dim = q.shape[1:]
    skipped = (head * n_rows + at) * dim * 4
    rows, tile, next_scores = q_stored.ctypes.data + skipped, keys.ctypes.data, scores.strides[0]
    to, factors, exact = scores.ctypes.data, scales.ctypes.data, plain.ctypes.data
    hidden = own_end * GROUP - window if window else 0  # from here on every row of the block sees all, or later
    for g in range(begin, end):
        at_codes, at_scales, at_biases = parts[g, 0], parts[g, 1], parts[g, 2]
        key_tile(kind, bits, dtype, at_codes, at_scales, at_biases, head, dim, k_scales, factors, exact, tile)
        for token in range(k_first.shape[1] if groups[g] == 0 else 0):
            keys[:, slot(token, units)] = k_first[head, token]
        if groups[g] < own_begin:
            weigh(True, rows, 4 * dim, count, dim, tile, GROUP, to, next_scores)
        else:
            score_stored(rows, dim, tile, groups[g], units, positions, count, to, next_scores)
        if groups[g] * GROUP < hidden:
            hide_before(window, groups[g], units, positions, count, to, next_scores)
        to += 4 * GROUP
    rows = q.ctypes.data + skipped
    for group in range(own_begin, own_end):
        first = group * GROUP - own_start
        n_own = min(GROUP, k_own.shape[1] - first)
        keys[:, n_own:] = np.float32(0.0)
        transpose(k_own.ctypes.data + (head * k_own.shape[1] + first) * dim * 4, n_own, dim, tile)
        score_own(rows, dim, tile, group, positions, count, window, to, next_scores)


@compiled
def _sums(
    scores: Floats,
    parts: Addresses,
    groups: Addresses,
    span: tuple[int, int, int, int],
    form: tuple[int, int, int, int],
    v_scales: int,
    first: Floats,
    v_own: Floats,
    own_start: int,
    unmix: Floats,
    head: int,
    positions: Addresses,
    count: int,
    scales: Floats,
    first_weights: Floats,
    values: Floats,
    sums: Floats,
) -> None:
    """Sums of the values that a block of rows sees, weighted by what `_scores` has become: in ``sums[0]``."""
    begin, end, own_begin, own_end = span
    _, bits, dtype, units = form
    dim, width = v_own.shape[2], len(unmix)
    tile, next_scores = values.ctypes.data, scores.strides[0]
    sums[:, :count] = np.float32(0.0)
    total = sums.ctypes.data
    stored = total + sums.strides[0]
    weights, factors = scores.ctypes.data, scales.ctypes.data
    for g in range(begin, end):
        at_codes, at_scales, at_biases = parts[g, 3], parts[g, 4], parts[g, 5]
        value_tile(bits, dtype, at_codes, at_scales, at_biases, head, dim, v_scales, factors, units, tile, width)
        if groups[g] == 0 and len(first):
            weigh_first(weights, next_scores, first, units, values, first_weights, count, total)
        if groups[g] < own_begin:
            weigh(False, weights, next_scores, count, GROUP, tile, width, stored, 4 * width)
        else:
            weigh_stored(weights, next_scores, tile, width, groups[g], positions, count, stored)
        weights += 4 * GROUP
    for group in range(own_begin, own_end):
        at = group * GROUP - own_start
        n_own = min(GROUP, v_own.shape[1] - at)
        values[:n_own, :dim] = v_own[head, at : at + n_own]
        weigh_own(weights, next_scores, tile, width, group, positions, count, total)
    weigh(False, stored, 4 * width, count, dim, unmix.ctypes.data, width, total, 4 * width)


@compiled
def _attend(
    q: Floats,
    q_stored: Floats,
    out: Floats,
    runs: Addresses,
    sizes: Addresses,
    kind: int,
    bits: int,
    dtype: int,
    units: int,
    k_first: Floats,
    v_first: Floats,
    k_own: Floats,
    v_own: Floats,
    own_start: int,
    start: int,
    length: int,
    k_scales: int,
    v_scales: int,
    window: int,
    sinks: Floats,
    unmix: Floats,
    part: int,
    n_parts: int,
) -> None:
    """Every ``n_parts``-th block of up to 64 rows of one head, from ``part`` on; for the rest see `attend`."""
    heads, n_rows, k_dim = q.shape
    v_dim, width = v_own.shape[2], len(unmix)
    parts, groups = table(runs, sizes)
    most = min(ROW_BLOCK, n_rows)
    scales = np.empty(2 * max(k_dim, GROUP * max(k_scales, v_scales)), np.float32)
    plain = np.empty((GROUP, k_dim), np.float32)
    keys = np.zeros((k_dim, GROUP), np.float32)
    values = np.zeros((GROUP, width), np.float32)
    first = np.zeros((v_first.shape[1], width), np.float32)
    first_weights = np.empty(len(first), np.float32)
    scores = np.empty((most, (len(groups) + 1) * GROUP), np.float32)
    sums = np.empty((2, most, width), np.float32)
    positions = np.empty(most, np.int64)
    factors = np.empty(most, np.float32)
    form = (kind, bits, dtype, units)
    n_blocks = -(-n_rows // ROW_BLOCK)
    for block in range(part, heads * n_blocks, n_parts):
        head, at = block // n_blocks, block % n_blocks * ROW_BLOCK
        first[:, :v_dim] = v_first[head]
        count = min(ROW_BLOCK, n_rows - at)
        earliest, latest = start + length, start
        for i in range(count):
            positions[i] = start + (at + i) % length
            earliest, latest = min(earliest, positions[i]), max(latest, positions[i])
        begin, end = _seen(groups, earliest, latest, window)
        span = (begin, end, earliest // GROUP, latest // GROUP + 1)
        _scores(
            q,
            q_stored,
            parts,
            groups,
            span,
            form,
            k_scales,
            k_first,
            k_own,
            own_start,
            window,
            head,
            at,
            positions,
            count,
            scales,
            plain,
            keys,
            scores,
        )
        for i in range(count):
            sink = sinks[head * (n_rows // length) + (at + i) // length]
            factors[i] = _softmax(scores.ctypes.data + i * scores.strides[0], end - begin + 1, sink)
        _sums(
            scores,
            parts,
            groups,
            span,
            form,
            v_scales,
            first,
            v_own,
            own_start,
            unmix,
            head,
            positions,
            count,
            scales,
            first_weights,
            values,
            sums,
        )
        for i in range(count):
            for d in range(v_dim):
                out[head, at + i, d] = sums[0, i, d] * factors[i]


#: What is given to the parts, each in 64 bits: the addresses of the arrays of `attend`, its numbers, and sizes.
_Q, _Q_STORED, _OUT, _RUNS, _SIZES, _K_FIRST, _V_FIRST, _K_OWN, _V_OWN, _SINKS, _UNMIX = range(11)
_KIND, _BITS, _DTYPE, _UNITS, _OWN_START, _START, _LENGTH, _K_SCALES, _V_SCALES, _WINDOW = range(11, 21)
_HEADS, _ROWS, _K_DIM, _V_DIM, _WIDTH, _N_RUNS, _N_FIRST, _N_OWN, _N_SINKS = range(21, 30)
_N_GIVEN = 30


def _part(arguments, part, n_parts):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    a = nb.carray(pointer(arguments), (_N_GIVEN,), np.int64)
    heads, k_dim, v_dim = a[_HEADS], a[_K_DIM], a[_V_DIM]
    _attend(
        nb.carray(pointer(a[_Q]), (heads, a[_ROWS], k_dim), np.float32),
        nb.carray(pointer(a[_Q_STORED]), (heads, a[_ROWS], k_dim), np.float32),
        nb.carray(pointer(a[_OUT]), (heads, a[_ROWS], v_dim), np.float32),
        nb.carray(pointer(a[_RUNS]), (a[_N_RUNS], 8), np.int64),
        nb.carray(pointer(a[_SIZES]), (6,), np.int64),
        a[_KIND],
        a[_BITS],
        a[_DTYPE],
        a[_UNITS],
        nb.carray(pointer(a[_K_FIRST]), (heads, a[_N_FIRST], k_dim), np.float32),
        nb.carray(pointer(a[_V_FIRST]), (heads, a[_N_FIRST], v_dim), np.float32),
        nb.carray(pointer(a[_K_OWN]), (heads, a[_N_OWN], k_dim), np.float32),
        nb.carray(pointer(a[_V_OWN]), (heads, a[_N_OWN], v_dim), np.float32),
        a[_OWN_START],
        a[_START],
        a[_LENGTH],
        a[_K_SCALES],
        a[_V_SCALES],
        a[_WINDOW],
        nb.carray(pointer(a[_SINKS]), (a[_N_SINKS],), np.float32),
        nb.carray(pointer(a[_UNMIX]), (a[_WIDTH], a[_WIDTH]), np.float32),
        part,
        n_parts,
    )


_part_function = nb.cfunc(team.PART, nopython=True, cache=True)(_part)


def attend(arrays: Sequence[npt.NDArray[Any]], numbers: Sequence[int], n_parts: int) -> None:
    """Attention of one layer and sequence. A row gets the same bits in any number of parts.

    Parameters
    ----------
    arrays
        Contiguous, float32 or int64: q, q_stored, out, runs, sizes, k_first, v_first, k_own, v_own, sinks, unmix.

        q, q_stored, out: scaled queries ``[H, R, Dk]``, the same with dims in the order of stored keys, and the outputs
        ``[H, R, Dv]``; row r stands at ``start + r % length``.

        runs, sizes: of each run of stored groups ``[2 + 6]`` the first one's number in the sequence, ascending, how
        many there are, and the addresses of their parts (codes, scales, biases of K, then of V; plain numbers take the
        first of each three). And how many bytes of each part a group takes ``[6]``.

        k_first, v_first: the exact first tokens ``[H, n, D]``, n = 0 without. k_own, v_own: the exact tokens
        ``[H, E, D]`` from position ``own_start``, where a group begins, on.

        sinks: a logit for each query head, -inf for none.

        unmix ``[Dv, Dv]``: from the order and rotation of stored values to the model's; both Dv whole multiples of 64,
        zeros beyond.
    numbers
        kind, bits, dtype and units say how the parts are stored (`tiles.n_units` says the last; no bits for plain
        numbers). own_start, start and length: the position of the first exact token and of the first query, and how
        many queries there are. k_scales, v_scales: scales of one token's keys, if they are kept per token, and of its
        values. window: tokens that a query sees, itself included; 0 for all.
    n_parts
        Among how many parts, each for a thread, blocks of up to 64 rows of one head are divided.
    """
    q, out, k_first, k_own = arrays[_Q], arrays[_OUT], arrays[_K_FIRST], arrays[_K_OWN]
    addresses = [array.__array_interface__["data"][0] for array in arrays]
    sizes = (*q.shape, out.shape[2], len(arrays[_UNMIX]), len(arrays[_RUNS]))
    tokens = (k_first.shape[1], k_own.shape[1], len(arrays[_SINKS]))
    given = np.array([*addresses, *numbers, *sizes, *tokens], np.int64)
    team.run_parts(_part_function.address, given, n_parts)
