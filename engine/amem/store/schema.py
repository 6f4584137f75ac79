"""The two SQLite databases: their tables, and how a connection is opened."""

from __future__ import annotations

import functools
import sqlite3
from pathlib import Path

from amem.store import files
from amem.store.fileformat import FORMAT
from amem.store.names import check_format

AGENT = """
-- The head, and how much of the transcript is committed.
CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT, sum TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, sum TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE realms (
    id INTEGER PRIMARY KEY,
    fingerprint TEXT NOT NULL,
    codec TEXT NOT NULL,
    UNIQUE (fingerprint, codec)
);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    parent INTEGER REFERENCES turns (id),
    prompt TEXT NOT NULL,
    reply TEXT NOT NULL,
    system TEXT,
    settings TEXT NOT NULL,  -- JSON
    finish_reason TEXT NOT NULL,
    cell_id TEXT,
    execution TEXT,
    created REAL NOT NULL,
    sum TEXT NOT NULL  -- of all of the row
);
CREATE INDEX turns_parent ON turns (parent);
CREATE TABLE blocks (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    parent INTEGER REFERENCES blocks (seq) ON DELETE CASCADE,
    realm INTEGER NOT NULL REFERENCES realms (id),
    start INTEGER NOT NULL,
    token_ids BLOB NOT NULL,  -- little-endian int32
    chain BLOB NOT NULL,  -- hash of the whole history at its end
    checksum TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    sum TEXT NOT NULL  -- of all of the row, with the realm's fingerprint and codec
);
CREATE INDEX blocks_parent ON blocks (parent);
-- One row for each group boundary inside or at the end of a block: the whole history up to there, as a hash.
CREATE TABLE prefixes (
    realm INTEGER NOT NULL,
    chain BLOB NOT NULL,
    block INTEGER NOT NULL REFERENCES blocks (seq) ON DELETE CASCADE,
    PRIMARY KEY (realm, chain, block)
) WITHOUT ROWID;
CREATE INDEX prefixes_block ON prefixes (block);
CREATE TABLE snapshots (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    realm INTEGER NOT NULL REFERENCES realms (id),
    position INTEGER NOT NULL,
    n_open INTEGER NOT NULL,
    checksum TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    block INTEGER REFERENCES blocks (seq) ON DELETE CASCADE,  -- its history ends with this block; then the open group
    chain BLOB NOT NULL,  -- hash of the history without the open group
    open_hash BLOB NOT NULL,
    open_ids BLOB NOT NULL,
    sum TEXT NOT NULL  -- as that of a block
);
CREATE INDEX snapshots_history ON snapshots (realm, chain, open_hash);
CREATE INDEX snapshots_block ON snapshots (block);
CREATE TABLE realizations (
    turn INTEGER NOT NULL REFERENCES turns (id),
    realm INTEGER NOT NULL REFERENCES realms (id),
    token_ids BLOB NOT NULL,
    n_tokens INTEGER NOT NULL,
    last_block INTEGER REFERENCES blocks (seq) ON DELETE SET NULL,
    tail INTEGER REFERENCES blocks (seq) ON DELETE SET NULL,
    snapshot INTEGER REFERENCES snapshots (seq) ON DELETE SET NULL,
    sum TEXT NOT NULL,  -- of turn, realm, token_ids, n_tokens
    PRIMARY KEY (turn, realm)
) WITHOUT ROWID;
"""

INDEX = """
CREATE TABLE agents (
    key TEXT PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,  -- of space and name
    used INTEGER NOT NULL,  -- counts up with each use: clocks can be set back
    last_used REAL NOT NULL,
    nbytes INTEGER NOT NULL,
    n_turns INTEGER NOT NULL,
    sum TEXT NOT NULL  -- of all of the row
) WITHOUT ROWID;
-- Which agent was asked after which, with a weight that fades: it says what to expect next.
CREATE TABLE transitions (
    space TEXT NOT NULL,  -- digest of its name
    before TEXT NOT NULL REFERENCES agents (key) ON DELETE CASCADE,
    after TEXT NOT NULL REFERENCES agents (key) ON DELETE CASCADE,
    weight REAL NOT NULL,
    PRIMARY KEY (space, before, after)
) WITHOUT ROWID;
CREATE INDEX transitions_before ON transitions (before);
CREATE INDEX transitions_after ON transitions (after);
"""


def connect(path: Path, tables: str, *, synchronous: str, exclusive: bool) -> sqlite3.Connection:
    """Open a database, and make its tables if it is new. Raises sqlite3.Error, StoreTooNew.

    The connection commits by itself unless BEGIN was said, and may be used by several threads under one lock. An
    ``exclusive`` one keeps others out, and so needs no file of shared memory.
    """
    files.make_private(path)
    connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    try:
        if exclusive:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA page_size = 1024")  # a commit touches a few rows in each of many small trees
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        check_format(version, path)
        if version == 0:
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                _create(connection, tables)
                connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.execute("COMMIT")
        if _described(connection) != _expected(tables):
            raise damaged("its tables are not as they were made")
    except sqlite3.DatabaseError as error:
        connection.close()
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) == sqlite3.SQLITE_ERROR:
            raise damaged(str(error)) from error  # our own statements are right, so it is the file that is not
        raise
    except UnicodeDecodeError as error:  # SQLite quotes the file in its message, and Python reads that as text
        connection.close()
        raise damaged("what SQLite says of it is no text") from error
    except BaseException:
        connection.close()
        raise
    return connection


def damaged(reason: str) -> sqlite3.DatabaseError:
    """An error such as SQLite raises for a damaged file, for damage that it does not look for."""
    error = sqlite3.DatabaseError(reason)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _create(connection: sqlite3.Connection, tables: str) -> None:
    for statement in tables.split(";\n"):
        if statement.strip():
            connection.execute(statement)


def _described(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    return sorted(connection.execute("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master").fetchall())


@functools.cache
def _expected(tables: str) -> list[tuple[str, ...]]:
    connection = sqlite3.connect(":memory:")
    try:
        _create(connection, tables)
        return _described(connection)
    finally:
        connection.close()
