"""One kernel on several cores, for callers in Python."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import numba as nb

from amem.kernels import team
from amem.kernels.team import n_cores

#: Parts are worth another thread from this many multiplications on.
WORTH = 1_000_000

Kernel = Callable[[int, int], None]

_running: dict[int, tuple[Kernel, list[BaseException]]] = {}
_numbers = itertools.count()


def share(kernel: Kernel, work: int, most: int) -> None:
    """Run ``kernel(part, n_parts)`` for all parts, as many as are worth a thread each, and wait for them.

    Parameters
    ----------
    kernel
        Lets go of the interpreter while it computes, and gives the same in any number of parts.
    work
        Multiplications of all parts together.
    most
        Parts that it can be divided into.

    Raises
    ------
        Exception: what a part raised, after all have ended.
    """
    n_parts = max(1, min(n_cores(), most, work // WORTH))
    if n_parts == 1:
        kernel(0, 1)
        return
    team.start()
    number, errors = next(_numbers), list[BaseException]()
    _running[number] = kernel, errors
    try:
        _run(_part_address, number, n_parts)
    finally:
        del _running[number]
    if errors:
        raise errors[0]


@nb.njit("void(i8, i8, i8)", nogil=True, cache=True)
def _run(function: int, number: int, n_parts: int) -> None:
    team.run(function, number, n_parts)


@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
def _part(number: int, part: int, n_parts: int) -> None:
    kernel, errors = _running[number]
    try:
        kernel(part, n_parts)
    except BaseException as error:  # noqa: BLE001  # raised by `share`: an error cannot leave a callback
        errors.append(error)


_part_address = ctypes.cast(_part, ctypes.c_void_p).value
