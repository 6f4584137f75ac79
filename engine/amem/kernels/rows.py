"""Query rows times one group's tile: scores and weighted sums, of those rows that see the group.

Arrays are addresses here, with bytes from one row to the next: numba counts each slice of an array, which takes as long
as a row.
"""

from __future__ import annotations

import numpy as np

from amem.kernels.tiles import GROUP, Addresses, Floats, compiled, slot
from amem.kernels.vectors import ROWS, WIDTH, accumulate1, accumulate2, accumulate3, accumulate4, put, single


@compiled
def weigh(
    fresh: bool, weights: int, next_weights: int, n_rows: int, n: int, tile: int, width: int, out: int, next_out: int
) -> None:
    """``out (+)= weights[:, :n] @ tile[:n]`` of some rows; out and tile are whole multiples of `WIDTH` wide."""
    row = 0
    while row < n_rows:
        several = min(ROWS, n_rows - row)
        a, to, values = weights + row * next_weights, out + row * next_out, tile
        for _ in range(0, width, WIDTH):
            if several == 4:
                accumulate4(fresh, a, next_weights, n, values, 4 * width, to, next_out)
            elif several == 3:
                accumulate3(fresh, a, next_weights, n, values, 4 * width, to, next_out)
            elif several == 2:
                accumulate2(fresh, a, next_weights, n, values, 4 * width, to, next_out)
            else:
                accumulate1(fresh, a, next_weights, n, values, 4 * width, to, next_out)
            to += 4 * WIDTH
            values += 4 * WIDTH
        row += several


@compiled
def _stretch(group: int, own: bool, positions: Addresses, row: int, count: int) -> tuple[int, int]:
    """The next rows, one after another, that see a stored group, or whose own group it is: first and end."""
    while row < count and not _sees(group, own, positions[row]):
        row += 1
    end = row
    while end < count and _sees(group, own, positions[end]):
        end += 1
    return row, end


@compiled
def _sees(group: int, own: bool, t: int) -> bool:
    before = t < (group + 1) * GROUP
    return (before and t >= group * GROUP) if own else not before


@compiled
def _hide(scores: int, first: int, end: int, units: int) -> None:
    """A row sees none of these tokens of a group."""
    for token in range(first, end):
        put(scores + 4 * slot(token, units), np.float32(-np.inf))


@compiled
def score_stored(
    q: int,
    dim: int,
    tile: int,
    group: int,
    units: int,
    positions: Addresses,
    count: int,
    scores: int,
    next_scores: int,
) -> None:
    """Scores of some rows with one stored group, in the order of slots; -inf where a row does not see it."""
    end = 0
    while end < count:
        before = end
        row, end = _stretch(group, False, positions, before, count)
        for i in range(before, row):
            _hide(scores + i * next_scores, 0, GROUP, units)
        from_, to = q + row * 4 * dim, scores + row * next_scores
        weigh(True, from_, 4 * dim, end - row, dim, tile, GROUP, to, next_scores)


@compiled
def hide_before(
    window: int, group: int, units: int, positions: Addresses, count: int, scores: int, next_scores: int
) -> None:
    """Rows do not see what their window has left behind of a stored group."""
    for i in range(count):
        _hide(scores + i * next_scores, 0, min(GROUP, positions[i] - window + 1 - group * GROUP), units)


@compiled
def score_own(
    q: int,
    dim: int,
    tile: int,
    group: int,
    positions: Addresses,
    count: int,
    window: int,
    scores: int,
    next_scores: int,
) -> None:
    """The same with the exact group, for the rows whose own it is; in the order of tokens."""
    end = 0
    while end < count:
        row, end = _stretch(group, True, positions, end, count)
        from_, to = q + row * 4 * dim, scores + row * next_scores
        weigh(True, from_, 4 * dim, end - row, dim, tile, GROUP, to, next_scores)
        for i in range(row, end):
            _hide(scores + i * next_scores, 0, positions[i] - window + 1 - group * GROUP if window else 0, GROUP)
            _hide(scores + i * next_scores, positions[i] % GROUP + 1, GROUP, GROUP)


@compiled
def weigh_stored(
    scores: int,
    next_scores: int,
    tile: int,
    width: int,
    group: int,
    positions: Addresses,
    count: int,
    sums: int,
) -> None:
    """Add one stored group's weighted values for the rows that see it."""
    end = 0
    while end < count:
        row, end = _stretch(group, False, positions, end, count)
        from_, to = scores + row * next_scores, sums + row * 4 * width
        weigh(False, from_, next_scores, end - row, GROUP, tile, width, to, 4 * width)


@compiled
def weigh_first(
    scores: int,
    next_scores: int,
    first: Floats,
    units: int,
    values: Floats,
    weights: Floats,
    count: int,
    sums: int,
) -> None:
    """Add the exact first tokens' weighted values; the stored ones leave the tile, which is the first group's."""
    n_first, width = first.shape
    for token in range(n_first):
        values[slot(token, units)] = np.float32(0.0)
    for i in range(count):
        for token in range(n_first):
            weights[token] = single(scores + i * next_scores + 4 * slot(token, units))
        to = sums + i * 4 * width
        weigh(False, weights.ctypes.data, 0, 1, n_first, first.ctypes.data, width, to, 0)


@compiled
def weigh_own(
    scores: int,
    next_scores: int,
    tile: int,
    width: int,
    group: int,
    positions: Addresses,
    count: int,
    sums: int,
) -> None:
    """Add the exact group's weighted values for the rows whose own it is."""
    for i in range(count):
        if positions[i] // GROUP == group:
            from_, to = scores + i * next_scores, sums + i * 4 * width
            weigh(False, from_, next_scores, 1, positions[i] % GROUP + 1, tile, width, to, 4 * width)
