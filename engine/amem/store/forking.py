"""The folder of a fork: the rows of one path, links to its files, and a database of its own."""

from __future__ import annotations

from pathlib import Path

from amem.store import facts, files, transcript
from amem.store.blockfiles import BlockFiles
from amem.store.database import Database
from amem.store.fileformat import Record
from amem.store.names import Label


def fill(folder: Path, label: Label, database: Database, source: BlockFiles, at: int | None) -> None:
    """Fill ``folder`` with the path of the turn ``at``. Nothing is copied where hard links are possible."""
    turns = database.path(at) if at is not None else []
    records: dict[str, Record] = {}
    for turn in reversed(turns):  # from the end: its blocks' path holds those of nearly all turns before
        for realm in database.realized_in(turn):
            value = database.realization(turn, realm)
            assert value is not None
            for name in (value.last_block, value.tail, value.snapshot):
                if name is not None and name not in records:
                    records |= {record.id: record for record in database.tree.history(name, records)}
    present = [name for name in records if source.link(name, folder)]
    files.sync_folder(folder)
    rows = facts.all_rows(database, label, turns)
    facts.build(folder, rows, [records[name] for name in present], transcript.write_whole(folder, rows))
