"""The prefix tree of blocks and snapshots in an agent's database, and the search for a token list's longest prefix."""

# ruff: noqa: S608 - what is put into queries are the column lists of this file

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import Any

import numpy as np

from amem.errors import InputError
from amem.store import hashes
from amem.store.fileformat import tokens_from_bytes, tokens_to_bytes
from amem.store.records import BLOCK_TOKENS, GROUP_TOKENS, BlockRecord, Found, Realm, SnapshotRecord, Tokens

_BLOCK = "b.id, p.id, b.realm, b.start, b.token_ids, b.checksum, b.nbytes"
_BLOCKS = "blocks b LEFT JOIN blocks p ON p.seq = b.parent"
_BLOCK_ROW = "id, parent, realm, start, token_ids, chain, checksum, nbytes"
_SNAPSHOT = "id, realm, position, n_open, checksum, nbytes"
_SNAPSHOT_ROW = f"{_SNAPSHOT}, block, chain, open_hash, open_ids"


class Tree:
    """Blocks know their parent; a hash of the whole history at each group boundary leads to them.

    Whatever is in the tables has all its ancestors there too: removing a block removes what depends on it.
    """

    def __init__(self, connection: sqlite3.Connection, realm_of: Callable[[int], Realm]) -> None:
        self._connection = connection
        self._realm_of = realm_of

    # -- records

    def block(self, name: str) -> BlockRecord | None:
        """The record of a block, or None."""
        row = self._connection.execute(f"SELECT {_BLOCK} FROM {_BLOCKS} WHERE b.id = ?", (name,)).fetchone()
        return self._block(row) if row else None

    def snapshot(self, name: str) -> SnapshotRecord | None:
        """The record of a snapshot, or None."""
        row = self._connection.execute(f"SELECT {_SNAPSHOT} FROM snapshots WHERE id = ?", (name,)).fetchone()
        return self._snapshot(row) if row else None

    def blocks(self) -> Iterator[BlockRecord]:
        """All blocks, parents first."""
        rows = self._connection.execute(f"SELECT {_BLOCK} FROM {_BLOCKS} ORDER BY b.start, b.seq").fetchall()
        return map(self._block, rows)

    def snapshots(self) -> Iterator[SnapshotRecord]:
        """All snapshots, the oldest first."""
        rows = self._connection.execute(f"SELECT {_SNAPSHOT} FROM snapshots ORDER BY seq").fetchall()
        return map(self._snapshot, rows)

    def records(self) -> list[BlockRecord | SnapshotRecord]:
        """All blocks, parents first, then all snapshots."""
        return [*self.blocks(), *self.snapshots()]

    def names(self) -> set[str]:
        """The ids of all blocks and snapshots."""
        rows = self._connection.execute("SELECT id FROM blocks UNION ALL SELECT id FROM snapshots")
        return {row[0] for row in rows}

    def knows(self, name: str) -> bool:
        """Whether there is a block or snapshot of this id."""
        return self.block(name) is not None or self.snapshot(name) is not None

    def n_blocks(self) -> int:
        """Blocks of all realms."""
        return int(self._connection.execute("SELECT count(*) FROM blocks").fetchone()[0])

    def ancestors(self, seq: int) -> list[int]:
        """A block's path by number, from the first block to itself."""
        query = (
            "WITH RECURSIVE up (seq, parent) AS (SELECT seq, parent FROM blocks WHERE seq = ?"
            " UNION SELECT b.seq, b.parent FROM blocks b JOIN up ON b.seq = up.parent) SELECT seq FROM up"
        )
        return [row[0] for row in self._connection.execute(query, (seq,))][::-1]

    def path(self, seq: int | None) -> list[BlockRecord]:
        """A block's path, from the first block to itself."""
        query = (
            "WITH RECURSIVE up (seq, parent) AS (SELECT seq, parent FROM blocks WHERE seq = ?"
            " UNION SELECT b.seq, b.parent FROM blocks b JOIN up ON b.seq = up.parent)"
            f" SELECT {_BLOCK} FROM up JOIN blocks b ON b.seq = up.seq LEFT JOIN blocks p ON p.seq = b.parent"
            " ORDER BY b.start"
        )
        return [self._block(row) for row in self._connection.execute(query, (seq,))]

    def history(self, name: str, known: Container[str]) -> list[BlockRecord | SnapshotRecord]:
        """A block with its ancestors up to one that is known, in no order; or a snapshot alone."""
        snapshot = self.snapshot(name)
        if snapshot is not None:
            return [snapshot]
        found: list[BlockRecord | SnapshotRecord] = []
        block = self.block(name)
        while block is not None:
            found.append(block)
            block = self.block(block.parent) if block.parent and block.parent not in known else None
        return found

    def _block(self, row: tuple[Any, ...]) -> BlockRecord:
        name, parent, realm, start, data, checksum, nbytes = row
        return BlockRecord(name, parent, self._realm_of(realm), start, tokens_from_bytes(data), checksum, nbytes)

    def _snapshot(self, row: tuple[Any, ...]) -> SnapshotRecord:
        name, realm, position, n_open, checksum, nbytes = row
        return SnapshotRecord(name, self._realm_of(realm), position, n_open, checksum, nbytes)

    # -- changes

    def add_block(self, record: BlockRecord, realm: int) -> None:
        """Raises InputError unless it follows a sealed block of the same realm, or is a first block."""
        parent, before, end = None, hashes.EMPTY, 0
        if record.parent is not None:
            query = "SELECT seq, chain, start, length(token_ids) / 4, realm FROM blocks WHERE id = ?"
            row = self._connection.execute(query, (record.parent,)).fetchone()
            if row is None:
                raise InputError(f"block {record.id} has a parent that is not stored: {record.parent}")
            parent, before = row[0], row[1]
            end = row[2] + BLOCK_TOKENS if row[3] == BLOCK_TOKENS and row[4] == realm else -1
        if record.start != end:
            raise InputError(f"block {record.id} starts at {record.start}, which is not where its parent ends")
        chain = hashes.chain(before, record.token_ids)
        data = tokens_to_bytes(record.token_ids)
        values = (record.id, parent, realm, record.start, data, chain[-1], record.checksum, record.nbytes)
        query = f"INSERT INTO blocks ({_BLOCK_ROW}, sum) VALUES ({'?,' * 8}?)"
        seq = self._connection.execute(query, (*values, _sum(record.realm, values))).lastrowid
        self._connection.executemany("INSERT INTO prefixes VALUES (?, ?, ?)", [(realm, link, seq) for link in chain])

    def add_snapshot(self, record: SnapshotRecord, realm: int, block: str | None, open_ids: Tokens) -> None:
        """``block`` is the last block of its history. Raises InputError unless it ends where the open group starts."""
        seq, chain, end = None, hashes.EMPTY, 0
        if block is not None:
            query = "SELECT seq, chain, start + length(token_ids) / 4 FROM blocks WHERE id = ?"
            row = self._connection.execute(query, (block,)).fetchone()
            if row is None:
                raise InputError(f"snapshot {record.id} follows a block that is not stored: {block}")
            seq, chain, end = row
        if end != record.position - record.n_open or len(open_ids) != record.n_open:
            raise InputError(f"snapshot {record.id} at {record.position} does not follow its blocks, ending at {end}")
        values = (
            record.id, realm, record.position, record.n_open, record.checksum, record.nbytes, seq, chain,
            hashes.open_group(open_ids), tokens_to_bytes(open_ids),
        )  # fmt: skip
        query = f"INSERT INTO snapshots ({_SNAPSHOT_ROW}, sum) VALUES ({'?,' * 10}?)"
        self._connection.execute(query, (*values, _sum(record.realm, values)))

    def remove(self, names: Collection[str]) -> set[str]:
        """Forget blocks and snapshots and all that depends on them; returns the ids of all that was forgotten."""
        execute = self._connection.execute
        gone: set[str] = set()
        for name in names:
            query = (
                "WITH RECURSIVE down (seq, id, start) AS (SELECT seq, id, start FROM blocks WHERE id = ?"
                " UNION SELECT b.seq, b.id, b.start FROM blocks b JOIN down ON b.parent = down.seq)"
                " SELECT seq, id FROM down ORDER BY start DESC"
            )
            for seq, block in execute(query, (name,)).fetchall():
                gone |= {block, *(row[0] for row in execute("SELECT id FROM snapshots WHERE block = ?", (seq,)))}
                execute("DELETE FROM blocks WHERE seq = ?", (seq,))
            if execute("DELETE FROM snapshots WHERE id = ?", (name,)).rowcount:
                gone.add(name)
        return gone

    def chain_of(self, name: str) -> tuple[bytes, int] | None:
        """The hash of the history that a block ends, and its length in tokens."""
        query = "SELECT chain, start + length(token_ids) / 4 FROM blocks WHERE id = ?"
        row = self._connection.execute(query, (name,)).fetchone()
        return (row[0], row[1]) if row else None

    def changed(self) -> list[str]:
        """Blocks and snapshots whose values are not those that were written, in plain sentences."""
        bad = []
        for table, columns in (("blocks", _BLOCK_ROW), ("snapshots", _SNAPSHOT_ROW)):
            query = (
                f"SELECT r.fingerprint, r.codec, {', '.join('t.' + name for name in columns.split(', '))}, t.sum"
                f" FROM {table} t LEFT JOIN realms r ON r.id = t.realm"
            )
            for fingerprint, codec, *values, total in self._connection.execute(query):
                if total != _sum(Realm(fingerprint, codec), values):
                    bad.append(f"{table[:-1]} {values[0]}")
        return bad

    def broken_blocks(self) -> list[str]:
        """Blocks whose parent, position, hash or prefix rows contradict their tokens."""
        chains: dict[int, tuple[bytes, int, int]] = {}
        bad = []
        query = "SELECT seq, id, parent, realm, start, token_ids, chain FROM blocks ORDER BY start, seq"
        for seq, name, parent, realm, start, data, chain in self._connection.execute(query).fetchall():
            before, end, parent_realm = chains.get(parent, (b"", -1, -1)) if parent else (hashes.EMPTY, 0, realm)
            links = hashes.chain(before, tokens_from_bytes(data))
            rows = self._connection.execute("SELECT chain FROM prefixes WHERE block = ? AND realm = ?", (seq, realm))
            sound = start == end and realm == parent_realm and links[-1:] == [chain]
            if not sound or {row[0] for row in rows} != set(links):
                bad.append(name)
            chains[seq] = (chain, start + len(data) // 4, realm)
        return bad

    def broken_snapshots(self) -> list[str]:
        """Snapshots whose position, hashes or open group contradict their blocks."""
        bad = []
        query = (
            "SELECT s.id, s.realm, s.position, s.n_open, s.chain, s.open_hash, s.open_ids, s.block, b.realm, b.chain,"
            " b.start + length(b.token_ids) / 4 FROM snapshots s LEFT JOIN blocks b ON b.seq = s.block"
        )
        for name, realm, position, n_open, chain, open_hash, data, block, *of_block in self._connection.execute(query):
            open_ids = tokens_from_bytes(data)
            expected = of_block if block is not None else [realm, hashes.EMPTY, 0]
            own = [realm, chain, position - n_open]
            if own != expected or len(open_ids) != n_open or open_hash != hashes.open_group(open_ids):
                bad.append(name)
        return bad

    # -- search

    def find(self, realm: int, token_ids: Tokens, preferred: Sequence[int], *, exact: bool = False) -> Found:
        """The longest stored prefix; with ``exact`` only one that ends at a snapshot. See AgentStore.find.

        ``preferred`` is a path of blocks by number, from the first: among several of the same tokens it goes first.
        """
        chain = [hashes.EMPTY, *hashes.chain(hashes.EMPTY, token_ids)]
        depth = self._depth(realm, chain)
        while True:
            found = self._at_snapshot(realm, token_ids, chain, depth, preferred)
            if found is None and not exact:
                found = self._at_boundary(realm, token_ids, chain, depth, preferred)
            if found is not None:
                return found
            if depth == 0:
                return Found()
            depth -= 1

    def _depth(self, realm: int, chain: list[bytes]) -> int:
        """The last group boundary that is stored. All before it are stored too, so halving finds it."""
        low, high = 0, len(chain) - 1
        while low < high:
            middle = (low + high + 1) // 2
            query = "SELECT 1 FROM prefixes WHERE realm = ? AND chain = ? LIMIT 1"
            if self._connection.execute(query, (realm, chain[middle])).fetchone():
                low = middle
            else:
                high = middle - 1
        return low

    def _at_boundary(
        self, realm: int, token_ids: Tokens, chain: list[bytes], depth: int, preferred: Sequence[int]
    ) -> Found | None:
        if depth == 0:
            return None
        query = "SELECT max(block) FROM prefixes WHERE realm = ? AND chain = ?"
        candidates = [self._connection.execute(query, (realm, chain[depth])).fetchone()[0]]
        candidates = [*preferred[(depth * GROUP_TOKENS - 1) // BLOCK_TOKENS :][:1], *candidates]
        n_tokens = depth * GROUP_TOKENS
        for seq in candidates:
            blocks = self.path(seq)
            if _matches(blocks, token_ids[:n_tokens]):
                return Found(tuple(blocks), n_tokens)
        return None

    def _at_snapshot(
        self, realm: int, token_ids: Tokens, chain: list[bytes], depth: int, preferred: Sequence[int]
    ) -> Found | None:
        history = (realm, chain[depth])
        if not self._connection.execute("SELECT 1 FROM snapshots WHERE realm = ? AND chain = ?", history).fetchone():
            return None
        n_tokens = depth * GROUP_TOKENS
        rest = token_ids[n_tokens : n_tokens + GROUP_TOKENS - 1]
        for n_open in range(len(rest), -1, -1):
            query = (
                f"SELECT {_SNAPSHOT}, block, open_ids FROM snapshots WHERE realm = ? AND chain = ? AND open_hash = ?"
                " ORDER BY block IS ? DESC, seq DESC LIMIT 4"
            )
            values = (*history, hashes.open_group(rest[:n_open]), preferred[-1] if preferred else None)
            for row in self._connection.execute(query, values).fetchall():
                if row[3] != n_open or not np.array_equal(tokens_from_bytes(row[7]), rest[:n_open]):
                    continue
                blocks = self.path(row[6])
                if _matches(blocks, token_ids[:n_tokens]) and _length(blocks) == n_tokens:
                    return Found(tuple(blocks), n_tokens, self._snapshot(row[:6]))
        return None


def _sum(realm: Realm, values: Sequence[Any]) -> str:
    return hashes.row_sum((realm.fingerprint, realm.codec, *values))


def _length(blocks: list[BlockRecord]) -> int:
    return sum(len(block.token_ids) for block in blocks)


def _matches(blocks: list[BlockRecord], token_ids: Tokens) -> bool:
    """Whether the blocks' ids begin with ``token_ids`` and none of the blocks is needless."""
    stored = np.concatenate([block.token_ids for block in blocks]) if blocks else np.empty(0, np.int32)
    needed = not blocks or len(stored) - len(blocks[-1].token_ids) < len(token_ids)
    return needed and np.array_equal(stored[: len(token_ids)], token_ids)
