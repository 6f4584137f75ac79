"""An agent's database: turns, realizations, and what belongs to no block. All values are checked when it is opened."""

# ruff: noqa: S608 - what is put into queries are the column lists of this file

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amem.errors import InputError, UnknownTurn
from amem.store import hashes, schema
from amem.store.fileformat import tokens_from_bytes, tokens_to_bytes
from amem.store.hashes import row_sum
from amem.store.records import BLOCK_TOKENS, GROUP_TOKENS, NewTurn, Realization, Realm, Tokens, TurnRecord
from amem.store.tree import Tree

DATABASE = "agent.sqlite3"
_CHECKPOINT_BYTES = 1 << 20
_HISTORIES = 4
_DANGLING = "PRAGMA foreign_key_check"
_TURN = "id, parent, prompt, reply, system, settings, finish_reason, cell_id, execution, created"


class Database:
    """One agent's database; not thread-safe by itself. ``tree`` holds the part that knows blocks."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._connection = schema.connect(file, schema.AGENT, synchronous="FULL", exclusive=True)
        # Checkpoints are made by us, between commits: so the size of the log says what a commit wrote.
        self._connection.execute("PRAGMA wal_autocheckpoint = 0")
        self._realms: dict[int, Realm] = {}
        self._histories: dict[tuple[int, Realm], Tokens] = {}  # a few recent ones: a turn's tokens never change
        self.tree = Tree(self._connection, self.realm_of)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    # -- transactions

    def hold(self, insert: Callable[[], object]) -> None:
        """Rows that everybody here sees and the file does not have: a transaction that is left open."""
        self._connection.execute("PRAGMA cache_spill = OFF")  # nothing of it goes to a disk that may be full
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            insert()
        except BaseException:
            self.drop_held()
            raise

    def drop_held(self) -> None:
        """Forget the rows that `hold` inserted, if there are any."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
            self._connection.execute("PRAGMA cache_spill = ON")
            self._realms.clear()
            self._histories.clear()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._realms.clear()
            self._histories.clear()
            raise

    @property
    def log_nbytes(self) -> int:
        """Bytes of the write-ahead log."""
        try:
            return self.file.with_name(self.file.name + "-wal").stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the database with its log, and of all payload files that it knows."""
        known = "SELECT (SELECT total(nbytes) FROM blocks) + (SELECT total(nbytes) FROM snapshots)"
        return int(self._connection.execute(known).fetchone()[0]) + self.file.stat().st_size + self.log_nbytes

    def checkpoint(self, *, force: bool = False) -> int:
        """Move a long log into the database; returns the bytes that this wrote, at most."""
        nbytes = self.log_nbytes
        if nbytes == 0 or (nbytes < _CHECKPOINT_BYTES and not force):
            return 0
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return min(nbytes, self.file.stat().st_size)

    def problems(self) -> list[str]:
        """What is damaged, in plain sentences; empty for a sound database."""
        try:
            found = [row[0] for row in self._connection.execute("PRAGMA integrity_check(5)") if row[0] != "ok"]
            found += [f"a row of {table} names none in {of}" for table, _, of, _ in self._connection.execute(_DANGLING)]
            if found:
                return [f"the database is damaged ({found[0]})"]
            if bad := self.tree.changed():
                return [f"{name} does not match its checksum in the database" for name in bad]
            for table in ("state", "meta"):
                for *row, total in self._connection.execute(f"SELECT key, value, sum FROM {table}"):
                    if total != row_sum(row):
                        return [f"a value of the agent ({row[0]}) does not match its checksum in the database"]
            bad = [str(row[0]) for row in self._rows() if row[-1] != row_sum(row[:-1])]
            query = (
                "SELECT turn, fingerprint, codec, token_ids, n_tokens, sum FROM realizations"
                " LEFT JOIN realms ON realm = realms.id"
            )
            bad += [str(row[0]) for row in self._connection.execute(query) if row[-1] != row_sum(row[:-1])]
            return [f"turn {turn} does not match its checksum in the database" for turn in sorted(set(bad))]
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            return [f"the database is damaged ({error})"]

    def _rows(self) -> Iterable[tuple[Any, ...]]:
        return self._connection.execute(f"SELECT {_TURN}, sum FROM turns ORDER BY id")

    # -- state and meta

    def get_state(self, key: str) -> str | None:
        """A value of the agent's own state: ``head`` or ``transcript_nbytes``."""
        row = self._connection.execute("SELECT value FROM state WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    @property
    def head(self) -> int | None:
        """The turn at which the agent stands; None: before its first."""
        head = self.get_state("head")
        return int(head) if head else None

    def set_state(self, key: str, value: str | None) -> None:
        """Set a value of the agent's own state."""
        self._connection.execute("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", (key, value, row_sum((key, value))))

    def meta(self) -> dict[str, str]:
        """The small texts about the agent."""
        return dict(self._connection.execute("SELECT key, value FROM meta ORDER BY key").fetchall())

    def set_meta(self, key: str, value: str | None) -> None:
        """Set or, with None, remove a small text."""
        if value is None:
            self._connection.execute("DELETE FROM meta WHERE key = ?", (key,))
        else:
            self._connection.execute(
                "INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (key, value, row_sum((key, value)))
            )

    # -- realms

    def realm_id(self, realm: Realm) -> int | None:
        """The number of a realm that this agent has state of."""
        for number, known in self._realms.items():
            if known == realm:
                return number
        query = "SELECT id FROM realms WHERE fingerprint = ? AND codec = ?"
        row = self._connection.execute(query, (realm.fingerprint, realm.codec)).fetchone()
        if row is None:
            return None
        self._realms[row[0]] = realm
        return int(row[0])

    def add_realm(self, realm: Realm) -> int:
        """The number of a realm, which is added if need be."""
        number = self.realm_id(realm)
        if number is None:
            query = "INSERT INTO realms (fingerprint, codec) VALUES (?, ?)"
            self._connection.execute(query, (realm.fingerprint, realm.codec))
            number = self.realm_id(realm)
            assert number is not None
        return number

    def realm_of(self, number: int) -> Realm:
        """The realm with a number."""
        if number not in self._realms:
            row = self._connection.execute("SELECT fingerprint, codec FROM realms WHERE id = ?", (number,)).fetchone()
            self._realms[number] = Realm(*row)
        return self._realms[number]

    def realms(self) -> list[Realm]:
        """All realms that the agent has state of."""
        return [Realm(*row) for row in self._connection.execute("SELECT fingerprint, codec FROM realms ORDER BY id")]

    # -- turns

    def turns(self) -> dict[int, TurnRecord]:
        """All turns by number."""
        return {row[0]: _turn(row) for row in self._rows()}

    def turn(self, number: int) -> TurnRecord:
        """Raises UnknownTurn."""
        row = self._connection.execute(f"SELECT {_TURN}, sum FROM turns WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise UnknownTurn(f"no turn {number}; it was never saved, or belongs to another agent")
        return _turn(row)

    def n_turns(self) -> int:
        """Turns of all branches."""
        return int(self._connection.execute("SELECT count(*) FROM turns").fetchone()[0])

    def children(self, parent: int | None) -> list[int]:
        """The turns after ``parent``, in the order in which they were made."""
        query = "SELECT id FROM turns WHERE parent IS ? ORDER BY id"
        return [row[0] for row in self._connection.execute(query, (parent,))]

    def path(self, number: int) -> list[int]:
        """From the root turn to ``number``."""
        query = (
            "WITH RECURSIVE up (id, parent) AS (SELECT id, parent FROM turns WHERE id = ?"
            " UNION SELECT turns.id, turns.parent FROM turns JOIN up ON turns.id = up.parent) SELECT id FROM up"
        )
        found = [row[0] for row in self._connection.execute(query, (number,))]
        if not found:
            self.turn(number)
        return found[::-1]

    def add_turn(self, turn: NewTurn, created: float, number: int | None = None) -> TurnRecord:
        """Insert a turn; without ``number`` it gets one that no turn of this agent ever had."""
        settings = json.dumps(dict(turn.settings), ensure_ascii=False)
        if number is None:
            row = self._connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'turns'").fetchone()
            number = (row[0] if row else 0) + 1
        values = (
            number, turn.parent, turn.prompt, turn.reply, turn.system, settings, turn.finish_reason, turn.cell_id,
            turn.execution, created,
        )  # fmt: skip
        self._connection.execute(f"INSERT INTO turns ({_TURN}, sum) VALUES ({'?,' * 10}?)", (*values, row_sum(values)))
        return _turn(values)

    # -- realizations

    def realization(self, turn: int, realm: Realm) -> Realization | None:
        """None also if the realm is unknown."""
        query = (
            "SELECT r.token_ids, r.n_tokens, b.id, t.id, s.id FROM realizations r"
            " LEFT JOIN blocks b ON b.seq = r.last_block LEFT JOIN blocks t ON t.seq = r.tail"
            " LEFT JOIN snapshots s ON s.seq = r.snapshot WHERE r.turn = ? AND r.realm = ?"
        )
        row = self._connection.execute(query, (turn, self.realm_id(realm))).fetchone()
        return Realization(turn, realm, tokens_from_bytes(row[0]), *row[1:]) if row else None

    def realized_in(self, turn: int) -> list[Realm]:
        """The realms in which a turn has tokens."""
        query = "SELECT fingerprint, codec FROM realizations JOIN realms r ON realm = r.id WHERE turn = ? ORDER BY r.id"
        return [Realm(*row) for row in self._connection.execute(query, (turn,))]

    def add_realization(self, value: Realization) -> None:
        """Insert, or replace one of the same tokens."""
        data = tokens_to_bytes(value.token_ids)
        total = row_sum((value.turn, value.realm.fingerprint, value.realm.codec, data, value.n_tokens))
        query = (
            "INSERT OR REPLACE INTO realizations VALUES (?, ?, ?, ?, (SELECT seq FROM blocks WHERE id = ?),"
            " (SELECT seq FROM blocks WHERE id = ?), (SELECT seq FROM snapshots WHERE id = ?), ?)"
        )
        links = (value.last_block, value.tail, value.snapshot)
        self._connection.execute(query, (value.turn, self.add_realm(value.realm), data, value.n_tokens, *links, total))

    def broken_links(self) -> list[str]:
        """Turns whose blocks or snapshot are not of their tokens, by number and realm."""
        bad = []
        for turn in self.turns():
            for realm in self.realized_in(turn):
                known, ids = self.realization(turn, realm), self.path_tokens(turn, realm)
                if known is None or ids is None:
                    continue
                whole = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS if known.tail or known.snapshot else None
                links = ((known.last_block, whole), (known.tail, len(ids) // GROUP_TOKENS * GROUP_TOKENS))
                for block, expected in links:
                    chain, end = (block and self.tree.chain_of(block)) or (hashes.EMPTY, 0)
                    own = hashes.chain(hashes.EMPTY, ids[:end])
                    if (block and expected not in {None, end}) or chain != (own[-1] if own else hashes.EMPTY):
                        bad.append(f"turn {turn} names a block of other tokens")
                snapshot = self.tree.snapshot(known.snapshot) if known.snapshot else None
                if snapshot is not None and snapshot.position != len(ids):
                    bad.append(f"turn {turn} names a snapshot of another place")
        return bad

    def path_tokens(self, turn: int, realm: Realm, at_least: int | None = None) -> Tokens | None:
        """The ids of the whole history at a turn's end, or the last of them (``at_least`` so many if there are).

        A realization that holds as many ids as its history has tokens ends the walk: it is the whole history.
        None if a turn on the way has no realization, or the counts contradict one another.
        """
        if (turn, realm) in self._histories:
            return self._histories[turn, realm]
        query = (
            "WITH RECURSIVE up (id, parent) AS (SELECT id, parent FROM turns WHERE id = ?"
            " UNION SELECT turns.id, turns.parent FROM turns JOIN up ON turns.id = up.parent)"
            " SELECT r.token_ids, r.n_tokens FROM up LEFT JOIN realizations r ON r.turn = up.id AND r.realm = ?"
        )
        pieces: list[bytes] = []
        expected: int | None = None
        have = 0
        for data, n_tokens in self._connection.execute(query, (turn, self.realm_id(realm))):
            if data is None or (expected is not None and n_tokens != expected):
                return None
            pieces.append(data)
            have += len(data) // 4
            expected = n_tokens - len(data) // 4
            if expected == 0 or (at_least is not None and have >= at_least):
                tokens = tokens_from_bytes(b"".join(reversed(pieces)))
                if expected == 0:
                    self.remember(turn, realm, tokens)
                return tokens
        if not pieces:
            self.turn(turn)
        return None

    def remember(self, turn: int, realm: Realm, history: Tokens) -> None:
        """Keep the whole history at a turn's end in memory: the next turn is likely to follow it."""
        history.setflags(write=False)
        self._histories[turn, realm] = history
        while len(self._histories) > _HISTORIES:
            del self._histories[next(iter(self._histories))]

    def preferred_blocks(self, turn: int | None, realm: Realm) -> list[int]:
        """The blocks of a turn's path by number, or of its closest ancestor that has blocks."""
        number = self.realm_id(realm)
        if turn is None:
            return []
        self.turn(turn)
        query = (
            "WITH RECURSIVE up (id, parent) AS (SELECT id, parent FROM turns WHERE id = ?"
            " UNION SELECT turns.id, turns.parent FROM turns JOIN up ON turns.id = up.parent)"
            " SELECT coalesce(r.tail, r.last_block) AS block FROM up"
            " JOIN realizations r ON r.turn = up.id AND r.realm = ? WHERE block IS NOT NULL"
        )
        row = self._connection.execute(query, (turn, number)).fetchone()
        return self.tree.ancestors(row[0]) if row else []


def check_text(turn: NewTurn) -> None:
    """Raises InputError for text or settings that cannot be written."""
    texts = (turn.prompt, turn.reply, turn.system, turn.finish_reason, turn.cell_id, turn.execution)
    try:
        json.dumps(dict(turn.settings), ensure_ascii=False).encode()
        for text in texts:
            (text or "").encode()
    except UnicodeEncodeError as error:
        raise InputError("the turn's text holds a lone surrogate, which is no text; remove it") from error
    except TypeError as error:
        raise InputError(f"the turn's settings cannot be written as JSON: {error}") from error


def _turn(row: tuple[Any, ...]) -> TurnRecord:
    number, parent, prompt, reply, system, settings, finish_reason, cell_id, execution, created = row[:10]
    return TurnRecord(
        number, parent, prompt, reply, system, json.loads(settings), finish_reason, cell_id, execution, created
    )
