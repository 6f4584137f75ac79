"""A few rows times a matrix of weights, those of a decode step: in float32, or straight from packed weights.

MLX calls ``cblas_sgemm`` for such a product, which OpenBLAS computes at a fraction of the memory's rate. A function
that is compiled here takes its place: it computes up to twelve rows times a transposed matrix, each as it would be
alone, and hands anything else on to the library. A matrix that is in the table of packed weights is not read at all,
only its packed form: a fifth of the bytes or less. What is summed is the same up to rounding, in an order that is fixed
for each output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba as nb
import numpy as np
import numpy.typing as npt
from llvmlite import binding

from amem.kernels import team
from amem.kernels.vectors import (
    address_of,
    dot_codes4,
    dot_codes8,
    dot_floats,
    dots_codes4,
    dots_codes8,
    pointer,
    put,
    single,
)

SLOTS = 1 << 14  #: of the table: a power of two, several times as many as a model has matrices
#: Columns of an entry: address of the float32 matrix (0: a free slot of the table), its rows and columns, the bits of a
#: code (0: it is not packed), addresses of the codes ``[rows, columns * bits / 32]`` and of the float16 scales and
#: biases, one for each four words.
COLUMNS = 7
_MATRIX, _ROWS, _COLUMNS, BITS, _CODES, _SCALES, _BIASES = range(COLUMNS)
#: The table's last row is no slot: it counts the products with packed weights and with float32 ones, and has the
#: addresses of what computes a part of a product here and of what lets the library compute one, and whether the
#: library's products are divided at all.
_FEW_PART, _LIBRARY_PART, _DIVIDED = 2, 3, 4
#: Rows up to which a product is computed here: with more of them the library is faster.
MOST_PACKED, MOST_FLOATS = 12, 4
AT_ONCE = 4  #: rows for which the codes are read once
BLOCK_WORDS = 8  #: a row's words are a whole multiple of this
_ROW_MAJOR, _NO_TRANSPOSE, _TRANSPOSE = 101, 111, 112
#: Multiplications that are worth a thread.
WORTH_FEW, WORTH_LIBRARY = 150_000, 4_000_000
MOST_PARTS = 16  #: of a product that the library computes
TILE = 64  #: outputs of which a part has a whole multiple, as a library is slow with the rest of a tile
#: What the parts of a product are given, each in 64 bits: those of ``cblas_sgemm``, and the address of an entry.
_M, _N, _K, _A, _LDA, _B, _LDB, _C, _LDC, _ALPHA, _BETA, _ENTRY = range(12)
_N_ARGUMENTS = 12
_LIBRARY, _TABLE = "amem_library_sgemm", "amem_packed_weights"

Floats = npt.NDArray[np.float32]
Table = npt.NDArray[np.int64]

#: Numba reads it by its address, so that what was compiled can be kept on disk.
table: Table = np.zeros((SLOTS + 1, COLUMNS), np.int64)
binding.add_symbol(_TABLE, table.ctypes.data)

_compiled = nb.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
_i4, _i8, _f4 = nb.types.int32, nb.types.int64, nb.types.float32
_SGEMM = nb.types.void(_i4, _i4, _i4, _i4, _i4, _i4, _f4, _i8, _i4, _i8, _i4, _f4, _i8, _i4)
_library_sgemm = nb.types.ExternalFunction(_LIBRARY, _SGEMM)


def enter(address: int, entry: Sequence[int]) -> bool:
    """Let products with the float32 matrix at an address read its packed form; False if the table is full.

    ``entry`` has the columns of `table` after the address. Whoever enters keeps all of the arrays alive.
    """
    for probe in range(SLOTS):
        at = ((address >> 6) + probe) & (SLOTS - 1)
        if table[at, _ROWS] == 0:
            table[at, _COLUMNS:] = entry[1:]
            table[at, 0] = address  # a thread that multiplies may look at any time: the rows, which are tested, go last
            table[at, _ROWS] = entry[0]
            return True
    return False


def leave(address: int) -> None:
    """Take a matrix out of the table. Its slot can be used again, and does not end the search for others."""
    at = find(address)
    if at >= 0:
        table[at, _ROWS] = 0


def find(address: int) -> int:
    """The table's row with the packed form of the float32 matrix at an address, or -1."""
    return int(_find(table, address))


@_compiled
def _find(slots: Table, address: int) -> int:
    """The slot of a packed matrix, or -1."""
    at = (address >> 6) & (SLOTS - 1)
    while slots[at, 0] != 0:
        if slots[at, 0] == address and slots[at, _ROWS] != 0:
            return at
        at = (at + 1) & (SLOTS - 1)
    return -1


