"""How many BLAS threads a decode step should use: measured while decoding, since others may want the cores.

With the cores free, a token's products run almost twice as fast on two threads. OpenBLAS's threads wait by spinning,
though: where another process is busy, the same step was measured ten times slower on two threads than on one. The
choice changes no bit: a product with one row sums each output in the same order on any number of threads (measured up
to three rows). Larger products do differ, so prefill has a fixed number: all cores but one, which is left to the
browser and the server of a notebook.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

ALL = 0  #: as many threads as there are cores
PREFILL = max(1, (os.cpu_count() or 1) - 1)
_FIRST_TRIAL_S = 1.0
_LONGEST_TRIAL_S = 120.0


class ThreadChoice:
    """Picks one or all threads by the time that steps took, and tries the other now and then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[int, float] = {}  # of a step, for each choice
        self._wait = _FIRST_TRIAL_S
        self._next_trial = clock() + self._wait

    def pick(self) -> int:
        """Threads for the next step."""
        for choice in (1, ALL):
            if choice not in self._seconds:
                return choice
        best = self._best()
        return best if self._clock() < self._next_trial else 1 - best

    def record(self, choice: int, seconds: float) -> None:
        """Tell how long a step took."""
        known = len(self._seconds) == 2  # both choices
        before = self._best() if known else choice
        self._seconds[choice] = seconds if choice != before else self._smooth(choice, seconds)
        if known and choice != before:
            # a trial that confirms the choice makes the next one rarer
            self._wait = _FIRST_TRIAL_S if self._best() == choice else min(2 * self._wait, _LONGEST_TRIAL_S)
            self._next_trial = self._clock() + self._wait

    def _smooth(self, choice: int, seconds: float) -> float:
        return 0.8 * self._seconds.get(choice, seconds) + 0.2 * seconds

    def _best(self) -> int:
        return min(self._seconds, key=lambda choice: self._seconds[choice])
