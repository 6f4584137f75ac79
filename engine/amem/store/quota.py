"""Eviction from disk: snapshots first, then the least useful blocks. Text and tokens are never evicted."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from amem.errors import StoreError
from amem.store.database import Database
from amem.store.fileformat import Record
from amem.store.records import BlockRecord, SnapshotRecord

if TYPE_CHECKING:
    from amem.store.agent import AgentStore
    from amem.store.store import Store

_BATCH = 32


def enforce(store: Store, limit: int) -> int:
    """Evict until the store's files have at most ``limit`` bytes; returns the bytes freed.

    Agents go by last use, the least recent first, and those that this store has open after all others. Of an open agent
    what its last find returned is spared. An agent that another process has open is left alone.
    """
    freed = 0
    while (excess := store.disk_bytes - limit) > 0:
        more = _free(store, excess)
        if more == 0:
            break
        freed += more  # and look again, because forgetting blocks writes to databases
    return freed


def _free(store: Store, excess: int) -> int:
    freed = 0
    for kind in (0, 1):
        for key in _by_use(store):
            if freed >= excess:
                return freed
            with contextlib.suppress(StoreError, FileNotFoundError), store.borrow(key) as agent:
                freed += _evict(agent, list(agent.evictable()[kind]), excess - freed)
    return freed


def candidates(database: Database, in_use: Collection[str]) -> tuple[list[SnapshotRecord], list[BlockRecord]]:
    """What may go, the least useful first: off the head's path before on it, old snapshots before new, leaves first."""
    tree = database.tree
    head = database.head
    on_path: set[str] = set()
    for realm in database.realms():
        value = database.realization(head, realm) if head is not None else None
        path = database.preferred_blocks(head, realm)
        on_path |= {block.id for block in tree.path(path[-1] if path else None)}
        on_path |= {value.snapshot} if value is not None and value.snapshot else set()
    snapshots = [record for record in tree.snapshots() if record.id not in in_use]
    blocks = [record for record in tree.blocks() if record.id not in in_use]
    snapshots.sort(key=lambda record: record.id in on_path)
    blocks.sort(key=lambda record: (record.id in on_path, -record.start))
    return snapshots, blocks


def _by_use(store: Store) -> Iterator[str]:
    keys = store.keys_by_use()
    in_use = store.open_keys()
    yield from (key for key in keys if key not in in_use)
    yield from (key for key in keys if key in in_use)


def _evict(agent: AgentStore, records: list[Record], excess: int) -> int:
    """Evict from the front of a list, a few at a time, until so many bytes are freed."""
    freed = 0
    while records and freed < excess:
        batch: list[Record] = []
        nbytes = 0
        while records and nbytes < excess - freed and len(batch) < _BATCH:
            batch.append(records.pop(0))
            nbytes += batch[-1].nbytes
        freed += agent.evict(batch)
    return freed
