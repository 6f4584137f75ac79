"""The index across agents: which folder is whose, when it was last used, and its size. No text; rebuilt if lost."""

# ruff: noqa: S608 - what is put into queries are the column lists of this file

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amem.errors import InputError
from amem.store import files, names, schema, transcript
from amem.store.hashes import row_sum
from amem.store.names import Label

INDEX = "index.sqlite3"
AGENTS = "agents"
_COLUMNS = "key, digest, used, last_used, nbytes, n_turns"
_FADE, _FORGOTTEN = 0.8, 0.01  # of a transition's weight, each time that its first agent is followed by any
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class NameTakenError(InputError):
    """There is an agent of that name."""


@dataclass(frozen=True)
class IndexRow:
    """What the index says of an agent; see schema.INDEX."""

    key: str
    digest: str
    used: int
    last_used: float
    nbytes: int
    n_turns: int

    @property
    def values(self) -> tuple[object, ...]:
        return (*dataclasses.astuple(self), row_sum(dataclasses.astuple(self)))


class Index:
    """Thread-safe, and shared with other processes. Damage is repaired on the spot, from the agents' folders."""

    def __init__(self, root: Path, reports: list[str]) -> None:
        self._root = root
        self._path = root / INDEX
        self._reports = reports
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode = -1
        with self.using() as connection:
            self._reconcile(connection)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextlib.contextmanager
    def using(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other process can write in. A damaged index is rebuilt first."""
        with self._lock, files.explained("use the index", self._root):
            connection = self._sound_connection()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _sound_connection(self) -> sqlite3.Connection:
        if self._connection is not None:
            try:
                if self._path.stat().st_ino == self._inode:
                    self._connection.execute("SELECT count(used) FROM agents").fetchone()
                    return self._connection
            except (FileNotFoundError, sqlite3.DatabaseError) as error:
                if isinstance(error, sqlite3.DatabaseError) and not _is_damage(error):
                    raise
            self.close()
        with self._alone():
            fresh = not self._path.exists()
            try:
                connection = self._connect()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._reports.append(f"the index was damaged ({error}) and was rebuilt from the agents' folders")
                for suffix in ("", "-wal", "-shm"):
                    self._path.with_name(INDEX + suffix).unlink(missing_ok=True)
                connection, fresh = self._connect(), True
            self._connection, self._inode = connection, self._path.stat().st_ino
            if fresh:
                connection.execute("BEGIN IMMEDIATE")
                self._reconcile(connection)
                connection.execute("COMMIT")
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = schema.connect(self._path, schema.INDEX, synchronous="NORMAL", exclusive=False)
        try:
            connection.execute("PRAGMA wal_autocheckpoint = 16")
            found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if found != "ok":
                raise schema.damaged(found)
            for *row, total in connection.execute(f"SELECT {_COLUMNS}, sum FROM agents"):
                if total != row_sum(row):
                    raise schema.damaged("a row does not match its checksum")
            connection.execute("SELECT space, before, after, weight FROM transitions").fetchall()
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Only one process at a time may replace the index's file."""
        descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # -- the folders are the truth

    def _reconcile(self, connection: sqlite3.Connection) -> None:
        """Add folders that have no row, and remove rows that have no folder or another name."""
        folders = {entry.name for entry in os.scandir(self._root / AGENTS) if is_key(entry.name)}
        rows = dict(connection.execute("SELECT key, digest FROM agents").fetchall())
        kept = {key for key in folders & rows.keys() if self.label_of(self._root / AGENTS / key).digest == rows[key]}
        connection.executemany("DELETE FROM agents WHERE key = ?", [(key,) for key in rows.keys() - kept])
        missing = [self._root / AGENTS / key for key in folders - kept]
        for folder in sorted(missing, key=lambda folder: folder.stat().st_mtime):
            label = self.label_of(folder)
            n_turns = sum(row["kind"] == "turn" for row in transcript.read(folder)[0])
            try:
                _insert(connection, folder.name, label, files.folder_bytes(folder), n_turns, folder.stat().st_mtime)
            except sqlite3.IntegrityError:
                self._reports.append(f"two folders hold agent {label.name!r}; {folder} is left aside")

    def label_of(self, folder: Path) -> Label:
        """An agent's label; a damaged one is restored from its transcript. Raises FileNotFoundError: no folder."""
        label = names.read_label(folder)
        if label is not None:
            return label
        said = [row for row in transcript.read(folder)[0] if row["kind"] == "agent"]
        try:
            label = names.label(said[-1]["name"], said[-1]["space"])
        except (IndexError, KeyError, InputError):
            label = Label(f"recovered-{folder.name[:8]}", "")
        names.write_label(folder, label)
        self._reports.append(f"the name of agent {label.name!r} was damaged and was restored")
        return label

    # -- rows

    def lookup(self, digest: str) -> str | None:
        """The key of the agent with a label's digest."""
        with self.using() as connection:
            row = connection.execute("SELECT key FROM agents WHERE digest = ?", (digest,)).fetchone()
        return row[0] if row else None

    def rows(self) -> list[IndexRow]:
        """The least recently used first."""
        with self.using() as connection:
            return [IndexRow(*row) for row in connection.execute(f"SELECT {_COLUMNS} FROM agents ORDER BY used")]

    def add(self, key: str, label: Label, nbytes: int, n_turns: int, place: Callable[[], None]) -> None:
        """Add an agent; ``place`` puts its folder there. Raises NameTakenError."""
        with self.using() as connection:
            try:
                _insert(connection, key, label, nbytes, n_turns, time.time())
            except sqlite3.IntegrityError as error:
                raise NameTakenError(f"there is an agent {label.name!r} already; take another name") from error
            place()

    def touch(self, key: str, nbytes: int, n_turns: int) -> None:
        """Note a use of an agent."""
        with self.using() as connection:
            used = _next_use(connection)
            _change(connection, key, used=used, last_used=time.time(), nbytes=nbytes, n_turns=n_turns)

    def resize(self, key: str, nbytes: int) -> None:
        """Note an agent's new size, which is no use of it."""
        with self.using() as connection:
            _change(connection, key, nbytes=nbytes)

    def record_transition(self, space_key: str, from_key: str, to_key: str) -> None:
        """Note that an agent was asked after another one in a space. One that was deleted, or the same, is ignored."""
        pair = (from_key, to_key)
        with self.using() as connection:
            query = "SELECT count(*) FROM agents WHERE key IN (?, ?)"
            if connection.execute(query, pair).fetchone()[0] < 2:
                return
            query = "UPDATE transitions SET weight = weight * ? WHERE space = ? AND before = ?"
            connection.execute(query, (_FADE, space_key, from_key))
            query = "DELETE FROM transitions WHERE space = ? AND before = ? AND weight < ?"
            connection.execute(query, (space_key, from_key, _FORGOTTEN))
            query = (
                "INSERT INTO transitions VALUES (?, ?, ?, 1.0)"
                " ON CONFLICT (space, before, after) DO UPDATE SET weight = weight + 1.0"
            )
            connection.execute(query, (space_key, *pair))

    def likely_next(self, space_key: str, from_key: str, limit: int) -> list[str]:
        """The keys of agents that were asked after one in a space, the likeliest first: often, and lately."""
        query = "SELECT after FROM transitions WHERE space = ? AND before = ? ORDER BY weight DESC LIMIT ?"
        with self.using() as connection:
            return [row[0] for row in connection.execute(query, (space_key, from_key, max(0, limit)))]

    def relabel(self, key: str, label: Label) -> None:
        """Give an agent another label. Raises NameTakenError."""
        with self.using() as connection:
            try:
                _change(connection, key, digest=label.digest)
            except sqlite3.IntegrityError as error:
                raise NameTakenError(
                    f"there is an agent {label.name!r} in {label.space!r} already: rename, export or delete one of them"
                ) from error

    def remove(self, key: str, displace: Callable[[], None]) -> None:
        """Remove an agent; ``displace`` takes its folder away. Its row leaves the log, too."""
        with self.using() as connection:
            connection.execute("DELETE FROM agents WHERE key = ?", (key,))
            displace()
        with self._lock, contextlib.suppress(sqlite3.OperationalError):
            if self._connection is not None:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def is_key(name: str) -> bool:
    """Whether a folder's name is an agent's key: 32 hex digits."""
    return len(name) == 32 and set(name) <= set("0123456789abcdef")


def _insert(
    connection: sqlite3.Connection, key: str, label: Label, nbytes: int, n_turns: int, last_used: float
) -> None:
    row = IndexRow(key, label.digest, _next_use(connection), last_used, nbytes, n_turns)
    connection.execute("INSERT INTO agents VALUES (?, ?, ?, ?, ?, ?, ?)", row.values)


def _next_use(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT coalesce(max(used), 0) + 1 FROM agents").fetchone()[0])


def _change(connection: sqlite3.Connection, key: str, **values: Any) -> None:
    """Change some values of an agent's row, if there is one."""
    found = connection.execute(f"SELECT {_COLUMNS} FROM agents WHERE key = ?", (key,)).fetchone()
    if found is not None:
        row = dataclasses.replace(IndexRow(*found), **values)
        query = f"UPDATE agents SET ({_COLUMNS}, sum) = (?, ?, ?, ?, ?, ?, ?) WHERE key = ?"
        connection.execute(query, (*row.values, key))


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
