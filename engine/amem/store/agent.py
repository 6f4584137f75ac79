"""One agent's state on disk, held under its lock: the turns, their realizations, and the prefix tree of blocks."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from amem.errors import CorruptState, InputError, StoreError
from amem.store import facts, faults, files, forking, names, opening, quota, transcript
from amem.store.blockfiles import BlockFiles
from amem.store.commit import add_realization, history_of
from amem.store.database import Database, check_text
from amem.store.fileformat import Record, as_tokens
from amem.store.held import HeldTurn, HeldTurns
from amem.store.payload import DamagedError
from amem.store.records import (
    BlockRecord,
    Deleted,
    Found,
    NewTurn,
    Realization,
    Realm,
    SnapshotRecord,
    Tensors,
    Tokens,
    TurnRecord,
)
from amem.store.transcript import Row

if TYPE_CHECKING:
    from amem.store.index import Index
    from amem.store.ledger import Ledger
    from amem.store.lock import AgentLock
    from amem.store.names import Label
    from amem.store.store import Store

_TURN_BYTES = 64 * 1024  # what a commit may write to the database beyond its text and tokens


class AgentStore:
    """Thread-safe. Made by Store.open, Store.fork; close it to let another process write to this agent."""

    def __init__(self, store: Store, index: Index, ledger: Ledger, folder: Path, label: Label, lock: AgentLock) -> None:
        self.key = folder.name
        self.name = label.name
        self.space = label.space
        self.root = folder
        self._label = label
        self._store = store
        self._index = index
        self._ledger = ledger
        self._agent_lock = lock
        self._lock = threading.RLock()
        self._files = BlockFiles(folder, ledger)
        self._held = HeldTurns()
        self._in_use: set[str] = set()  # what the last find returned: not evicted before the next find or commit
        with files.explained(f"open agent {self.name!r}", folder):
            self._database = opening.open_database(folder, label, ledger)
        self._closed = False

    def keep_open(self) -> None:
        """Tell others who want to write that they need not wait: what was borrowed for a moment stays open."""
        self._agent_lock.note(brief=False)

    # -- text

    @property
    def meta(self) -> dict[str, str]:
        """Small texts about the agent, such as its ``system`` prompt; see set_meta."""
        with self._reading():
            return self._database.meta()

    def set_meta(self, key: str, value: str | None) -> None:
        """Keep a small text under a key, durably; None removes it."""
        with self._saving("save the agent's settings") as rows:
            self._database.set_meta(key, value)
            rows.append(facts.meta_row(key, value))

    @property
    def head(self) -> int | None:
        """The turn at which the agent stands; None: before its first."""
        with self._reading():
            return self._database.head

    def set_head(self, turn: int | None) -> None:
        """Move the head, durably. Raises UnknownTurn."""
        with self._saving("move the head") as rows:
            if turn is not None:
                self._database.turn(turn)
            self._database.set_state("head", None if turn is None else str(turn))
            rows.append(facts.head_row(turn))

    def turns(self) -> dict[int, TurnRecord]:
        """All turns of all branches, in the order in which they were made."""
        with self._reading():
            return self._database.turns()

    def turn(self, turn: int) -> TurnRecord:
        """Raises UnknownTurn."""
        with self._reading():
            return self._database.turn(turn)

    def children(self, turn: int | None) -> list[int]:
        """The turns that follow a turn, the first made first; of None: the roots."""
        with self._reading():
            return self._database.children(turn)

    def path(self, turn: int) -> list[int]:
        """The turns from the root to ``turn``. Raises UnknownTurn."""
        with self._reading():
            return self._database.path(turn)

    # -- tokens

    def realms(self, turn: int | None = None) -> list[Realm]:
        """The realms that the agent, or one turn of it, has tokens for."""
        with self._reading():
            return self._database.realms() if turn is None else self._database.realized_in(turn)

    def realization(self, turn: int, realm: Realm) -> Realization | None:
        """A turn's tokens and blocks in a realm; None if it was never computed there."""
        with self._reading():
            return self._database.realization(turn, realm)

    def path_tokens(self, turn: int, realm: Realm) -> Tokens | None:
        """The ids of the whole history at a turn's end; None if a turn of its path has none in this realm."""
        with self._reading():
            return self._database.path_tokens(turn, realm)

    def find(
        self, realm: Realm, token_ids: npt.ArrayLike, *, prefer: int | None = None, limit: int | None = None,
        exact: bool = False,
    ) -> Found:  # fmt: skip
        """The longest stored prefix of ``token_ids[:limit]``, in time that grows with its length alone.

        It ends at a group boundary, or at a snapshot whose whole history equals the ids up to there; with ``exact``
        only at a snapshot (for models with recurrent state). Among several blocks of the same tokens those on the path
        of the turn ``prefer`` (the head if None) go first, then the newest.
        """
        ids = as_tokens(token_ids)[: limit if limit is None else max(0, limit)]
        with self._reading():
            number = self._database.realm_id(realm)
            if number is None:
                return Found()
            preferred = self._database.preferred_blocks(self.head if prefer is None else prefer, realm)
            found = self._database.tree.find(number, ids, preferred, exact=exact)
            self._in_use = {block.id for block in found.blocks} | ({found.snapshot.id} if found.snapshot else set())
            return found

    def block(self, name: str | None) -> BlockRecord | None:
        """The stored block of this id, if there is one."""
        with self._reading():
            return self._database.tree.block(name) if name is not None else None

    def snapshot(self, name: str | None) -> SnapshotRecord | None:
        """The stored snapshot of this id, if there is one."""
        with self._reading():
            return self._database.tree.snapshot(name) if name is not None else None

    # -- payload: called on I/O threads

    def write_block(
        self, realm: Realm, parent: str | None, start: int, token_ids: npt.ArrayLike, tensors: Tensors
    ) -> BlockRecord:
        """Write a block's file durably; it counts once commit, realize or keep names it. Raises StoreError."""
        self._check_open()
        return self._files.write_block(realm, parent, start, token_ids, tensors)

    def write_snapshot(self, realm: Realm, position: int, n_open: int, tensors: Tensors) -> SnapshotRecord:
        """Write a snapshot's file durably; it counts once commit or realize names it. Raises StoreFull, StoreError."""
        self._check_open()
        return self._files.write_snapshot(realm, position, n_open, tensors)

    def read(self, record: Record, names: Collection[str] | None = None) -> dict[str, npt.NDArray[Any]]:
        """The tensors of a block or snapshot, each verified; with ``names`` only these are read and verified.

        Raises CorruptState for bytes that are not what was written: the file is set aside, and what depends on it stops
        matching, so that the next find returns the longest good prefix. Raises StoreError for what was evicted.
        """
        with self._verifying(record):
            return self._files.read(record, names)

    def read_into(self, record: Record, targets: Tensors) -> None:
        """Read and verify the tensors that ``targets`` names straight into its arrays, which may be parts of others.

        After an error the arrays hold anything. Raises as `read` does.
        """
        with self._verifying(record):
            self._files.read_into(record, targets)

    @contextlib.contextmanager
    def _verifying(self, record: Record) -> Iterator[None]:
        self._check_open()
        try:
            yield
        except DamagedError as error:
            kind = "block" if isinstance(record, BlockRecord) else "snapshot"
            if not self._set_aside(record.id):
                raise StoreError(f"agent {self.name!r}: {kind} {record.id} was evicted; find again") from error
            message = f"agent {self.name!r}: {kind} {record.id} was set aside, because {error}"
            self._ledger.reports.append(message)
            raise CorruptState(f"{message}; its tokens are computed again, no text is lost") from error

    def _set_aside(self, name: str) -> bool:
        """False if the name is not known any more."""
        with self._lock:
            self._check_open()
            pending = name in self._files.pending
            with files.explained("set a damaged file aside", self.root), self._aside(), self._database.transaction():
                gone = self._database.tree.remove([name])
            if not gone and not pending:
                return False
            with files.explained("set a damaged file aside", self.root):
                self._files.quarantine(name)
                self._files.remove(gone - {name})
            return True

    def discard(self, records: Collection[Record]) -> None:
        """Remove files that were written for a turn that is not committed."""
        with self._lock:
            self._files.remove([record.id for record in records if record.id in self._files.pending])

    # -- commits

    def commit(
        self, turn: NewTurn, realm: Realm, token_ids: npt.ArrayLike, n_tokens: int, *,
        blocks: Sequence[BlockRecord] = (), tail: BlockRecord | None = None, snapshot: SnapshotRecord | None = None,
        last_block: str | None = None,
    ) -> TurnRecord:  # fmt: skip
        """Save a turn, its tokens and its blocks as one transaction, and move the head to it.

        ``token_ids`` are the turn's own, or the whole history's (then ``n_tokens`` equals their count). Blocks are
        those written for this turn, parents first; ``tail`` and ``snapshot`` may also be stored ones. Every block's
        tokens are compared with the history's. Raises InputError for what does not fit together, StoreFull, StoreError.
        """
        check_text(turn)
        ids = as_tokens(token_ids)
        with self._saving("save the turn", _text_bytes(turn) + 8 * len(ids)) as rows:
            history = history_of(self._database, turn.parent, realm, ids, n_tokens)
            saved = self._database.add_turn(turn, time.time())
            rows.append(facts.turn_row(saved))
            value = self._realize(saved.id, realm, ids, history, blocks, tail, snapshot, last_block)
            rows.append(facts.realization_row(value))
            self._database.set_state("head", str(saved.id))
        return saved

    def hold(
        self, turn: NewTurn, realm: Realm, token_ids: npt.ArrayLike, n_tokens: int, *, last_block: str | None
    ) -> TurnRecord:
        """Remember a turn that could not be saved, and move the head to it, as long as this agent is open here.

        It has no blocks of its own: ``last_block`` is the last sealed one of its history that is stored. What is saved
        next saves it, too. See commit for the rest.
        """
        check_text(turn)
        held = HeldTurn(turn, realm, as_tokens(token_ids), n_tokens, last_block, time.time())
        with self._lock, files.explained("remember the turn", self.root):
            with self._aside():
                number = self._held.add(held, self._database)
            return self._database.turn(number)

    @property
    def unsaved_turns(self) -> int:
        """Turns that are remembered and not saved; see hold."""
        return len(self._held.turns)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Without the turns that are held: for transactions of another purpose, and for what is told of the files."""
        self._check_open()
        with self._held.aside(lambda: self._database):
            yield

    def realize(
        self, turn: int, realm: Realm, token_ids: npt.ArrayLike, n_tokens: int, *,
        blocks: Sequence[BlockRecord] = (), tail: BlockRecord | None = None, snapshot: SnapshotRecord | None = None,
        last_block: str | None = None,
    ) -> Realization:  # fmt: skip
        """Save tokens and blocks of a turn that exists as text, for another realm, or its blocks anew. See commit."""
        ids = as_tokens(token_ids)
        with self._saving("save the turn's blocks", 8 * len(ids)) as rows:
            record = self._database.turn(turn)
            known = self._database.realization(turn, realm)
            if known is not None and (known.n_tokens != n_tokens or not np.array_equal(known.token_ids, ids)):
                raise InputError(f"turn {turn} has other tokens already for this model; add a turn on a branch instead")
            history = history_of(self._database, record.parent, realm, ids, n_tokens)
            value = self._realize(turn, realm, ids, history, blocks, tail, snapshot, last_block)
            rows.append(facts.realization_row(value))
        return value

    def _realize(
        self, turn: int, realm: Realm, ids: Tokens, history: Tokens, blocks: Sequence[BlockRecord],
        tail: BlockRecord | None, snapshot: SnapshotRecord | None, last_block: str | None,
    ) -> Realization:  # fmt: skip
        links = (last_block, tail.id if tail else None, snapshot.id if snapshot else None)
        value = Realization(turn, realm, ids, len(history), *links)
        add_realization(self._database, value, history, [*blocks, *([tail] if tail else [])], snapshot)
        return value

    def keep(self, blocks: Sequence[BlockRecord]) -> None:
        """Keep complete blocks of a request that was cancelled, parents first. They belong to no turn, only match."""
        with self._saving("keep blocks"):
            for block in blocks:
                self._database.tree.add_block(block, self._database.add_realm(block.realm))

    @contextlib.contextmanager
    def _saving(self, action: str, nbytes: int = 0) -> Iterator[list[Row]]:
        """One transaction; the rows that are appended to the list go to the transcript before it commits."""
        self._ledger.reserve(nbytes + _TURN_BYTES)  # before the lock: it may evict from this and other agents
        with self._lock, files.explained(action, self.root):
            self._check_open()
            database = self._database
            length, log_nbytes = int(database.get_state("transcript_nbytes") or 0), database.log_nbytes
            rows: list[Row] = []
            try:
                with self._aside():
                    with database.transaction():
                        faults.reach("commit.begun")
                        rows += self._held.add_to(database)
                        yield rows
                        faults.reach("commit.rows")
                        end = transcript.append(self.root, rows, length) if rows else length
                        faults.reach("commit.transcript")
                        database.set_state("transcript_nbytes", str(end))
                    self._held.turns.clear()
            except BaseException:
                with contextlib.suppress(OSError, sqlite3.Error):
                    transcript.cut(self.root, int(database.get_state("transcript_nbytes") or 0))
                raise
            faults.reach("commit.committed")
            self._files.settled([name for name in list(self._files.pending) if database.tree.knows(name)])
            self._ledger.wrote(transcript=end - length, database=max(0, database.log_nbytes - log_nbytes))
            # The turn is saved: what fails from here on must not say otherwise.
            with contextlib.suppress(sqlite3.Error, OSError):
                self._ledger.wrote(database=database.checkpoint())
            with contextlib.suppress(StoreError):
                self._index.touch(self.key, end + database.nbytes, database.n_turns())
            faults.reach("commit.indexed")

    # -- the whole agent

    @property
    def nbytes(self) -> int:
        """Bytes of all the agent's files; those that a fork shares are counted too."""
        return files.folder_bytes(self.root)

    @property
    def n_blocks(self) -> int:
        """Blocks of all branches and realms, tails included."""
        with self._reading():
            return self._database.tree.n_blocks()

    def shared(self, block_id: str) -> bool:
        """Whether an agent forked from this one (or the one it was forked from) has the same file."""
        return self._files.shared(block_id)

    def evictable(self) -> tuple[list[SnapshotRecord], list[BlockRecord]]:
        """What a quota may take, the least useful first; what the last find returned is left out."""
        with self._reading():
            return quota.candidates(self._database, self._in_use)

    def evict(self, records: Collection[Record]) -> int:
        """Forget blocks and snapshots, and what depends on them; returns the bytes that this freed. No text is lost."""
        with self._lock, files.explained("evict", self.root), self._aside():
            with self._database.transaction():
                gone = self._database.tree.remove([record.id for record in records])
            freed = self._files.remove(gone)
            self._ledger.wrote(database=self._database.checkpoint(force=True))
            self._index.resize(self.key, self.nbytes)
            return freed

    @contextlib.contextmanager
    def inspecting(self) -> Iterator[Database]:
        """The database, while nobody else uses it; turns that are not saved are not in it."""
        with self._reading(), self._aside():
            yield self._database

    def repair(self) -> None:
        """Set aside what is damaged, and make database and transcript sound again. ``Store.reports`` names what was."""
        with self._lock, files.explained(f"repair agent {self.name!r}", self.root), self._aside():
            if self._database.problems() or opening.contradictions(self._database):
                self._files.remove(list(self._files.pending))
                self._database.close()
                self._database = opening.open_database(self.root, self._label, self._ledger, thorough=True)
            tree = self._database.tree
            for record in tree.records():
                if tree.knows(record.id):  # it may have depended on one that was set aside a moment ago
                    with contextlib.suppress(CorruptState):
                        self.read(record)
            opening.mend_transcript(self.root, self._label, self._database, self._ledger, check=True)

    def fork_into(self, folder: Path, label: Label, at: int | None) -> None:
        """Fill a new agent's folder with the path of the turn ``at`` (the head if None)."""
        with self._reading():
            forking.fill(folder, label, self._database, self._files, self.head if at is None else at)

    def fork(self, name: str, space: str, at: int | None = None) -> AgentStore:
        """A new agent with the turns up to ``at`` (the head if None), open. Block files are linked, not copied."""
        return self._store.fork(self, name, space, at)

    def move(self, space: str, name: str | None = None) -> None:
        """Give the agent to another space, or another name. Raises InputError: there is an agent of that name already.

        The index comes first: after a kill in between the agent is still listed where it was, and can be moved again.
        """
        label = names.label(self.name if name is None else name, space)
        with self._lock, files.explained(f"move agent {self.name!r}", self.root):
            self._check_open()
            self._index.relabel(self.key, label)
            with self._saving("move the agent") as rows:
                rows.append(facts.label_row(label))
            names.write_label(self.root, label)
            self.name, self.space, self._label = label.name, label.space, label

    def delete(self) -> Deleted:
        """Close the agent and remove all of it."""
        return self._store.delete(self.name, self.space)

    def close(self) -> None:
        """Release the agent for other processes. Files that no commit named are removed. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError):
                self._files.remove(list(self._files.pending))
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._agent_lock.release()
        self._store.closed(self)

    release = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, files.explained(f"read agent {self.name!r}", self.root):
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"agent {self.name!r} was closed; open it again")


def _text_bytes(turn: NewTurn) -> int:
    """The bytes of a turn's text in database and transcript, at most."""
    return 8 * sum(len(text or "") for text in (turn.prompt, turn.reply, turn.system))
