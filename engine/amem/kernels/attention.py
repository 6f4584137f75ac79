"""Fused attention over stored groups, compiled for this machine's processor by numba.

One tile at a time: a group's keys (or values) are unpacked into 16 KB of float32, and every query row of a block is
multiplied with it while it is in the first cache. The sums of a row run over its tokens in the order of their
positions, and over nothing else: so a row's bits depend neither on the other rows (chunking, batches) nor on how
groups lie in runs (restores, forks).

Within a tile of 4-bit codes the order is that of the nibbles, which needs no shuffle: of a row of words, code
``8 w + j`` stands at ``j * n_words + w``. Keys and values of a tile have the same order of tokens; the order of a
value's dims is undone by the matrix that undoes its rotation.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

from amem.kernels.exponential import exp_below_zero
from amem.kernels.vectors import ROWS, WIDTH, accumulate, accumulate_rows, brain, half, single, unpack4, unpack8

GROUP = 64
#: How a codec stores keys and values: 4-bit keys per channel, 4-bit keys per token, plain numbers.
CHANNEL, TOKEN, PLAIN = 0, 1, 2
#: Dtypes of scales and of plain numbers.
FLOAT16, BFLOAT16, FLOAT32 = 0, 1, 2
ROW_BLOCK = 64  #: query rows that share an unpacked tile: a whole multiple of `ROWS`
_WORD = 8  #: codes in a word of 32 bits

Floats = npt.NDArray[np.float32]
Addresses = npt.NDArray[np.int64]

_compiled = nb.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})


@_compiled
def _slot(token: int) -> int:
    """The place of a group's token in a tile."""
    return (token % _WORD) * _WORD + token // _WORD


@_compiled
def _widen(address: int, n: int, dtype: int, out: Floats) -> None:
    """``n`` numbers of a dtype as float32."""
    if dtype == FLOAT16:
        for i in range(n):
            out[i] = half(address + 2 * i)
    elif dtype == BFLOAT16:
        for i in range(n):
            out[i] = brain(address + 2 * i)
    else:
        for i in range(n):
            out[i] = single(address + 4 * i)


@_compiled
def _unpack_rows(
    codes: int, n_rows: int, n_words: int, n_scales: int, scales: Floats, in_slots: bool, tile: Floats
) -> None:
    """Rows of codes, one after another from an address on, as rows of a tile, or as those of the tokens' slots.

    ``scales [2, n_rows * n_scales]`` has the scales and the biases.
    """
    per_scale = n_words // n_scales
    width = tile.shape[1]
    for row in range(n_rows):
        out = tile.ctypes.data + (_slot(row) if in_slots else row) * width * 4
        for s in range(n_scales):
            i = row * n_scales + s
            words = codes + i * per_scale * 4
            if per_scale == 4:
                unpack4(words, scales[0, i], scales[1, i], out + s * 16, n_words * 4)
            else:
                for w in range(0, per_scale, 8):
                    unpack8(words + w * 4, scales[0, i], scales[1, i], out + (s * per_scale + w) * 4, n_words * 4)


@_compiled
def _transpose(source: Floats, columns: int, in_nibbles: bool, out: Floats) -> None:
    """``source[token, column]`` as ``out[dim, slot]``; columns in the order of nibbles are put back."""
    n_words = columns // _WORD
    for token in range(GROUP):
        slot = _slot(token)
        for column in range(columns):
            dim = (column % n_words) * _WORD + column // n_words if in_nibbles else column
            out[dim, slot] = source[token, column]


