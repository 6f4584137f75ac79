"""The payload files in an agent's folder: written durably before the database knows them, and verified when read."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt

from amem.errors import InputError, StoreError
from amem.store import fileformat, files
from amem.store.fileformat import Record
from amem.store.ledger import Ledger
from amem.store.payload import DamagedError
from amem.store.records import GROUP_TOKENS, BlockRecord, Realm, SnapshotRecord, Tensors

SUFFIX = ".safetensors"
QUARANTINE = "quarantine"


class BlockFiles:
    """Thread-safe. ``pending`` are the ids of files that were written and are not in the database yet."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder = folder
        self.pending: set[str] = set()
        self._ledger = ledger
        self._lock = threading.Lock()

    def path(self, name: str) -> Path:
        """Where a block's or snapshot's file is."""
        return self.folder / (name + SUFFIX)

    def names(self) -> set[str]:
        """The ids of all payload files in the folder."""
        return {entry.name.removesuffix(SUFFIX) for entry in os.scandir(self.folder) if entry.name.endswith(SUFFIX)}

    def write_block(
        self, realm: Realm, parent: str | None, start: int, token_ids: npt.ArrayLike, tensors: Tensors
    ) -> BlockRecord:
        """See AgentStore.write_block."""
        ids = fileformat.as_tokens(token_ids)
        if not fileformat.valid_span(start, len(ids)):
            raise InputError(f"a block has 1 to 4 groups of 64 from a multiple of 256, not {len(ids)} at {start}")
        if (parent is None) != (start == 0):
            raise InputError(f"a block at {start} needs a parent, and only the first has none")
        record = BlockRecord(uuid.uuid4().hex, parent, realm, start, ids, "", 0)
        checksum, nbytes = self._write(record, tensors, "block")
        return dataclasses.replace(record, checksum=checksum, nbytes=nbytes)

    def write_snapshot(self, realm: Realm, position: int, n_open: int, tensors: Tensors) -> SnapshotRecord:
        """See AgentStore.write_snapshot."""
        if position < 0 or n_open != position % GROUP_TOKENS:
            raise InputError(f"a snapshot at {position} has {position % GROUP_TOKENS} open tokens, not {n_open}")
        record = SnapshotRecord(uuid.uuid4().hex, realm, position, n_open, "", 0)
        checksum, nbytes = self._write(record, tensors, "snapshot")
        return dataclasses.replace(record, checksum=checksum, nbytes=nbytes)

    def _write(self, record: Record, tensors: Tensors, kind: str) -> tuple[str, int]:
        encoded = fileformat.encode(record, tensors)
        self._ledger.reserve(encoded.nbytes)
        with self._lock:
            self.pending.add(record.id)
        try:
            with files.explained(f"write a {kind}", self.folder):
                files.write_durably(self.path(record.id), (encoded.header, *encoded.buffers), kind)
        except BaseException:
            self.settled([record.id])
            raise
        self._ledger.wrote(payload=encoded.nbytes)
        return encoded.checksum, encoded.nbytes

    def settled(self, names: Collection[str]) -> None:
        """The database knows these files now, or they are gone."""
        with self._lock:
            self.pending.difference_update(names)

    def read(self, record: Record, names: Collection[str] | None) -> dict[str, npt.NDArray[Any]]:
        """Raises DamagedError also for a missing file, InputError for a tensor that the file never had, StoreError."""
        with self._reading(record):
            return fileformat.read(self.path(record.id), record, names)

    def read_into(self, record: Record, targets: Tensors) -> None:
        """Raises as `read` does."""
        with self._reading(record):
            fileformat.read_into(self.path(record.id), record, targets)

    @contextlib.contextmanager
    def _reading(self, record: Record) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise DamagedError("its file is missing") from error
        except KeyError as error:
            raise InputError(f"block {record.id} has no tensor {error.args[0]!r}") from error
        except PermissionError as error:
            raise StoreError(f"{self.path(record.id)} cannot be read ({error.strerror}); make it readable") from error
        except OSError as error:
            raise DamagedError(f"its file cannot be read ({error.strerror})") from error

    def link(self, name: str, folder: Path) -> bool:
        """Give another agent's folder the same file; False if it is missing."""
        try:
            self._ledger.wrote(payload=files.link(self.path(name), folder / (name + SUFFIX)))
        except FileNotFoundError:
            return False
        return True

    def shared(self, name: str) -> bool:
        """Whether another agent's folder has the same file."""
        try:
            return self.path(name).stat().st_nlink > 1
        except FileNotFoundError:
            return False

    def remove(self, names: Collection[str]) -> int:
        """Unlink files; returns the bytes that this freed."""
        freed = 0
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                stat = self.path(name).stat()
                self.path(name).unlink()
                freed += stat.st_size if stat.st_nlink == 1 else 0
        self.settled(names)
        return freed

    def quarantine(self, name: str) -> None:
        """Set a file aside under ``quarantine/``, from where nothing is read."""
        with contextlib.suppress(FileNotFoundError):
            set_aside(self.path(name))
        self.settled([name])

    def sweep(self, known: Collection[str]) -> None:
        """Unlink what a killed writer left: payload files that the database does not know, and temporary files."""
        for entry in list(os.scandir(self.folder)):
            orphan = entry.name.endswith(SUFFIX) and entry.name.removesuffix(SUFFIX) not in known
            if orphan or entry.name.endswith(".tmp"):
                with contextlib.suppress(FileNotFoundError):
                    Path(entry.path).unlink()


def set_aside(path: Path) -> Path:
    """Move a file into the ``quarantine`` folder beside it, under a name that is free there."""
    folder = path.parent / QUARANTINE
    files.make_folder(folder)
    target = folder / path.name
    count = 0
    while target.exists():
        count += 1
        target = folder / f"{path.name}.{count}"
    path.rename(target)
    files.sync_folder(path.parent)
    return target
