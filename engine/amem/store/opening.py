"""What is done when an agent is opened, under its lock: salvage, the transcript's end, and what a kill left behind."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from amem.sizes import count
from amem.store import facts, files, transcript
from amem.store.blockfiles import BlockFiles, set_aside
from amem.store.database import DATABASE, Database
from amem.store.fileformat import Record, read_record
from amem.store.ledger import Ledger
from amem.store.names import Label
from amem.store.payload import DamagedError
from amem.store.records import BlockRecord

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def open_database(folder: Path, label: Label, ledger: Ledger, *, thorough: bool = False) -> Database:
    """The agent's database, sound and at one with its folder. The ledger's reports tell what had to be repaired.

    ``thorough``: its rows are compared with one another, too, which takes longer the more there is.
    """
    database, problems = try_open(folder)
    if database is not None and thorough and (problems := contradictions(database)):
        database.close()
        database = None
    salvaged = database is None
    if database is None:
        lost = salvage(folder)
        ledger.reports.append(f"agent {label.name!r}: {problems[0]}; it was rebuilt from transcript and block files")
        ledger.reports.extend(f"agent {label.name!r}: {problem}" for problem in lost)
        database = Database(folder / DATABASE)
    try:
        _take_over(folder, label, database, ledger)
        mend_transcript(folder, label, database, ledger, check=salvaged)
        _match_files(folder, label, database, ledger)
    except BaseException:
        database.close()
        raise
    return database


def contradictions(database: Database) -> list[str]:
    """Rows of the database, each sound by itself, that contradict one another, in plain sentences."""
    tree = database.tree
    return [
        *(f"block {name} contradicts the blocks before it" for name in tree.broken_blocks()),
        *(f"snapshot {name} contradicts its blocks" for name in tree.broken_snapshots()),
        *database.broken_links(),
    ]


def try_open(folder: Path) -> tuple[Database | None, list[str]]:
    """The database, or the reasons why it cannot be used. Raises StoreError, and sqlite3.Error that is no damage."""
    if not (folder / DATABASE).exists():
        return None, ["its database is missing"]
    try:
        database = Database(folder / DATABASE)
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
            return None, [f"its database is damaged ({error})"]
        raise
    problems = database.problems()
    if not problems and database.get_state("transcript_nbytes") is None:
        problems = ["its database is empty"]
    if problems:
        database.close()
        return None, problems
    return database, []


def salvage(folder: Path) -> list[str]:
    """Set a damaged database aside and make a new one; returns what was lost, in plain sentences."""
    for suffix in ("", "-wal", "-shm"):
        path = folder / (DATABASE + suffix)
        if path.exists():
            set_aside(path)
    rows, bad = transcript.read(folder)
    lost = [f"{count(bad, 'line')} of its transcript could not be read"] if bad else []
    records: list[Record] = []
    ledger = Ledger(folder, None)
    block_files = BlockFiles(folder, ledger)
    for name in sorted(block_files.names()):
        try:
            records.append(read_record(block_files.path(name)))
        except DamagedError as error:
            lost.append(f"block {name} was set aside: {error}")
            block_files.quarantine(name)
    if bad:
        set_aside(folder / transcript.TRANSCRIPT)
        length = transcript.write_whole(folder, rows)
    else:
        length = sum(len(transcript.line(row).encode()) for row in rows)
    return lost + facts.build(folder, facts.known_rows(rows), records, length)


def _take_over(folder: Path, label: Label, database: Database, ledger: Ledger) -> None:
    """Add what the transcript tells beyond the commits that the database knows.

    A kill may have come between the two. Or the database's log is damaged, of which SQLite takes what it can read and
    says nothing: what was committed last, and the turns before it, would be lost without a word.
    """
    told, length = transcript.beyond(folder, int(database.get_state("transcript_nbytes") or 0))
    if not told:
        return
    rows = facts.known_rows(told)
    problems = facts.add(database, rows, _unknown_files(folder, database, rows), length)
    ledger.reports.extend(f"agent {label.name!r}: {problem}" for problem in problems)
    n_turns = sum(row["kind"] == "turn" for row in rows)
    if n_turns > 1:  # a kill loses one at most
        ledger.reports.append(
            f"agent {label.name!r}: its database's log was damaged or is missing; its last {n_turns} turns were taken"
            " over from its transcript"
        )


def _unknown_files(folder: Path, database: Database, rows: Iterable[transcript.Row]) -> list[Record]:
    """What the files say that rows name, and their blocks' ancestors; but for those that the database knows."""
    block_files, known = BlockFiles(folder, Ledger(folder, None)), database.tree.names()
    links = [row[key] for row in rows if row["kind"] == "realization" for key in ("last_block", "tail", "snapshot")]
    found: dict[str, Record] = {}
    while links:
        name = links.pop()
        if name is None or name in known or name in found:
            continue
        with contextlib.suppress(DamagedError, OSError):
            record = found[name] = read_record(block_files.path(name))
            links.append(record.parent if isinstance(record, BlockRecord) else None)
    return list(found.values())


def mend_transcript(folder: Path, label: Label, database: Database, ledger: Ledger, *, check: bool = False) -> None:
    """Cut off what was never committed; write the transcript anew if it is too short or, with ``check``, damaged."""
    whole = transcript.cut(folder, int(database.get_state("transcript_nbytes") or 0))
    if whole and not (check and missing_rows(folder, label, database)):
        return
    length = transcript.write_whole(folder, facts.all_rows(database, label))
    with database.transaction():
        database.set_state("transcript_nbytes", str(length))
    ledger.reports.append(f"agent {label.name!r}: its transcript was damaged and was written anew from its database")


def missing_rows(folder: Path, label: Label, database: Database) -> int:
    """How many of the database's facts the transcript does not tell, or tells otherwise; damaged lines count, too."""
    rows, bad = transcript.read(folder)
    told = {_essence(row) for row in rows}
    kinds = ("agent", "turn", "realization")
    return bad + sum(_essence(row) not in told for row in facts.all_rows(database, label) if row["kind"] in kinds)


def _essence(row: transcript.Row) -> str:
    """A row without the names of files, which may be evicted later."""
    return transcript.line({key: value for key, value in row.items() if key not in ("last_block", "tail", "snapshot")})


def _match_files(folder: Path, label: Label, database: Database, ledger: Ledger) -> None:
    """Sweep files that no turn knows, and forget blocks whose file is gone."""
    block_files = BlockFiles(folder, ledger)
    known, present = database.tree.names(), block_files.names()
    missing = known - present
    if missing:
        with database.transaction():
            gone = database.tree.remove(missing)
        ledger.reports.append(
            f"agent {label.name!r}: {count(len(missing), 'block file')} missing, to be computed again when needed"
        )
        known -= gone
    with files.explained("sweep", folder):
        block_files.sweep(known)
