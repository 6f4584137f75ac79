"""The exponential, from plain operations that become vector instructions in a loop; and the softmax of a row."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from amem.kernels.vectors import fma, splat, sum_lanes, typed_at


@nb.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def exp_below_zero(x: np.float32) -> np.float32:
    """E to the power of x <= 0, exactly 0 below -87, where normal numbers end. A NaN stays one.

    Cody and Waite's reduction by powers of two, and Cephes's polynomial (expf).
    """
    shifted = np.float32(x * np.float32(1.4426950408889634) + np.float32(12582912.0))  # 1.5 * 2**23: rounds to integer
    n = shifted - np.float32(12582912.0)
    r = x - n * np.float32(0.693359375)
    r -= n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    power = np.int32(np.int32(shifted.view(np.int32) << np.int32(23)) + np.int32(127 << 23)).view(np.float32)
    return np.float32(0.0) if x < np.float32(-87.0) else p * power


_LANES = 16
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), _LANES), ir.VectorType(ir.IntType(32), _LANES)
_ROW = range(0, 64 * 4, _LANES * 4)  # bytes of a group's scores


def _constant(value: float) -> Any:
    return ir.Constant(_FLOATS, [float(np.float32(value))] * _LANES)


def _exponential(builder: Any, x: Any) -> Any:
    """`exp_below_zero` of a vector."""
    magic = _constant(12582912.0)
    shifted = fma(builder, x, _constant(1.4426950408889634), magic)
    n = builder.fsub(shifted, magic)
    r = fma(builder, n, _constant(-0.693359375), x)
    r = fma(builder, n, _constant(2.12194440e-4), r)
    p = _constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(builder, p, r, _constant(coefficient))
    p = builder.fadd(fma(builder, builder.fmul(p, r), r, r), _constant(1.0))
    power = builder.shl(builder.bitcast(shifted, _INTS), ir.Constant(_INTS, [23] * _LANES))
    power = builder.bitcast(builder.add(power, ir.Constant(_INTS, [127 << 23] * _LANES)), _FLOATS)
    tiny = builder.fcmp_ordered("<", x, _constant(-87.0))
    return builder.select(tiny, _constant(0.0), builder.fmul(p, power))


@intrinsic
def greatest(_typing: Any, _address: Any, _n: Any, _least: Any) -> Any:
    """The greatest of a number and ``64 n`` at an address; what is not a number does not count."""

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, n, least = args

        def greater(one: Any, other: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        lanes = [cgutils.alloca_once_value(builder, splat(builder, least, _LANES)) for _ in _ROW]
        with cgutils.for_range(builder, n) as loop:
            row = builder.add(address, builder.mul(loop.index, loop.index.type(64 * 4)))
            for lane, offset in zip(lanes, _ROW, strict=True):
                value = builder.load(typed_at(builder, row, _FLOATS, offset), align=4)
                builder.store(greater(value, builder.load(lane)), lane)
        found = [builder.load(lane) for lane in lanes]
        most = greater(greater(found[0], found[1]), greater(found[2], found[3]))
        top = least
        for lane in range(_LANES):
            top = greater(builder.extract_element(most, ir.Constant(ir.IntType(32), lane)), top)
        return top

    return types.float32(types.int64, types.int64, types.float32), lower


@intrinsic
def exponentials(_typing: Any, _address: Any, _n: Any, _top: Any) -> Any:
    """``e ** (x - top)`` in place of ``64 n`` numbers x at an address; gives their sum.

    It runs in 64 lanes over the rows of 64 and then over the lanes, however wide the processor's vectors are.
    """

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, n, top = args
        top = splat(builder, top, _LANES)
        totals = [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, None)) for _ in _ROW]
        with cgutils.for_range(builder, n) as loop:
            row = builder.add(address, builder.mul(loop.index, loop.index.type(64 * 4)))
            for total, offset in zip(totals, _ROW, strict=True):
                place = typed_at(builder, row, _FLOATS, offset)
                value = _exponential(builder, builder.fsub(builder.load(place, align=4), top))
                builder.store(value, place, align=4)
                builder.store(builder.fadd(builder.load(total), value), total)
        first, second, third, fourth = (builder.load(total) for total in totals)
        return sum_lanes(builder, builder.fadd(builder.fadd(first, third), builder.fadd(second, fourth)))

    return types.float32(types.int64, types.int64, types.float32), lower
