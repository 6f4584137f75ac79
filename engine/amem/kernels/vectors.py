"""The few vector operations from which the kernels are built, as LLVM instructions.

Numba compiles loops over arrays well, but not loops over eight words or sixty-four sums that should stay in registers.
These take plain addresses, and are compiled into whatever function calls them. Loads and stores need no alignment.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 64  #: floats that `accumulate` keeps in registers
_LANES = 8  # of 32 bits: a vector that every 64-bit processor has, or has in two halves

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


@intrinsic
def accumulate(_typing: Any, _fresh: Any, _a: Any, _n: Any, _tile: Any, _stride: Any, _out: Any) -> Any:
    """``out[:64] (+)= a[:n] @ tile[:n, :64]``: one sum after the other, each rounded once (fma).

    Arguments: whether to begin at zero, the addresses and sizes: a, n, tile, bytes from one of its rows to the next,
    out.
    """

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        fresh, a, n, tile, stride, out = args
        zero = ir.Constant(_FLOATS, None)
        sums = []
        for at in range(WIDTH // _LANES):
            place = cgutils.alloca_once(builder, _FLOATS)
            old = builder.load(_at(builder, out, _FLOATS, at * _LANES * 4), align=4)
            builder.store(builder.select(fresh, zero, old), place)
            sums.append(place)
        with cgutils.for_range(builder, n) as loop:
            index = loop.index
            four = ir.Constant(index.type, 4)
            factor = builder.load(_at(builder, a, _FLOAT, builder.mul(index, four)), align=4)
            factor = _splat(builder, factor, _LANES)
            row = builder.add(tile, builder.mul(index, stride))
            for at, place in enumerate(sums):
                value = builder.load(_at(builder, row, _FLOATS, at * _LANES * 4), align=4)
                builder.store(_fma(builder, factor, value, builder.load(place)), place)
        for at, place in enumerate(sums):
            builder.store(builder.load(place), _at(builder, out, _FLOATS, at * _LANES * 4), align=4)
        return ir.Constant(ir.IntType(1), 1)

    i8 = types.int64
    return types.boolean(types.boolean, i8, i8, i8, i8, i8), lower


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