@_compiled
def _times_packed(
    entry: Table,
    begin: int,
    end: int,
    n_rows: int,
    x: int,
    x_row: int,
    alpha: np.float32,
    beta: np.float32,
    out: int,
    out_row: int,
) -> None:
    """Products of some rows at ``x`` with rows ``begin`` to ``end - 1`` of a packed matrix."""
    bits, columns = entry[BITS], entry[_COLUMNS]
    per_word = 32 // bits
    n_words = columns // per_word
    at_once = 1 if n_rows == 1 else AT_ONCE
    turned = np.zeros(((n_rows + at_once - 1) // at_once * at_once, per_word + 1, n_words), np.float32)
    for r in range(n_rows):
        for w in range(n_words):
            for j in range(per_word):
                value = single(x + r * x_row + 4 * (per_word * w + j))
                turned[r, j, w] = value
                turned[r, per_word, w] += value
    n_blocks, stride = n_words // BLOCK_WORDS, (per_word + 1) * n_words * 4
    dots = np.empty(AT_ONCE, np.float32)
    found = dots.ctypes.data
    for row in range(begin, end):
        codes = entry[_CODES] + row * n_words * 4
        scales, biases = entry[_SCALES] + row * n_words // 2, entry[_BIASES] + row * n_words // 2
        for r in range(0, n_rows, at_once):
            at = turned.ctypes.data + r * stride
            if bits == 4:
                if at_once == 1:
                    dot_codes4(codes, n_blocks, at, stride, scales, biases, found)
                else:
                    dots_codes4(codes, n_blocks, at, stride, scales, biases, found)
            elif at_once == 1:
                dot_codes8(codes, n_blocks, at, stride, scales, biases, found)
            else:
                dots_codes8(codes, n_blocks, at, stride, scales, biases, found)
            for i in range(min(at_once, n_rows - r)):
                _finish(dots[i], alpha, beta, out + (r + i) * out_row + 4 * row)


@_compiled
def _times_floats(
    matrix: int,
    columns: int,
    row_bytes: int,
    begin: int,
    end: int,
    n_rows: int,
    x: int,
    x_row: int,
    alpha: np.float32,
    beta: np.float32,
    out: int,
    out_row: int,
) -> None:
    """The same with a float32 matrix."""
    whole = columns // 32
    for row in range(begin, end):
        at = matrix + row * row_bytes
        for r in range(n_rows):
            dot = dot_floats(at, x + r * x_row, whole)
            for k in range(32 * whole, columns):
                dot += single(at + 4 * k) * single(x + r * x_row + 4 * k)
            _finish(dot, alpha, beta, out + r * out_row + 4 * row)


@_compiled
def _finish(dot: np.float32, alpha: np.float32, beta: np.float32, out: int) -> None:
    put(out, alpha * dot if beta == 0 else alpha * dot + beta * single(out))  # what is there may be no number yet


@_compiled
def _bounds(n: int, part: int, n_parts: int) -> tuple[int, int]:
    """The outputs of one part: from the first up to the second."""
    end = n if part + 1 == n_parts else n * (part + 1) // n_parts // TILE * TILE
    return n * part // n_parts // TILE * TILE, end


def _part_of_few(arguments, part, n_parts):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    a = nb.carray(pointer(arguments), (_N_ARGUMENTS,), np.int64)
    entry = nb.carray(pointer(a[_ENTRY]), (COLUMNS,), np.int64)
    begin, end = _bounds(a[_N], part, n_parts)
    m, x, x_row, out, out_row = a[_M], a[_A], 4 * a[_LDA], a[_C], 4 * a[_LDC]
    alpha, beta = single(arguments + 8 * _ALPHA), single(arguments + 8 * _BETA)
    if entry[BITS]:
        _times_packed(entry, begin, end, m, x, x_row, alpha, beta, out, out_row)
    else:
        _times_floats(entry[_MATRIX], a[_K], 4 * a[_LDB], begin, end, m, x, x_row, alpha, beta, out, out_row)


def _part_of_library(arguments, part, n_parts):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    a = nb.carray(pointer(arguments), (_N_ARGUMENTS,), np.int64)
    begin, end = _bounds(a[_N], part, n_parts)
    if begin == end:
        return
    alpha, beta = single(arguments + 8 * _ALPHA), single(arguments + 8 * _BETA)
    b, c = a[_B] + 4 * begin * a[_LDB], a[_C] + 4 * begin
    n = end - begin
    _library_sgemm(
        _ROW_MAJOR, _NO_TRANSPOSE, _TRANSPOSE, a[_M], n, a[_K], alpha, a[_A], a[_LDA], b, a[_LDB], beta, c, a[_LDC]
    )


@_compiled
def _few(given: Table) -> None:
    """Compute a product of a few rows, on as many threads as it is worth."""
    slots = nb.carray(pointer(address_of(_TABLE)), (SLOTS + 1, COLUMNS), np.int64)
    n_parts = min(team.n_threads(), given[_M] * given[_N] * given[_K] // WORTH_FEW)
    team.run(slots[SLOTS, _FEW_PART], given.ctypes.data, max(1, n_parts))


@_compiled
def _by_library(given: Table) -> None:
    """Let the library compute a product. A part may get other bits than as part of another: the size alone decides."""
    slots = nb.carray(pointer(address_of(_TABLE)), (SLOTS + 1, COLUMNS), np.int64)
    most = min(given[_M] * given[_N] * given[_K] // WORTH_LIBRARY, given[_N] // (2 * TILE), MOST_PARTS)
    n_parts = 1
    while slots[SLOTS, _DIVIDED] and 2 * n_parts <= most:
        n_parts *= 2
    team.run(slots[SLOTS, _LIBRARY_PART], given.ctypes.data, n_parts)


@_compiled
def rows_times(entry: Table, x: Floats, out: Floats) -> None:
    """``out [n, rows] = x [n, columns] @ matrix.T`` for an entry of at least `COLUMNS` values; both row by row.

    `compiled_sgemm` must have been called: many rows go to its library.
    """
    given = np.empty(_N_ARGUMENTS, np.int64)
    given[_M], given[_N], given[_K], given[_LDB] = len(x), entry[_ROWS], entry[_COLUMNS], entry[_COLUMNS]
    given[_A], given[_LDA], given[_C], given[_LDC] = x.ctypes.data, x.shape[1], out.ctypes.data, out.shape[1]
    given[_B], given[_ENTRY] = entry[_MATRIX], entry.ctypes.data
    put(given.ctypes.data + 8 * _ALPHA, np.float32(1.0))
    put(given.ctypes.data + 8 * _BETA, np.float32(0.0))
    if len(x) <= (MOST_PACKED if entry[BITS] else MOST_FLOATS):
        _few(given)
    else:
        _by_library(given)


def compiled_sgemm(library: int, *, divided: bool) -> int:
    """Address of a ``cblas_sgemm`` that computes a few rows here, and leaves the rest to the one at an address.

    ``divided``: in parts, from several threads at once. The first time on a machine it is compiled. One for each
    process: another ``library`` later changes nothing.
    """
    binding.add_symbol(_LIBRARY, library)
    part = nb.cfunc(team.PART, nopython=True, cache=True, error_model="numpy")
    table[SLOTS, _FEW_PART] = part(_part_of_few).address
    table[SLOTS, _LIBRARY_PART] = part(_part_of_library).address
    table[SLOTS, _DIVIDED] = divided

    @nb.cfunc(_SGEMM, nopython=True, cache=True, error_model="numpy")
    def sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        if order != _ROW_MAJOR or trans_a != _NO_TRANSPOSE or trans_b != _TRANSPOSE:
            _library_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)
            return
        given = np.empty(_N_ARGUMENTS + COLUMNS, np.int64)
        given[_M], given[_N], given[_K] = m, n, k
        given[_A], given[_LDA], given[_B], given[_LDB], given[_C], given[_LDC] = a, lda, b, ldb, c, ldc
        put(given.ctypes.data + 8 * _ALPHA, alpha)
        put(given.ctypes.data + 8 * _BETA, beta)
        slots = nb.carray(pointer(address_of(_TABLE)), (SLOTS + 1, COLUMNS), np.int64)
        at = _find(slots, b) if m <= MOST_PACKED else -1
        if at >= 0 and slots[at, _ROWS] == n and slots[at, _COLUMNS] == k and ldb == k:
            slots[SLOTS, 0] += 1
            given[_ENTRY] = slots[at].ctypes.data
            _few(given)
        elif m <= MOST_FLOATS:
            slots[SLOTS, 1] += 1
            given[_N_ARGUMENTS:] = 0
            given[_N_ARGUMENTS + _MATRIX] = b
            given[_ENTRY] = given.ctypes.data + 8 * _N_ARGUMENTS  # in the same memory, which is kept until it is used
            _few(given)
        else:
            _by_library(given)

    return int(sgemm.address)
