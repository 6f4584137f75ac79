"""Reads every byte of a store and says, in plain sentences, what is not as it was written."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from amem.errors import AgentLocked
from amem.store import names, opening
from amem.store.blockfiles import BlockFiles
from amem.store.database import Database
from amem.store.ledger import Ledger
from amem.store.lock import AgentLock
from amem.store.names import Label
from amem.store.payload import DamagedError
from amem.store.records import BlockRecord
from amem.store.store import Store


@dataclass(frozen=True)
class VerifyReport:
    """What was checked and found."""

    agents: int
    blocks: int
    snapshots: int
    nbytes: int  #: of payload files that were read
    problems: list[str]
    repaired: bool  #: whether the problems were repaired
    skipped: list[str]  #: agents that another process has open

    @property
    def clean(self) -> bool:
        """Nothing is damaged, or it has been repaired."""
        return self.repaired or not self.problems


@dataclass
class _Count:
    agents: int = 0
    blocks: int = 0
    snapshots: int = 0
    nbytes: int = 0


def verify(store: Store, *, repair: bool = False) -> VerifyReport:
    """Check every agent's database, transcript and files. Without ``repair`` nothing is changed.

    Repairing sets damaged files aside under ``quarantine/``, forgets what depends on them, and rebuilds damaged
    databases and transcripts from one another; what cannot be restored is named in ``store.reports``.
    """
    count = _Count()
    problems: list[str] = []
    skipped: list[str] = []
    for key in sorted(store.keys_by_use()):
        folder = store.folder(key)
        found = [] if names.read_label(folder) else [f"the name of the agent in {folder} cannot be read"]
        try:
            found += _check(store, key, count)
            if repair and found:
                store.label(key)
                with store.borrow(key) as agent:
                    agent.repair()
        except AgentLocked as error:
            skipped.append(str(error))
        problems += found
    totals = (count.agents, count.blocks, count.snapshots, count.nbytes)
    return VerifyReport(*totals, problems, repair and bool(problems), skipped)


def _check(store: Store, key: str, count: _Count) -> list[str]:
    """The problems of one agent, under its lock."""
    folder = store.folder(key)
    label = names.read_label(folder) or Label(key, "")
    agent = store.opened(key)
    if agent is not None:
        with agent.inspecting() as database:
            found = database.problems() or _inspect(folder, label, database, count)
    else:
        lock = AgentLock(folder, label.name, brief=True)
        try:
            closed, found = opening.try_open(folder)
            if closed is not None:
                with contextlib.closing(closed) as database:
                    found = _inspect(folder, label, database, count)
        finally:
            lock.release()
    count.agents += 1
    return [f"agent {label.name!r}: {problem}" for problem in found]


def _inspect(folder: Path, label: Label, database: Database, count: _Count) -> list[str]:
    tree = database.tree
    problems = opening.contradictions(database)
    block_files = BlockFiles(folder, Ledger(folder, None))
    for record in tree.records():
        kind = "block" if isinstance(record, BlockRecord) else "snapshot"
        try:
            block_files.read(record, None)
        except DamagedError as error:
            problems.append(f"{kind} {record.id} is damaged: {error}")
        count.blocks += kind == "block"
        count.snapshots += kind == "snapshot"
        count.nbytes += record.nbytes
    for turn in database.turns():
        lost = [realm for realm in database.realized_in(turn) if database.path_tokens(turn, realm) is None]
        problems += [f"the tokens before turn {turn} are incomplete for {realm.fingerprint}" for realm in lost]
    missing = opening.missing_rows(folder, label, database)
    if missing:
        problems.append(f"its transcript file lacks or contradicts {missing} facts of the database")
    return problems
