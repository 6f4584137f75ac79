"""What the store wrote and what it may still write: counters of bytes, and the disk quota."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from amem.errors import StoreFull
from amem.store import files
from amem.store.records import Written

_TRUSTED_S = 1.0  # other processes write too: a measurement of the disk is used for so long


def _no_room(_: int) -> int:
    return 0


class Ledger:
    """Counters shared by all agents of one Store object. Thread-safe."""

    def __init__(self, root: Path, quota: int | None) -> None:
        self.root = root
        self.quota = quota
        self.reports: list[str] = []
        self.make_room: Callable[[int], int] = _no_room
        self._lock = threading.Lock()
        self._written = Written(0, 0, 0)
        self._measured_at = -_TRUSTED_S
        self._disk = 0

    @property
    def written(self) -> Written:
        """Bytes written so far."""
        return self._written

    def wrote(self, *, payload: int = 0, database: int = 0, transcript: int = 0) -> None:
        """Count bytes that were written."""
        with self._lock:
            old = self._written
            self._written = Written(old.payload + payload, old.database + database, old.transcript + transcript)
            self._disk += payload + database + transcript

    def disk_bytes(self) -> int:
        """All files of the store as they are now; one that several agents share counts once."""
        nbytes = files.folder_bytes(self.root, set())
        with self._lock:
            self._disk, self._measured_at = nbytes, time.monotonic()
        return nbytes

    def reserve(self, nbytes: int) -> None:
        """Make sure that the quota leaves room for ``nbytes`` more, evicting if need be. Raises StoreFull."""
        if self.quota is None or self._fits(nbytes):
            return
        self.make_room(nbytes)
        self.disk_bytes()
        if not self._fits(nbytes):
            raise StoreFull(
                f"the store {self.root} has reached its quota of {self.quota} bytes and nothing more can be evicted;"
                " raise the quota or delete an agent (nothing saved before is lost)"
            )

    def _fits(self, nbytes: int) -> bool:
        assert self.quota is not None
        if time.monotonic() - self._measured_at > _TRUSTED_S:
            self.disk_bytes()
        return self._disk + nbytes <= self.quota
