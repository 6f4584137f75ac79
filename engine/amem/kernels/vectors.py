"""The few vector operations from which the kernels are built, as LLVM instructions.

Numba compiles loops over arrays well, but not loops over eight words or sixty-four sums that should stay in registers.
These take plain addresses, and are compiled into whatever function calls them. Loads and stores need no alignment.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 64  #: floats of each row that `accumulate1` keeps in registers
_LANES = 8  # of 32 bits: a vector that every 64-bit processor has, or has in two halves
#: Rows that are accumulated at once: as many as the registers hold.
ROWS = 4 if binding.get_host_cpu_features().get("avx512f") else 1
#: Codes in a unit, by their bits: a word of 32 bits, and for 3 bits, which do not end at words, three bytes.
CODES = {2: 16, 3: 8, 4: 8, 8: 4}
_STRADDLING = 3

_FLOAT, _HALF, _INT = ir.FloatType(), ir.HalfType(), ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, _LANES)


def typed_at(builder: Any, address: Any, kind: Any, offset: Any = 0) -> Any:
    """A pointer to ``kind`` at ``address + offset`` bytes."""
    if isinstance(offset, int):
        offset = ir.Constant(ir.IntType(64), offset)
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def splat(builder: Any, value: Any, lanes: int) -> Any:
    """A vector of one value."""
    kind = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_INT, 0))
    zeros = ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of vectors of float32, rounded once."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32")
    return builder.call(function, [a, b, c])


def _accumulate(rows: int) -> Any:
    lanes = 2 * _LANES if ROWS > 1 else _LANES  # of no consequence for the result
    floats = ir.VectorType(_FLOAT, lanes)
    places = range(0, WIDTH * 4, lanes * 4)

    def typed(
        _typing: Any, _fresh: Any, _a: Any, _next_a: Any, _n: Any, _tile: Any, _next: Any, _out: Any, _next_out: Any
    ) -> Any:
        def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            fresh, a, next_a, n, tile, stride, out, next_out = args
            zero = ir.Constant(floats, None)
            outs = [builder.add(out, builder.mul(next_out, next_out.type(row))) for row in range(rows)]
            starts = [builder.add(a, builder.mul(next_a, next_a.type(row))) for row in range(rows)]
            sums = [[cgutils.alloca_once(builder, floats) for _ in places] for _ in range(rows)]
            for start, row_sums in zip(outs, sums, strict=True):
                for at, place in zip(places, row_sums, strict=True):
                    old = builder.load(typed_at(builder, start, floats, at), align=4)
                    builder.store(builder.select(fresh, zero, old), place)
            with cgutils.for_range(builder, n) as loop:
                index = loop.index
                row = builder.add(tile, builder.mul(index, stride))
                values = [builder.load(typed_at(builder, row, floats, at), align=4) for at in places]
                offset = builder.mul(index, index.type(4))
                for start, row_sums in zip(starts, sums, strict=True):
                    factor = splat(builder, builder.load(typed_at(builder, start, _FLOAT, offset), align=4), lanes)
                    for value, place in zip(values, row_sums, strict=True):
                        builder.store(fma(builder, factor, value, builder.load(place)), place)
            for start, row_sums in zip(outs, sums, strict=True):
                for at, place in zip(places, row_sums, strict=True):
                    builder.store(builder.load(place), typed_at(builder, start, floats, at), align=4)
            return ir.Constant(ir.IntType(1), 1)

        i8 = types.int64
        return types.boolean(types.boolean, i8, i8, i8, i8, i8, i8, i8), lower

    return intrinsic(typed)


#: ``out[:64] (+)= a[:n] @ tile[:n, :64]`` of one to four rows of a, each with the same bits: one sum after the other,
#: each rounded once (fma). Arguments: whether to begin at zero, the address of a, bytes to the next row of a, n,
#: address of the tile, bytes from one of its rows to the next, address of out, bytes to the next row of out.
accumulate1, accumulate2, accumulate3, accumulate4 = (_accumulate(rows) for rows in (1, 2, 3, 4))


def _shuffle(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_INT, len(places)), places))


def _load_units(builder: Any, address: Any, bits: int, n_units: int) -> Any:
    """So many units of codes, each at the lowest bits of a lane: words, or the 3 bytes that hold 8 codes of 3 bits."""
    if bits != _STRADDLING:
        return builder.load(typed_at(builder, address, ir.VectorType(_INT, n_units)), align=4)
    bytes_ = ir.VectorType(ir.IntType(8), 2 * n_units)
    half = n_units // 2
    halves = []
    for unit, skip in ((0, 0), (half, n_units)):  # the second ends where the units do: nothing beyond them is read
        read = builder.load(typed_at(builder, address, bytes_, skip), align=1)
        places = [3 * u - skip + min(byte, 2) for u in range(unit, unit + half) for byte in range(4)]
        spread = _shuffle(builder, read, ir.Constant(bytes_, ir.Undefined), places)
        halves.append(builder.bitcast(spread, ir.VectorType(_INT, half)))
    return _shuffle(builder, halves[0], halves[1], [*range(n_units)])


def _unpack(bits: int, n_codes: int) -> Any:
    lanes = 2 * _LANES
    ints, floats = ir.VectorType(_INT, lanes), ir.VectorType(_FLOAT, lanes)
    n_units = n_codes // CODES[bits]

    def typed(
        _typing: Any,
        _codes: Any,
        _next: Any,
        _scales: Any,
        _biases: Any,
        _step: Any,
        _out: Any,
        _next_out: Any,
        _n: Any,
    ) -> Any:
        def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            codes, next_codes, scales, biases, step, out, next_out, n = args
            mask = ir.Constant(ints, [(1 << bits) - 1] * lanes)
            with cgutils.for_range(builder, n) as loop:
                at = builder.mul(loop.index, step)
                scale, bias = (
                    splat(builder, builder.load(typed_at(builder, factors, _FLOAT, at), align=4), lanes)
                    for factors in (scales, biases)
                )
                units = _load_units(builder, builder.add(codes, builder.mul(loop.index, next_codes)), bits, n_units)
                spread = [lane % n_units for lane in range(lanes)]
                units = _shuffle(builder, units, ir.Constant(units.type, ir.Undefined), spread)
                row = builder.add(out, builder.mul(loop.index, next_out))
                for first in range(0, n_codes, lanes):
                    shifts = [bits * (place // n_units) for place in range(first, first + lanes)]
                    code = builder.and_(builder.lshr(units, ir.Constant(ints, shifts)), mask)
                    value = fma(builder, builder.sitofp(code, floats), scale, bias)
                    builder.store(value, typed_at(builder, row, floats, 4 * first), align=4)
            return ir.Constant(ir.IntType(1), 1)

        i8 = types.int64
        return types.boolean(i8, i8, i8, i8, i8, i8, i8, i8), lower

    return intrinsic(typed)


#: ``out[j * W + u] = code(C u + j) * scale + bias`` of rows of 64 (or 32) codes, C in each of W units (`CODES`): an
#: order that takes no shuffle but for 3 bits. Arguments: address of the codes, bytes to the next row of codes,
#: addresses of the scales and biases, bytes to the next row's scale, address of out, bytes to its next row, how many
#: rows.
unpack2, unpack3, unpack4, unpack8 = (_unpack(bits, 64) for bits in CODES)
unpack2_short, unpack3_short, unpack4_short, unpack8_short = (_unpack(bits, 32) for bits in CODES)


@intrinsic
def transpose8(_typing: Any, _source: Any, _next_source: Any, _out: Any, _next_out: Any) -> Any:
    """Turn 8 rows of 8 floats into columns: address of the first, bytes to the next, and the same of where they go."""

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        source, next_source, out, next_out = args
        starts = (builder.add(source, builder.mul(next_source, next_source.type(row))) for row in range(_LANES))
        rows = [builder.load(typed_at(builder, start, _FLOATS), align=4) for start in starts]
        for step in (1, 2, 4):  # a block beside the diagonal goes to the other side
            for row in range(_LANES):
                if row & step == 0:
                    pair = rows[row], rows[row + step]
                    first = [_LANES + lane - step if lane & step else lane for lane in range(_LANES)]
                    second = [_LANES + lane if lane & step else lane + step for lane in range(_LANES)]
                    rows[row], rows[row + step] = (_shuffle(builder, *pair, places) for places in (first, second))
        for row, vector in enumerate(rows):
            address = builder.add(out, builder.mul(next_out, next_out.type(row)))
            builder.store(vector, typed_at(builder, address, _FLOATS), align=4)
        return ir.Constant(ir.IntType(1), 1)

    i8 = types.int64
    return types.boolean(i8, i8, i8, i8), lower


def _widen(source: Any) -> Any:
    lanes = 2 * _LANES
    ints, floats = ir.VectorType(_INT, lanes), ir.VectorType(_FLOAT, lanes)

    def typed(_typing: Any, _address: Any, _out: Any) -> Any:
        def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            address, out = args
            value = builder.load(typed_at(builder, address, ir.VectorType(source, lanes)), align=2)
            if source == _HALF:
                value = builder.fpext(value, floats)
            else:
                value = builder.shl(builder.zext(value, ints), ir.Constant(ints, [16] * lanes))
                value = builder.bitcast(value, floats)
            builder.store(value, typed_at(builder, out, floats), align=4)
            return ir.Constant(ir.IntType(1), 1)

        return types.boolean(types.int64, types.int64), lower

    return intrinsic(typed)


#: Sixteen float16 or bfloat16 at an address as float32 at another.
halves, brains = _widen(_HALF), _widen(ir.IntType(16))


@intrinsic
def half(_typing: Any, _address: Any) -> Any:
    """The float16 at an address, as float32."""

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.load(typed_at(builder, args[0], _HALF), align=2), _FLOAT)

    return types.float32(types.int64), lower


@intrinsic
def brain(_typing: Any, _address: Any) -> Any:
    """The bfloat16 at an address, as float32."""

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.load(typed_at(builder, args[0], ir.IntType(16)), align=2)
        wide = builder.shl(builder.zext(bits, _INT), ir.Constant(_INT, 16))
        return builder.bitcast(wide, _FLOAT)

    return types.float32(types.int64), lower


@intrinsic
def single(_typing: Any, _address: Any) -> Any:
    """The float32 at an address."""

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(typed_at(builder, args[0], _FLOAT), align=4)

    return types.float32(types.int64), lower


@intrinsic
def address_of(_typing: Any, symbol: Any) -> Any:
    """The address that `llvmlite.binding.add_symbol` gave for a name (a literal string)."""
    if not isinstance(symbol, types.StringLiteral):
        return None  # numba asks again with the literal
    name = symbol.literal_value

    def lower(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        place = cgutils.add_global_variable(builder.module, ir.IntType(8), name)
        return builder.ptrtoint(place, ir.IntType(64))

    return types.int64(symbol), lower


@intrinsic
def pointer(_typing: Any, _address: Any) -> Any:
    """An address as a pointer that `numba.carray` takes."""

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), lower


@intrinsic
def put(_typing: Any, _address: Any, _value: Any) -> Any:
    """Store a float32 at an address; gives it back."""

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], typed_at(builder, args[0], _FLOAT), align=4)
        return args[1]

    return types.float32(types.int64, types.float32), lower


def _fold(builder: Any, vector: Any) -> Any:
    """The lower half of a vector plus its upper one."""
    lanes, undefined = vector.type.count // 2, ir.Constant(vector.type, ir.Undefined)
    kind = ir.VectorType(_INT, lanes)
    lower, upper = ([*range(lanes)], [*range(lanes, 2 * lanes)])
    halves = (builder.shuffle_vector(vector, undefined, ir.Constant(kind, half)) for half in (lower, upper))
    return builder.fadd(*halves)


def sum_lanes(builder: Any, vector: Any) -> Any:
    """The sum of all lanes, always in the same order."""
    while vector.type.count > 2:
        vector = _fold(builder, vector)
    return builder.fadd(*(builder.extract_element(vector, ir.Constant(_INT, lane)) for lane in (0, 1)))


def _dot_codes(bits: int, n_rows: int) -> Any:
    per_word = 32 // bits

    def add_words(builder: Any, lanes: int, at: Any, args: Any, totals: Any) -> None:
        """Add the products of as many words as there are lanes, ``at`` bytes from the first, to each row's total."""
        words, stride, scales, biases, rows = args
        ints, floats, few = (
            ir.VectorType(kind, n) for kind, n in ((_INT, lanes), (_FLOAT, lanes), (_HALF, lanes // 4))
        )
        spread = ir.Constant(ints, [lane // 4 for lane in range(lanes)])

        def factors(address: Any) -> Any:
            some = builder.load(
                typed_at(builder, address, few, builder.lshr(at, at.type(3))), align=2
            )  # 2 bytes for 16
            some = builder.fpext(some, ir.VectorType(_FLOAT, lanes // 4))
            return builder.shuffle_vector(some, ir.Constant(some.type, ir.Undefined), spread)

        codes = builder.load(typed_at(builder, words, ints, at), align=4)
        dots = [ir.Constant(floats, None)] * n_rows
        for j in range(per_word):
            code = builder.lshr(codes, ir.Constant(ints, [bits * j] * lanes))
            code = builder.sitofp(builder.and_(code, ir.Constant(ints, [(1 << bits) - 1] * lanes)), floats)
            offset = builder.add(at, builder.mul(stride, stride.type(j)))
            for r, address in enumerate(rows):
                factor = builder.load(typed_at(builder, address, floats, offset), align=4)
                dots[r] = fma(builder, code, factor, dots[r])
        scale, bias = factors(scales), factors(biases)
        offset = builder.add(at, builder.mul(stride, stride.type(per_word)))
        for dot, address, total in zip(dots, rows, totals, strict=True):
            sum_at = builder.load(typed_at(builder, address, floats, offset), align=4)
            part = fma(builder, sum_at, bias, builder.load(total))
            builder.store(fma(builder, dot, scale, part), total)

    def typed(_typing: Any, _words: Any, _n: Any, _x: Any, _row: Any, _scales: Any, _biases: Any, _out: Any) -> Any:
        def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            words, n_blocks, x, row, scales, biases, out = args
            step = n_blocks.type(8 * _LANES)  # bytes of two blocks
            stride = builder.mul(n_blocks, n_blocks.type(4 * _LANES))
            rows = [builder.add(x, builder.mul(row, row.type(r))) for r in range(n_rows)]
            given = (words, stride, scales, biases, rows)
            zero = ir.Constant(ir.VectorType(_FLOAT, 2 * _LANES), None)
            wide = [cgutils.alloca_once_value(builder, zero) for _ in range(n_rows)]
            n_pairs = builder.lshr(n_blocks, n_blocks.type(1))
            with cgutils.for_range(builder, n_pairs) as loop:
                add_words(builder, 2 * _LANES, builder.mul(loop.index, step), given, wide)
            totals = [cgutils.alloca_once_value(builder, _fold(builder, builder.load(total))) for total in wide]
            with builder.if_then(builder.trunc(n_blocks, ir.IntType(1))):
                add_words(builder, _LANES, builder.mul(n_pairs, step), given, totals)
            for r, total in enumerate(totals):
                builder.store(sum_lanes(builder, builder.load(total)), typed_at(builder, out, _FLOAT, 4 * r), align=4)
            return ir.Constant(ir.IntType(1), 1)

        i8 = types.int64
        return types.boolean(i8, i8, i8, i8, i8, i8, i8), lower

    return intrinsic(typed)


#: The products of a row of codes with one x, or with four, each the same as alone: for each word w with codes n_j,
#: ``sum_j (n_j scale + bias) x[j, w]``. Arguments: address of the words, how many times 8 they are, address of x
#: ``[j + 1, w]`` of which the last row has the sums ``sum_j x[j, w]``, bytes from one x to the next, addresses of
#: float16 scales and biases, one for four words each, and of the products.
dot_codes4 = _dot_codes(4, 1)
dot_codes8 = _dot_codes(8, 1)
dots_codes4 = _dot_codes(4, 4)
dots_codes8 = _dot_codes(8, 4)


@intrinsic
def dot_floats(_typing: Any, _a: Any, _b: Any, _n: Any) -> Any:
    """The product of two rows of ``32 n`` floats at two addresses."""

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        a, b, n = args
        zero = ir.Constant(_FLOATS, None)
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(4)]
        with cgutils.for_range(builder, n) as loop:
            for i, total in enumerate(totals):
                at = builder.mul(loop.index, loop.index.type(128))
                at = builder.add(at, at.type(32 * i))
                one, other = (builder.load(typed_at(builder, address, _FLOATS, at), align=4) for address in (a, b))
                builder.store(fma(builder, one, other, builder.load(total)), total)
        first, second, third, fourth = (builder.load(total) for total in totals)
        return sum_lanes(builder, builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth)))

    return types.float32(types.int64, types.int64, types.int64), lower