@_compiled
def _key_tile(
    kind: int,
    dtype: int,
    parts: Addresses,
    head: int,
    dim: int,
    n_scales: int,
    scales: Floats,
    rows: Floats,
    tile: Floats,
) -> None:
    """A group's keys as ``tile[dim, slot]``."""
    if kind == PLAIN:
        size = 4 if dtype == FLOAT32 else 2
        for token in range(GROUP):
            _widen(parts[0] + (head * GROUP + token) * dim * size, dim, dtype, rows[token])
        _transpose(rows, dim, False, tile)
        return
    n = dim if kind == CHANNEL else GROUP * n_scales
    _widen(parts[1] + head * n * 2, n, dtype, scales[0])
    _widen(parts[2] + head * n * 2, n, dtype, scales[1])
    codes = parts[0] + head * (GROUP * dim // 2)
    if kind == CHANNEL:
        _unpack_rows(codes, dim, GROUP // _WORD, 1, scales, False, tile)
    else:
        _unpack_rows(codes, GROUP, dim // _WORD, n_scales, scales, False, rows)
        _transpose(rows, dim, True, tile)


@_compiled
def _value_tile(
    kind: int, dtype: int, parts: Addresses, head: int, dim: int, n_scales: int, scales: Floats, tile: Floats
) -> None:
    """A group's values as ``tile[slot, column]``, columns in the order of nibbles if they are codes."""
    if kind == PLAIN:
        size = 4 if dtype == FLOAT32 else 2
        for token in range(GROUP):
            _widen(parts[3] + (head * GROUP + token) * dim * size, dim, dtype, tile[_slot(token)])
        return
    n = GROUP * n_scales
    _widen(parts[4] + head * n * 2, n, dtype, scales[0])
    _widen(parts[5] + head * n * 2, n, dtype, scales[1])
    codes = parts[3] + head * (GROUP * dim // 2)
    _unpack_rows(codes, GROUP, dim // _WORD, n_scales, scales, True, tile)


@_compiled
def _weigh(weights: Floats, n: int, tile: Floats, fresh: bool, out: Floats) -> None:
    """``out (+)= weights[:, :n] @ tile[:n]`` of some rows; out and tile are whole multiples of `WIDTH` wide."""
    next_weights, next_out = weights.strides[0], out.strides[0]
    width = tile.shape[1]
    row = 0
    while row < len(weights):
        a, sums = weights.ctypes.data + row * next_weights, out.ctypes.data + row * next_out
        several = row + ROWS <= len(weights)
        for column in range(0, width * 4, WIDTH * 4):
            to, values = sums + column, tile.ctypes.data + column
            if several:
                accumulate_rows(fresh, a, next_weights, n, values, width * 4, to, next_out)
            else:
                accumulate(fresh, a, next_weights, n, values, width * 4, to, next_out)
        row += ROWS if several else 1


@_compiled
def _softmax(scores: Floats, sink: np.float32, lanes: Floats) -> None:
    """Turn a row's scores, groups of 64, into weights in place; the sink has a weight and no value.

    Sums run in 64 lanes over the groups and then over the lanes, however wide the processor's vectors are.
    """
    most, total = lanes[0], lanes[1]
    for i in range(GROUP):
        most[i] = sink
        total[i] = np.float32(0.0)
    for at in range(0, len(scores), GROUP):
        row = scores[at : at + GROUP]
        for i in range(GROUP):
            most[i] = max(most[i], row[i])
    top = sink
    for i in range(GROUP):
        top = max(top, most[i])
    for at in range(0, len(scores), GROUP):
        row = scores[at : at + GROUP]
        for i in range(GROUP):
            e = exp_below_zero(row[i] - top)
            row[i] = e
            total[i] += e
    half_way = GROUP // 2
    while half_way:
        for i in range(half_way):
            total[i] += total[i + half_way]
        half_way //= 2
    inverse = np.float32(1.0) / (total[0] + exp_below_zero(sink - top))
    for i in range(len(scores)):
        scores[i] *= inverse


@_compiled
def _stretch(group: int, own: bool, first_row: int, row: int, count: int, start: int, length: int) -> tuple[int, int]:
    """The next rows, one after another, that see a stored group, or whose own group it is: first and end."""
    while row < count and not _sees(group, own, start + (first_row + row) % length):
        row += 1
    end = row
    while end < count and _sees(group, own, start + (first_row + end) % length):
        end += 1
    return row, end


@_compiled
def _sees(group: int, own: bool, t: int) -> bool:
    return t // GROUP == group if own else group < t // GROUP


@_compiled
def _score_stored(
    q: Floats, key_tile: Floats, group: int, first_row: int, start: int, length: int, window: int, scores: Floats
) -> None:
    """Scores of some rows with one stored group, in the order of slots; -inf where a row does not see a token."""
    end = 0
    while end < len(scores):
        before = end
        row, end = _stretch(group, False, first_row, before, len(scores), start, length)
        scores[before:row, :] = np.float32(-np.inf)
        _weigh(q[first_row + row : first_row + end], q.shape[1], key_tile, True, scores[row:end])
    for i in range(len(scores) if window else 0):
        for token in range(min(GROUP, start + (first_row + i) % length - window + 1 - group * GROUP)):
            scores[i, _slot(token)] = np.float32(-np.inf)


@_compiled
def _score_own(
    q: Floats, key_tile: Floats, group: int, first_row: int, start: int, length: int, window: int, scores: Floats
) -> None:
    """The same with the exact group, for the rows whose own it is; in the order of tokens."""
    end = 0
    while end < len(scores):
        row, end = _stretch(group, True, first_row, end, len(scores), start, length)
        _weigh(q[first_row + row : first_row + end], q.shape[1], key_tile, True, scores[row:end])
        for i in range(row, end):
            t = start + (first_row + i) % length
            for token in range(t - window + 1 - group * GROUP if window else 0):
                scores[i, token] = np.float32(-np.inf)
            for token in range(t % GROUP + 1, GROUP):
                scores[i, token] = np.float32(-np.inf)


@_compiled
def _weigh_stored(
    scores: Floats, value_tile: Floats, group: int, first_row: int, start: int, length: int, sums: Floats
) -> None:
    """Add one stored group's weighted values for the rows that see it."""
    end = 0
    while end < len(scores):
        row, end = _stretch(group, False, first_row, end, len(scores), start, length)
        _weigh(scores[row:end], GROUP, value_tile, False, sums[row:end])


@_compiled
def _weigh_first(
    group: int, scores: Floats, v_first: Floats, value_tile: Floats, weights: Floats, sums: Floats
) -> None:
    """Add the exact first tokens' weighted values, if this is their group; their stored ones leave the tile."""
    n_first = len(v_first) if group == 0 else 0
    for token in range(n_first):
        value_tile[_slot(token)] = np.float32(0.0)
    for i in range(len(scores)):
        for token in range(n_first):
            weights[0, token] = scores[i, _slot(token)]
        _weigh(weights, n_first, v_first, False, sums[i : i + 1])  # no terms in other groups


@_compiled
def _weigh_own(
    scores: Floats, value_tile: Floats, group: int, first_row: int, start: int, length: int, sums: Floats
) -> None:
    """Add the exact group's weighted values for the rows whose own it is."""
    for i in range(len(scores)):
        t = start + (first_row + i) % length
        if t // GROUP == group:
            _weigh(scores[i : i + 1], t % GROUP + 1, value_tile, False, sums[i : i + 1])


@_compiled
def _span(first_row: int, count: int, start: int, length: int) -> tuple[int, int]:
    """The earliest and the latest position of some rows."""
    earliest, latest = start + length, start
    for row in range(first_row, first_row + count):
        earliest = min(earliest, start + row % length)
        latest = max(latest, start + row % length)
    return earliest, latest


@_compiled
def _seen(groups: Addresses, earliest: int, latest: int, window: int) -> tuple[int, int]:
    """Which stored groups rows at these positions see, as a range of indices."""
    begin = 0
    while window and begin < len(groups) and (groups[begin] + 1) * GROUP <= earliest - window + 1:
        begin += 1
    end = begin
    while end < len(groups) and groups[end] < latest // GROUP:
        end += 1
    return begin, end


@_compiled
def _put_first_keys(group: int, k_first: Floats, tile: Floats) -> None:
    """Put the exact first tokens in place of their stored form, if this is their group."""
    for token in range(len(k_first) if group == 0 else 0):
        tile[:, _slot(token)] = k_first[token]


@_compiled
def _own_key_tile(k_own: Floats, at: int, tile: Floats) -> None:
    n = min(GROUP, len(k_own) - at)
    tile[:, n:] = np.float32(0.0)
    for token in range(n):
        tile[:, token] = k_own[at + token]


@nb.njit(
    "void(f4[:,:,::1], f4[:,:,::1], i8[:,::1], i8[::1], i8, i8, f4[:,:,::1], f4[:,:,::1], f4[:,:,::1], f4[:,:,::1],"
    " i8, i8, i8, i8, i8, i8, f4[::1], f4[:,::1], i8, i8)",
    nogil=True,
    cache=True,
    error_model="numpy",
    fastmath={"contract"},
)
def attend(
    q: Floats,
    out: Floats,
    parts: Addresses,
    groups: Addresses,
    kind: int,
    dtype: int,
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
    """Attention of one layer and sequence, or one part of it.

    Parameters
    ----------
    q, out
        Scaled queries ``[H, R, Dk]`` and their outputs ``[H, R, Dv]``; row r stands at ``start + r % length``.
    parts, groups
        Addresses of each stored group's parts ``[G, 6]`` (codes, scales, biases of K, then of V; plain numbers take
        the first of each three), and the groups' numbers in the sequence, ascending.
    kind, dtype
        How the parts are stored.
    k_first, v_first
        The exact first tokens ``[H, n, D]``, n = 0 without.
    k_own, v_own
        The exact tokens ``[H, E, D]`` from position ``own_start``, where a group begins, on.
    start, length
        Position of the first query, and how many there are.
    k_scales, v_scales
        Scales of one token's keys, if they are kept per token, and of its values.
    window
        Tokens that a query sees, itself included; 0 for all.
    sinks
        A logit for each query head, -inf for none.
    unmix
        ``[Dv, Dv]``: from the order and rotation of stored values to the model's; both Dv whole multiples of 64, zeros
        beyond.
    part, n_parts
        Which of the blocks of up to 64 rows of one head are computed: every ``n_parts``-th from ``part`` on. Parts may
        run at the same time, and each gives all bits of its own rows.
    """
    heads, n_rows, k_dim = q.shape
    v_dim = v_own.shape[2]
    n_first = k_first.shape[1]
    scales = np.empty((2, max(k_dim, GROUP * max(k_scales, v_scales))), np.float32)
    plain = np.empty((GROUP, k_dim), np.float32)
    key_tile = np.zeros((k_dim, GROUP), np.float32)
    value_tile = np.zeros((GROUP, len(unmix)), np.float32)
    first_tile = np.zeros((n_first, len(unmix)), np.float32)
    first_weights = np.zeros((1, max(1, n_first)), np.float32)
    lanes = np.empty((2, GROUP), np.float32)
    scores = np.empty((min(ROW_BLOCK, n_rows), (len(groups) + 1) * GROUP), np.float32)
    stored_sum = np.empty((len(scores), len(unmix)), np.float32)
    exact_sum = np.empty((len(scores), len(unmix)), np.float32)
    n_blocks = -(-n_rows // ROW_BLOCK)
    for block in range(part, heads * n_blocks, n_parts):
        head, at = block // n_blocks, block % n_blocks * ROW_BLOCK
        first_tile[:, :v_dim] = v_first[head]
        count = min(ROW_BLOCK, n_rows - at)
        earliest, latest = _span(at, count, start, length)
        begin, end = _seen(groups, earliest, latest, window)
        own = scores[:count, (end - begin) * GROUP : (end - begin + 1) * GROUP]
        for g in range(begin, end):
            seen = scores[:count, (g - begin) * GROUP : (g - begin + 1) * GROUP]
            _key_tile(kind, dtype, parts[g], head, k_dim, k_scales, scales, plain, key_tile)
            _put_first_keys(groups[g], k_first[head], key_tile)
            _score_stored(q[head], key_tile, groups[g], at, start, length, window, seen)
        for group in range(earliest // GROUP, latest // GROUP + 1):
            _own_key_tile(k_own[head], group * GROUP - own_start, key_tile)
            _score_own(q[head], key_tile, group, at, start, length, window, own)
        for i in range(count):
            sink = sinks[head * (n_rows // length) + (at + i) // length]
            _softmax(scores[i, : (end - begin + 1) * GROUP], sink, lanes)
        stored_sum[:count] = np.float32(0.0)
        exact_sum[:count] = np.float32(0.0)
        for g in range(begin, end):
            seen = scores[:count, (g - begin) * GROUP : (g - begin + 1) * GROUP]
            _value_tile(kind, dtype, parts[g], head, v_dim, v_scales, scales, value_tile)
            _weigh_first(groups[g], seen, first_tile, value_tile, first_weights, exact_sum)
            _weigh_stored(seen, value_tile, groups[g], at, start, length, stored_sum)
        for group in range(earliest // GROUP, latest // GROUP + 1):
            first = group * GROUP - own_start
            n_own = min(GROUP, k_own.shape[1] - first)
            value_tile[:n_own, :v_dim] = v_own[head, first : first + n_own]
            _weigh_own(own, value_tile, group, at, start, length, exact_sum)
        _weigh(stored_sum[:count], v_dim, unmix, False, exact_sum[:count])
        out[head, at : at + count] = exact_sum[:count, :v_dim]
