"""Stored state on its way into memory: first its room in the budget, then its bytes on an I/O thread, then arrays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from amem.errors import CorruptState
from amem.kv.pool import Allocation
from amem.kv.sequence import SequenceState
from amem.store.records import Found

if TYPE_CHECKING:
    from amem.session import AgentSession, Stored


class Restore:
    """Brings a stored prefix into a new sequence. Everything but the reading belongs to the owner thread.

    ``found`` is that prefix; ``find_again`` is asked for a shorter one after a damaged block was set aside.
    """

    def __init__(self, session: AgentSession, found: Found, find_again: Callable[[], Found]) -> None:
        self.found = found
        self.notes: list[str] = []  #: damage that was met
        self.reading: Future[None] | None = None
        self.read_s = 0.0  #: seconds on an I/O thread
        self.load_s = 0.0  #: seconds on the owner thread
        self._session = session
        self._find_again = find_again
        self._stored: Stored | None = None
        self._room: Allocation | None = None
        self._staging_nbytes = sum(block.nbytes for block in found.blocks)
        self._staging_nbytes += found.snapshot.nbytes if found.snapshot else 0
        self._abandoned = threading.Event()

    @property
    def nbytes(self) -> int:
        """Bytes of the budget that it holds."""
        return self._room.nbytes if self._room is not None else 0

    def room_nbytes(self, n_tokens: int) -> int:
        """Room for a turn up to this many tokens, and before it for the bytes that were read beside the arrays."""
        parts = self._session.parts
        return max(parts.sequence_nbytes(n_tokens), self._staging_nbytes + parts.loaded_nbytes(self.found.n_tokens))

    def start(self, n_tokens: int) -> bool:
        """Take that room, evicting other agents, and begin to read. May be called again, for more tokens.

        False if there is no room now.
        """
        parts = self._session.parts
        nbytes = self.room_nbytes(n_tokens)
        if not parts.make_room(nbytes - self.nbytes, keep=self._session):
            return False
        self._give_back_room()
        self._room = parts.pool.allocate(nbytes)
        if self.reading is None:
            self.reading = parts.readers.submit(self._read) if self.found.n_tokens else _done()
        return True

    def load(self) -> SequenceState:
        """The sequence, when ``reading`` is done; the room that it does not take is given back.

        Raises
        ------
            AmemError: the bytes could not be read.
        """
        assert self.reading is not None
        started = time.perf_counter()
        try:
            self.reading.result()
            self._give_back_room()  # nothing else can take it before the sequence does
            self._room = self._session.parts.pool.allocate(self._staging_nbytes)
            sequence = SequenceState(self._session.parts.layout, self._session.parts.pool)
            if self._stored is not None:
                try:
                    self._session.load(sequence, self.found, self._stored)
                except BaseException:
                    sequence.release()
                    raise
        finally:
            self.abandon()
            self.load_s = time.perf_counter() - started
        return sequence

    def abandon(self) -> None:
        """Give all room back. A read that is under way ends with its block, and is waited for."""
        self._abandoned.set()
        if self.reading is not None and not self.reading.cancel():
            self.reading.exception()
        self._stored = None
        self._give_back_room()

    def _give_back_room(self) -> None:
        if self._room is not None:
            self._room.release()
            self._room = None

    def _read(self) -> None:
        started = time.perf_counter()
        while self.found.n_tokens:
            try:
                self._stored = self._session.read(self.found, self._abandoned.is_set)
                break
            except CorruptState as error:
                self.notes.append(str(error))
                self.found = self._find_again()
        self.read_s = time.perf_counter() - started


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
