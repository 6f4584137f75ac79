"""The checks and rows of a commit: that a turn's tokens, its blocks and its snapshot are of one history."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from amem.errors import InputError
from amem.store import faults, hashes
from amem.store.database import Database
from amem.store.records import GROUP_TOKENS, BlockRecord, Realization, Realm, SnapshotRecord, Tokens


def history_of(database: Database, parent: int | None, realm: Realm, token_ids: Tokens, n_tokens: int) -> Tokens:
    """The ids of the whole history at the end of a turn that follows ``parent``. Raises InputError, UnknownTurn."""
    before: Tokens | None = np.empty(0, np.int32)
    if parent is not None:
        database.turn(parent)
        if len(token_ids) != n_tokens:
            before = database.path_tokens(parent, realm)
    if before is None:
        raise InputError(f"turn {parent} has no tokens for this model; realize the turns before it first")
    if len(before) + len(token_ids) != n_tokens:
        raise InputError(f"{len(before)} tokens before the turn and {len(token_ids)} of it are not {n_tokens}")
    return np.concatenate([before, token_ids])


def add_realization(
    database: Database,
    value: Realization,
    history: Tokens,
    blocks: Sequence[BlockRecord],
    snapshot: SnapshotRecord | None,
) -> None:
    """Insert a turn's blocks, snapshot and realization. Raises InputError unless all are of ``history``."""
    realm = database.add_realm(value.realm)
    for block in blocks:
        if block.realm != value.realm:
            raise InputError(f"block {block.id} is of another model or codec than the turn")
        if database.tree.chain_of(block.id) is None:
            database.tree.add_block(block, realm)
    names = {block.id for block in blocks} | ({value.last_block} if value.last_block else set())
    _check_tokens(database, history, names)
    faults.reach("commit.blocks")
    last = database.tree.block(value.last_block) if value.last_block else None
    if last is not None and not last.sealed:
        raise InputError(f"block {last.id} is not sealed; give it as the tail")
    tail = database.tree.block(value.tail) if value.tail else None
    if tail is not None and tail.parent != value.last_block:
        raise InputError(f"the tail {tail.id} does not follow the last sealed block")
    if snapshot is not None and database.tree.snapshot(snapshot.id) is None:
        if snapshot.realm != value.realm or snapshot.position != len(history):
            raise InputError(f"snapshot {snapshot.id} is not of the turn's end")
        open_ids = history[len(history) - snapshot.n_open :]
        database.tree.add_snapshot(snapshot, realm, value.tail or value.last_block, open_ids)
    database.add_realization(value)
    database.remember(value.turn, value.realm, history)


def _check_tokens(database: Database, history: Tokens, names: Collection[str]) -> None:
    """Raises InputError unless the blocks, and all before them, hold the tokens of ``history``."""
    chain = hashes.chain(hashes.EMPTY, history)
    for name in names:
        stored = database.tree.chain_of(name)
        if stored is None:
            raise InputError(f"block {name} is not stored")
        boundary = stored[1] // GROUP_TOKENS
        if boundary > len(chain) or chain[boundary - 1] != stored[0]:
            raise InputError(f"the tokens of block {name} are not those of the turn's history")
