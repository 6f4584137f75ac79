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

WIDTH = 64  #: floats of each row that `accumulate` keeps in registers
_LANES = 8  # of 32 bits: a vector that every 64-bit processor has, or has in two halves
#: Rows that `accumulate_rows` takes at once: as many as the registers hold.
ROWS = 4 if binding.get_host_cpu_features().get("avx512f") else 1

_FLOAT, _HALF, _INT = ir.FloatType(), ir.HalfType(), ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, _LANES)


def _at(builder: Any, address: Any, kind: Any, offset: Any = 0) -> Any:
    """A pointer to ``kind`` at ``address + offset`` bytes."""
    if isinstance(offset, int):
        offset = ir.Constant(ir.IntType(64), offset)
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    kind = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_INT, 0))
    zeros = ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
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
                    old = builder.load(_at(builder, start, floats, at), align=4)
                    builder.store(builder.select(fresh, zero, old), place)
            with cgutils.for_range(builder, n) as loop:
                index = loop.index
                row = builder.add(tile, builder.mul(index, stride))
                values = [builder.load(_at(builder, row, floats, at), align=4) for at in places]
                offset = builder.mul(index, index.type(4))
                for start, row_sums in zip(starts, sums, strict=True):
                    factor = _splat(builder, builder.load(_at(builder, start, _FLOAT, offset), align=4), lanes)
                    for value, place in zip(values, row_sums, strict=True):
                        builder.store(_fma(builder, factor, value, builder.load(place)), place)
            for start, row_sums in zip(outs, sums, strict=True):
                for at, place in zip(places, row_sums, strict=True):
                    builder.store(builder.load(place), _at(builder, start, floats, at), align=4)
            return ir.Constant(ir.IntType(1), 1)

        i8 = types.int64
        return types.boolean(types.boolean, i8, i8, i8, i8, i8, i8, i8), lower

    return intrinsic(typed)


#: ``out[:64] (+)= a[:n] @ tile[:n, :64]``: one sum after the other, each rounded once (fma). Arguments: whether to
#: begin at zero, the address of a, bytes to the next row of a, n, address of the tile, bytes from one of its rows to
#: the next, address of out, bytes to the next row of out. The second form takes `ROWS` rows of a, with the same bits.
accumulate = _accumulate(1)
accumulate_rows = _accumulate(ROWS)


def _unpack(lanes: int) -> Any:
    def typed(_typing: Any, _words: Any, _scale: Any, _bias: Any, _out: Any, _stride: Any) -> Any:
        def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            words, scale, bias, out, stride = args
            ints, floats = ir.VectorType(_INT, lanes), ir.VectorType(_FLOAT, lanes)
            codes = builder.load(_at(builder, words, ints), align=4)
            scale, bias = _splat(builder, scale, lanes), _splat(builder, bias, lanes)
            for j in range(8):
                nibble = builder.lshr(codes, ir.Constant(ints, [4 * j] * lanes))
                nibble = builder.and_(nibble, ir.Constant(ints, [15] * lanes))
                value = _fma(builder, builder.sitofp(nibble, floats), scale, bias)
                offset = builder.mul(stride, ir.Constant(stride.type, j))
                builder.store(value, _at(builder, out, floats, offset), align=4)
            return ir.Constant(ir.IntType(1), 1)

        i8, f4 = types.int64, types.float32
        return types.boolean(i8, f4, f4, i8, i8), lower

    return intrinsic(typed)


#: ``out[j, w] = code(8 w + j) * scale + bias`` of 8 (or 4) words of eight 4-bit codes. Arguments: address of the words,
#: scale, bias, address of out, bytes from one j to the next.
unpack8 = _unpack(8)
unpack4 = _unpack(4)


@intrinsic
def half(_typing: Any, _address: Any) -> Any:
    """The float16 at an address, as float32."""

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.load(_at(builder, args[0], _HALF), align=2), _FLOAT)

    return types.float32(types.int64), lower


@intrinsic
def brain(_typing: Any, _address: Any) -> Any:
    """The bfloat16 at an address, as float32."""

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.load(_at(builder, args[0], ir.IntType(16)), align=2)
        wide = builder.shl(builder.zext(bits, _INT), ir.Constant(_INT, 16))
        return builder.bitcast(wide, _FLOAT)

    return types.float32(types.int64), lower


@intrinsic
def single(_typing: Any, _address: Any) -> Any:
    """The float32 at an address."""

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(_at(builder, args[0], _FLOAT), align=4)

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
        builder.store(args[1], _at(builder, args[0], _FLOAT), align=4)
        return args[1]

    return types.float32(types.int64, types.float32), lower


def _fold(builder: Any, vector: Any) -> Any:
    """The lower half of a vector plus its upper one."""
    lanes, undefined = vector.type.count // 2, ir.Constant(vector.type, ir.Undefined)
    kind = ir.VectorType(_INT, lanes)
    lower, upper = ([*range(lanes)], [*range(lanes, 2 * lanes)])
    halves = (builder.shuffle_vector(vector, undefined, ir.Constant(kind, half)) for half in (lower, upper))
    return builder.fadd(*halves)


def _sum(builder: Any, vector: Any) -> Any:
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
            some = builder.load(_at(builder, address, few, builder.lshr(at, at.type(3))), align=2)  # 2 bytes for 16
            some = builder.fpext(some, ir.VectorType(_FLOAT, lanes // 4))
            return builder.shuffle_vector(some, ir.Constant(some.type, ir.Undefined), spread)

        codes = builder.load(_at(builder, words, ints, at), align=4)
        dots = [ir.Constant(floats, None)] * n_rows
        for j in range(per_word):
            code = builder.lshr(codes, ir.Constant(ints, [bits * j] * lanes))
            code = builder.sitofp(builder.and_(code, ir.Constant(ints, [(1 << bits) - 1] * lanes)), floats)
            offset = builder.add(at, builder.mul(stride, stride.type(j)))
            for r, address in enumerate(rows):
                factor = builder.load(_at(builder, address, floats, offset), align=4)
                dots[r] = _fma(builder, code, factor, dots[r])
        scale, bias = factors(scales), factors(biases)
        offset = builder.add(at, builder.mul(stride, stride.type(per_word)))
        for dot, address, total in zip(dots, rows, totals, strict=True):
            sum_at = builder.load(_at(builder, address, floats, offset), align=4)
            part = _fma(builder, sum_at, bias, builder.load(total))
            builder.store(_fma(builder, dot, scale, part), total)

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
                builder.store(_sum(builder, builder.load(total)), _at(builder, out, _FLOAT, 4 * r), align=4)
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
                one, other = (builder.load(_at(builder, address, _FLOATS, at), align=4) for address in (a, b))
                builder.store(_fma(builder, one, other, builder.load(total)), total)
        first, second, third, fourth = (builder.load(total) for total in totals)
        return _sum(builder, builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth)))

    return types.float32(types.int64, types.int64, types.int64), lower
