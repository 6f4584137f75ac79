"""A folder of agents: listing, opening, forking, deleting, and its disk quota."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from amem.errors import AgentLocked, InputError, StoreError, StoreFull
from amem.store import facts, files, names, quota, transcript
from amem.store.agent import AgentStore
from amem.store.blockfiles import SUFFIX
from amem.store.database import DATABASE
from amem.store.index import AGENTS, Index, NameTakenError
from amem.store.ledger import Ledger
from amem.store.lock import AgentLock
from amem.store.names import Label
from amem.store.records import AgentEntry, Deleted, Written

_NEW, _GONE = ".new", ".deleted"


class Store:
    """Thread-safe, and shared with other processes. ``reports`` says in plain sentences what had to be repaired."""

    def __init__(self, root: Path, *, disk_quota: int | None = None) -> None:
        """Open or create a store. Raises StoreTooNew, StoreError. ``disk_quota`` is in bytes."""
        self.root = Path(root).expanduser()
        with files.explained("create the store", self.root):
            files.make_folder(self.root)
            files.make_folder(self.root / AGENTS)
        self._ledger = Ledger(self.root, disk_quota)
        self._ledger.make_room = self.enforce_quota
        self._open: dict[str, AgentStore] = {}
        self._lock = threading.RLock()
        self._quota_lock = threading.Lock()
        self._index = Index(self.root, self._ledger.reports)
        self._sweep()

    # -- numbers

    @property
    def reports(self) -> list[str]:
        """What was repaired or lost, in plain sentences, the oldest first."""
        return self._ledger.reports

    @property
    def written(self) -> Written:
        """Bytes that this object wrote, by kind."""
        return self._ledger.written

    @property
    def bytes_written(self) -> int:
        """All bytes that this object wrote (the wear of an SSD)."""
        return self._ledger.written.total

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files of the store; one that forks share counts once."""
        return self._ledger.disk_bytes()

    @property
    def disk_quota(self) -> int | None:
        """Bytes; None: unlimited."""
        return self._ledger.quota

    # -- agents

    def agents(self, space: str | None = None) -> list[AgentEntry]:
        """All agents, or those of a space, the most recently used first. Needs no agent's lock."""
        entries, space = [], space if space is None else names.canonical(space)
        for row in reversed(self._index.rows()):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                label = self.label(row.key)
                if space in (None, label.space):
                    entries.append(AgentEntry(row.key, label.name, label.space, row.last_used, row.nbytes, row.n_turns))
        return entries

    def folder(self, key: str) -> Path:
        """The folder of the agent with a key."""
        return self.root / AGENTS / key

    def open(self, name: str, space: str = "", *, create: bool = True) -> AgentStore:
        """Open an agent as its only writer. Raises AgentLocked, InputError (no such agent, or no valid name)."""
        label = names.label(name, space)
        for _ in range(3):  # another process may create or delete it meanwhile
            key = self._index.lookup(label.digest)
            if key is not None:
                agent = self._attach(key, label)
                if agent is not None:
                    self._index.touch(key, agent.nbytes, len(agent.turns()))
                    return agent
                self._index.remove(key, lambda: None)
            elif not create:
                raise InputError(f"there is no agent {name!r} here; {self._known(name, space)}")
            else:
                with contextlib.suppress(NameTakenError):
                    return self.create(label, lambda folder: _fill_empty(folder, label))
        raise StoreError(f"agent {name!r} is being created or deleted by another process; try again")

    def has(self, name: str, space: str = "") -> bool:
        """Whether there is an agent of this name. Raises InputError: no agent can have it."""
        return self._index.lookup(names.label(name, space).digest) is not None

    def create(self, label: Label, fill: Callable[[Path], None]) -> AgentStore:
        """A new agent, whole or not at all: ``fill`` writes transcript, files and database. Raises NameTakenError."""
        self._ledger.reserve(64 * 1024)
        with files.explained(f"create agent {label.name!r}", self.root):
            key, folder, lock = self._new_folder(label)
            try:
                names.write_label(folder, label)
                fill(folder)
                n_turns = sum(row["kind"] == "turn" for row in transcript.read(folder)[0])
                nbytes = files.folder_bytes(folder)
                made = {name: (folder / name).stat().st_size for name in (transcript.TRANSCRIPT, DATABASE)}
                self._ledger.wrote(transcript=made[transcript.TRANSCRIPT], database=made[DATABASE])
                self._index.add(key, label, nbytes, n_turns, lambda: _move(folder, self.folder(key)))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                lock.release()
                raise
        return self._own(key, label, lock)

    def _new_folder(self, label: Label) -> tuple[str, Path, AgentLock]:
        """A key, and a folder that is locked and not an agent's yet."""
        while True:
            key = uuid.uuid4().hex
            folder = self.folder(key + _NEW)
            files.make_folder(folder)
            with contextlib.suppress(FileNotFoundError, AgentLocked):  # taken for what a kill left, and swept
                return key, folder, AgentLock(folder, label.name)

    def fork(self, source: AgentStore, name: str, space: str, at: int | None = None) -> AgentStore:
        """See AgentStore.fork. Raises InputError if there is an agent of that name, UnknownTurn."""
        label = names.label(name, space)
        return self.create(label, lambda folder: source.fork_into(folder, label, at))

    def check_free(self, name: str, space: str = "") -> None:
        """Raise AgentLocked if an agent is open elsewhere. One that is not there, or cannot be, is free."""
        with contextlib.suppress(InputError, FileNotFoundError):
            key = self._index.lookup(names.label(name, space).digest)
            if key is not None and self.opened(key) is None:
                AgentLock(self.folder(key), name, brief=True).release()

    def delete(self, name: str, space: str = "") -> Deleted:
        """Remove an agent with all its text, tokens and files. Raises AgentLocked if another process has it open."""
        label = names.label(name, space)
        key = self._index.lookup(label.digest)
        if key is None:
            raise InputError(f"there is no agent {name!r} here; {self._known(name, space)}")
        agent = self.opened(key)
        if agent is not None:
            agent.close()
        folder, gone = self.folder(key), self.folder(key + _GONE)
        with files.explained(f"delete agent {name!r}", self.root):
            lock = AgentLock(folder, name)
            try:
                nbytes = files.folder_bytes(folder)
                n_shared = sum(path.stat().st_nlink > 1 for path in folder.glob("*" + SUFFIX))
                try:
                    self._index.remove(key, lambda: _move(folder, gone))
                except StoreFull:  # the index cannot be written before the agent has made room
                    if folder.exists():
                        _move(folder, gone)
                    shutil.rmtree(gone)
                    self._index.remove(key, lambda: None)
                else:
                    shutil.rmtree(gone)
                files.sync_folder(gone.parent)
            finally:
                lock.release()
        return Deleted(nbytes, n_shared)

    def enforce_quota(self, nbytes: int = 0) -> int:
        """Evict until ``nbytes`` more fit into the quota; returns the bytes freed. Without a quota nothing is evicted.

        Snapshots go first, then the least useful blocks; text never. See quota.enforce.
        """
        limit = self._ledger.quota
        if limit is None:
            return 0
        with self._quota_lock:
            return quota.enforce(self, limit - nbytes)

    def record_transition(self, space: str, from_key: str, to_key: str) -> None:
        """Note that the agent with one key was asked after the agent with another, in a space. No text is kept."""
        self._index.record_transition(names.space_key(space), from_key, to_key)

    def likely_next(self, space: str, from_key: str, limit: int) -> list[str]:
        """The keys of at most ``limit`` agents that usually follow an agent in a space, the likeliest first.

        Empty where nothing was recorded, and after a lost index was rebuilt.
        """
        return self._index.likely_next(names.space_key(space), from_key, limit)

    def close(self) -> None:
        """Close all agents that are open here. May be called twice."""
        with self._lock:
            agents = list(self._open.values())
        for agent in agents:
            agent.close()
        self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- for the other files of this room

    def closed(self, agent: AgentStore) -> None:
        """An agent tells that it was closed."""
        with self._lock:
            if self._open.get(agent.key) is agent:
                del self._open[agent.key]

    def label(self, key: str) -> Label:
        """An agent's label, which is restored if it is damaged. Raises FileNotFoundError."""
        return self._index.label_of(self.folder(key))

    def opened(self, key: str) -> AgentStore | None:
        """The agent with a key, if it is open here."""
        with self._lock:
            return self._open.get(key)

    def reserve(self, nbytes: int) -> None:
        """Make sure that the quota leaves room. Raises StoreFull."""
        self._ledger.reserve(nbytes)

    def count(self, nbytes: int) -> None:
        """Count payload bytes that were written."""
        self._ledger.wrote(payload=nbytes)

    def open_keys(self) -> set[str]:
        """The agents that are open here."""
        with self._lock:
            return set(self._open)

    def keys_by_use(self) -> list[str]:
        """The least recently used first."""
        return [row.key for row in self._index.rows()]

    @contextlib.contextmanager
    def borrow(self, key: str) -> Iterator[AgentStore]:
        """An agent for a moment: the one that is open here, or opened and closed again. Raises AgentLocked."""
        agent = self.opened(key)
        if agent is not None:
            yield agent
            return
        with self.open_briefly(key) as agent:
            yield agent

    def open_briefly(self, key: str) -> AgentStore:
        """An agent that is not open here, for a moment: others wait until it is closed again. Raises AgentLocked."""
        agent = self._attach(key, self.label(key), brief=True)
        if agent is None:
            raise AgentLocked("the agent is being deleted")
        return agent

    def _attach(self, key: str, label: Label, *, brief: bool = False) -> AgentStore | None:
        """Open an agent's folder; None if there is none."""
        with files.explained(f"open agent {label.name!r}", self.root):
            try:
                lock = AgentLock(self.folder(key), label.name, brief=brief)
            except FileNotFoundError:
                return None
        return self._own(key, label, lock)

    def _own(self, key: str, label: Label, lock: AgentLock) -> AgentStore:
        try:
            agent = AgentStore(self, self._index, self._ledger, self.folder(key), label, lock)
        except BaseException:
            lock.release()
            raise
        with self._lock:
            self._open[key] = agent
        return agent

    def _known(self, name: str, space: str) -> str:
        known = [entry.name for entry in self.agents(space)]
        close = difflib.get_close_matches(name, known, n=1)
        if close:
            return f"did you mean {close[0]!r}?"
        return f"there are {', '.join(map(repr, known[:8]))}" if known else "there are none yet"

    def _sweep(self) -> None:
        """Remove folders of agents that were not created or not deleted to the end."""
        for entry in list(os.scandir(self.root / AGENTS)):
            if entry.name.endswith((_NEW, _GONE)):
                with contextlib.suppress(OSError, AgentLocked):
                    lock = AgentLock(Path(entry.path), entry.name)
                    shutil.rmtree(entry.path, ignore_errors=True)
                    lock.release()


def _fill_empty(folder: Path, label: Label) -> None:
    rows = [facts.label_row(label)]
    facts.build(folder, rows, [], transcript.write_whole(folder, rows))


def _move(source: Path, target: Path) -> None:
    source.rename(target)
    files.sync_folder(target.parent)
