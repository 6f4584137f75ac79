"""What steps took here: the gaps between a reply's tokens, and what prefill costs at a given place of a history."""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from pathlib import Path

import numpy as np

from amem.results import InterToken

_RECENT_GAPS = 4096
_RECENT_CHUNKS = 128
_SAVED_AFTER = 1024  #: tokens: a killed process loses no more measurements than that
_LEAST_SPREAD = 256  #: tokens between measured places from which on a slope is told from noise


class Gaps:
    """The times between one token of a reply and the next, of the last replies."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_RECENT_GAPS)

    def record(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def percentiles(self) -> InterToken | None:
        """None before there was a second token."""
        if not self._seconds:
            return None
        p50, p95, p99, most = (float(ms) for ms in np.percentile(np.array(self._seconds) * 1e3, [50, 95, 99, 100]))
        return InterToken(len(self._seconds), p50, p95, p99, most)


class PrefillRate:
    """Seconds that prefill takes, by the chunks that were computed on this machine lately.

    A token costs ``a + b * position``: the products with the weights, and attention over what came before; both are
    fitted by least squares, weighted by tokens, since a short chunk costs more for each. With ``path`` the chunks
    outlive the process, so that the first request after a restart has a figure too.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._chunks: deque[tuple[int, int, float]] = deque(maxlen=_RECENT_CHUNKS)  # start, tokens, seconds
        self._fit: tuple[float, float] | None = None
        self._n_unsaved = 0  # tokens
        if path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                known = [(int(start), int(n), float(s)) for start, n, s in json.loads(path.read_text(encoding="utf-8"))]
                self._chunks.extend(chunk for chunk in known if chunk[1] > 0 and chunk[2] > 0)

    def record(self, start: int, n_tokens: int, seconds: float) -> None:
        """Tell what a chunk took that began at position ``start``."""
        self._chunks.append((start, n_tokens, seconds))
        self._fit = None
        self._n_unsaved += n_tokens
        if self._n_unsaved >= _SAVED_AFTER:
            self.save()

    def save(self) -> None:
        """Keep the chunks for the next process."""
        if self._path is None or not self._n_unsaved:
            return
        self._n_unsaved = 0
        with contextlib.suppress(OSError):  # only an estimate is lost
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(list(self._chunks)), encoding="utf-8")
            temporary.replace(self._path)

    def seconds(self, start: int, stop: int) -> float | None:
        """What prefill of the positions ``start..stop-1`` takes; None before anything was measured."""
        if not self._chunks:
            return None
        if self._fit is None:
            self._fit = self._fitted()
        a, b = self._fit
        return a * (stop - start) + b * (stop**2 - start**2) / 2

    def _fitted(self) -> tuple[float, float]:
        start, n, seconds = np.array(self._chunks, dtype=float).T
        at, each = start + n / 2, seconds / n
        centre, mean = np.average(at, weights=n), np.average(each, weights=n)
        slope = 0.0
        if at.max() - at.min() >= _LEAST_SPREAD:
            slope = max(0.0, float(np.average((at - centre) * (each - mean), weights=n)))
            slope /= float(np.average((at - centre) ** 2, weights=n))
        if mean < slope * centre:  # a token at the start would cost less than nothing
            slope = mean / centre
        return float(mean - slope * centre), float(slope)
