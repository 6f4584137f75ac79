"""The gate of a feed-forward layer, SwiGLU (arXiv 2002.05202): MLX's exponential on the CPU is scalar."""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

from amem.kernels.exponential import exp_below_zero

Floats = npt.NDArray[np.float32]


@nb.njit("void(f4[::1], f4[::1], f4[::1])", nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def swiglu(gate: Floats, x: Floats, out: Floats) -> None:
    """``out = gate * sigmoid(gate) * x``, of any number of values. A NaN stays one."""
    one = np.float32(1.0)
    for i in range(len(gate)):
        g = gate[i]
        e = exp_below_zero(-abs(g))
        out[i] = g * ((one if g >= np.float32(0.0) else e) / (one + e)) * x[i]
