"""Bytes on disk: durable writes, private folders, and what the operating system's errors mean for a person."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from amem.errors import CorruptState, StoreError, StoreFull
from amem.store import faults

Buffer = bytes | memoryview

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EROFS, errno.EACCES, errno.EPERM}
_SQLITE_DENIED = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
_SQLITE_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


@contextlib.contextmanager
def explained(action: str, place: Path) -> Iterator[None]:
    """Turn the errors of the system and of SQLite into StoreFull, StoreError or CorruptState, in one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(_full(action, place)) from error
        if error.errno in _DENIED:
            raise StoreError(_denied(action, place, os.strerror(error.errno or 0))) from error
        raise StoreError(f"cannot {action} in {place}: {error}") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise StoreFull(_full(action, place)) from error
        if code in _SQLITE_DENIED:
            raise StoreError(_denied(action, place, str(error))) from error
        if code in _SQLITE_DAMAGED:
            message = f"cannot {action} in {place}: the database is damaged ({error}); open it again to salvage it"
            raise CorruptState(message) from error
        raise StoreError(f"cannot {action} in {place}: {error}") from error
    except UnicodeDecodeError as error:  # a text in the database, or a part of it that SQLite quotes in its message
        message = f"cannot {action} in {place}: the database is damaged ({error}); open it again to salvage it"
        raise CorruptState(message) from error


def _full(action: str, place: Path) -> str:
    return f"cannot {action}: no space left on the disk of {place}; free some space (nothing saved before is lost)"


def _denied(action: str, place: Path, reason: str) -> str:
    return f"cannot {action}: {place} cannot be written ({reason}); make it writable or choose another store"


def make_folder(path: Path) -> None:
    """Create a folder that only its owner can enter. An existing one stays as it is."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_private(path: Path) -> None:
    """Create an empty file that only its owner can read, unless it is there already."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, chunks: Iterable[Buffer], kind: str | None = None) -> int:
    """Write a whole file under a temporary name, fsync, rename, fsync the folder; returns its bytes.

    After an error nothing is left of it. ``kind`` names the fault points that are passed.
    """

    def reach(step: str) -> None:
        if kind is not None:
            faults.reach(f"{kind}.{step}")

    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        nbytes = 0
        try:
            reach("created")
            with open(descriptor, "wb", closefd=False) as file:
                for chunk in chunks:
                    nbytes += file.write(chunk)
            reach("written")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        reach("synced")
        temporary.rename(path)
        reach("renamed")
        sync_folder(path.parent)
        reach("durable")
    except BaseException:
        for leftover in (temporary, path):
            with contextlib.suppress(OSError):
                leftover.unlink()
        raise
    return nbytes


def link(source: Path, target: Path) -> int:
    """Hard-link a file, or copy it where links are impossible; returns the bytes that were copied."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        return write_durably(target, _pieces(source))
    return 0


def _pieces(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece


def folder_bytes(path: Path, seen: set[tuple[int, int]] | None = None) -> int:
    """The bytes of all files below a folder. With ``seen``, a file that has several links is counted once."""
    total = 0
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return 0
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                total += folder_bytes(Path(entry.path), seen)
                continue
            stat = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if seen is not None and stat.st_nlink > 1:
            if (stat.st_dev, stat.st_ino) in seen:
                continue
            seen.add((stat.st_dev, stat.st_ino))
        total += stat.st_size
    return total
