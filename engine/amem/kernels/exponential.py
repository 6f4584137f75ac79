"""The exponential, from plain operations that become vector instructions where it is used in a loop."""

from __future__ import annotations

import numba as nb
import numpy as np


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
