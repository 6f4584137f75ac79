"""Stored state on its way into memory: first its room in the budget, then its bytes, read in place by I/O threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING

from amem.errors import CorruptState
from amem.kv.codec import GROUP
from amem.kv.pool import Allocation
from amem.kv.restore import RestoreBuffers
from amem.kv.sequence import Buffers, SequenceState
from amem.store.records import BLOCK_TOKENS, Found

if TYPE_CHECKING:
    from amem.session import AgentSession


class Restore:
    """Brings a stored prefix into a new sequence. Everything but the reading belongs to the owner thread.

    ``found`` is that prefix; ``find_again`` is asked for a shorter one after a damaged block was set aside.
    """

    def __init__(self, session: AgentSession, found: Found, find_again: Callable[[], Found]) -> None:
        self.found = found
        self.notes: list[str] = []  #: damage that was met
        self.reading: Future[None] | None = None
        self.read_s = 0.0  #: seconds until all bytes were in
        self.load_s = 0.0  #: seconds on the owner thread
        self._session = session
        self.find_again = find_again
        self._buffers: RestoreBuffers | None = None
        self._snapshot: Buffers = {}
        self._jobs: list[Future[None]] = []
        self._room: Allocation | None = None
        # Blocks are read in place, but for one that the prefix ends in.
        self._staging_nbytes = found.snapshot.nbytes if found.snapshot else 0
        if found.n_tokens // GROUP * GROUP < sum(len(block.token_ids) for block in found.blocks):
            self._staging_nbytes += found.blocks[-1].nbytes
        self._abandoned = threading.Event()

    @property
    def nbytes(self) -> int:
        """Bytes of the budget that it holds."""
        return self._room.nbytes if self._room is not None else 0

    def room_nbytes(self, n_tokens: int = 0) -> int:
        """Room for the arrays and, beside them, the bytes that were read; then for a turn up to this many tokens."""
        parts = self._session.parts
        turn = parts.sequence_nbytes(n_tokens) if n_tokens else 0
        return max(turn, self._staging_nbytes + parts.loaded_nbytes(self.found.n_tokens))

    def start(self, n_tokens: int = 0, spared: Collection[AgentSession] = ()) -> bool:
        """Take that room, evicting other agents but those that are ``spared``, and begin to read.

        False if there is no room now. May be called again, for a turn.
        """
        parts = self._session.parts
        nbytes = self.room_nbytes(n_tokens)
        if not parts.make_room(nbytes - self.nbytes, keep=self._session, spared=spared):
            return False
        self._give_back_room()
        self._room = parts.pool.allocate(nbytes)
        if self.reading is None:
            self.reading = self._begin()
        return True

    def _begin(self) -> Future[None]:
        """Queue a read of each block; done when the last one has ended, well or not."""
        self._buffers = RestoreBuffers(self._session.parts.layout, self.found.n_tokens)
        self._snapshot = {}
        submit = self._session.parts.readers.submit
        self._jobs = [submit(self._read_block, self._buffers, index) for index in range(self._buffers.n_blocks)]
        if self.found.snapshot is not None:
            self._jobs.append(submit(self._read_snapshot))
        started = time.perf_counter()

        def note_time(_: Future[None]) -> None:
            self.read_s = time.perf_counter() - started

        done = _all_ended(self._jobs)
        done.add_done_callback(note_time)
        return done

    def _read_block(self, buffers: RestoreBuffers, index: int) -> None:
        if self._abandoned.is_set():
            return
        store, block = self._session.store, self.found.blocks[index]
        targets = buffers.block(index)
        n_wanted = min(BLOCK_TOKENS, (buffers.n_groups * GROUP) - block.start)
        if n_wanted == len(block.token_ids):
            store.read_into(block, targets)
        else:
            buffers.put(index, store.read(block, list(targets)))

    def _read_snapshot(self) -> None:
        if self.found.snapshot is not None and not self._abandoned.is_set():
            self._snapshot = self._session.store.read(self.found.snapshot)

    def load(self) -> SequenceState:
        """The sequence, when ``reading`` is done; the room that it does not take is given back.

        Raises
        ------
            AmemError: the bytes could not be read.
        """
        assert self.reading is not None
        started = time.perf_counter()
        try:
            self._read_again_what_was_damaged()
            self._give_back_room()  # nothing else can take it before the sequence does
            self._room = self._session.parts.pool.allocate(self._staging_nbytes)
            sequence = SequenceState(self._session.parts.layout, self._session.parts.pool)
            if self._buffers is not None and self.found.n_tokens:
                try:
                    sequence.adopt(self._buffers, self._snapshot)
                except BaseException:
                    sequence.release()
                    raise
        finally:
            self.abandon()
            self.load_s = time.perf_counter() - started
        return sequence

    def _read_again_what_was_damaged(self) -> None:
        """Wait for the reads; a damaged block was set aside by the store, and what is left is found and read again."""
        while True:
            errors = [error for job in self._jobs if (error := job.exception()) is not None]
            damage = [error for error in errors if isinstance(error, CorruptState)]
            if errors and not damage:
                raise errors[0]
            if not damage:
                return
            self.notes += map(str, damage)  # other errors are of blocks that depended on these
            self.found = self.find_again()
            self._begin()

    def abandon(self) -> None:
        """Give all room back. Reads that are under way end with their block, and are waited for."""
        self._abandoned.set()
        for job in self._jobs:
            if not job.cancel():
                job.exception()
        self._buffers, self._snapshot, self._jobs = None, {}, []
        self._give_back_room()

    def _give_back_room(self) -> None:
        if self._room is not None:
            self._room.release()
            self._room = None


def _all_ended(jobs: list[Future[None]]) -> Future[None]:
    """Done, without a result, when every job has ended, was cancelled or has failed."""
    done: Future[None] = Future()
    left = len(jobs)
    lock = threading.Lock()

    def one_ended(_: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            done.set_result(None)

    for job in jobs:
        job.add_done_callback(one_ended)
    if not jobs:
        done.set_result(None)
    return done
