"""One kernel on several cores: its parts run at the same time, in threads that wait for work without taking time."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

#: Parts are worth another thread from this many multiplications on: they take as long as handing over, some 50
#: microseconds between the other operations of a decode step.
WORTH = 2_000_000


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(kernel: Callable[[int, int], None], work: int, most: int) -> None:
    """Run ``kernel(part, n_parts)`` for all parts, as many as are worth a thread each, and wait for them.

    Parameters
    ----------
    kernel
        Lets go of the interpreter while it computes, and gives the same in any number of parts.
    work
        Multiplications of all parts together.
    most
        Parts that it can be divided into.
    """
    n_parts = max(1, min(n_cores(), most, work // WORTH))
    others = [_threads().submit(kernel, part, n_parts) for part in range(1, n_parts)]
    kernel(0, n_parts)
    for other in others:
        other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, n_cores() - 1), "amem-kernel")
