"""One agent as the owner thread sees it: its stored tree, its head, and its state in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from amem.errors import InputError
from amem.kv.sequence import SequenceState
from amem.parts import EngineParts
from amem.restoring import Restore
from amem.results import AgentStatus, Residency
from amem.store import AgentStore
from amem.store.records import Found, Realization, Tokens
from amem.turntree import TurnTree


class AgentSession:
    """The state of one agent. It belongs to the owner thread."""

    def __init__(self, parts: EngineParts, store: AgentStore) -> None:
        self.parts = parts
        self.store = store
        self.tree = TurnTree(parts, store)
        self.hot: SequenceState | None = None
        self.hot_turn: int | None = None  #: the turn at whose end the state in memory stands
        self.incoming: Restore | None = None  #: state that is being restored for no request yet
        self.incoming_turn: int | None = None
        self.last_used = 0
        self.pinned = False
        self.saved = True
        self.last_ttft_ms: float | None = None
        self.last_explained: str | None = None  #: `ReplyMetrics.explain` of this engine's last request to it
        self.notes: list[str] = []  #: what opening it had to repair; told with the next reply
        self.new_from = 0  #: position from which the last turn computed
        self.unmake: Callable[[], None] | None = None  #: of one that a request made: deletes it if nothing came of it

    @property
    def name(self) -> str:
        return self.store.name

    @property
    def is_running(self) -> bool:
        """Whether a request works on the state in memory."""
        return self.parts.scheduler.is_running(self)

    @property
    def is_asked(self) -> bool:
        """Whether a request to it waits or runs."""
        return self.parts.scheduler.is_asked(self)

    # -- the head ------------------------------------------------------------------------------------------------

    def find(self, token_ids: Sequence[int], prefer: int | None) -> Found:
        """The longest stored prefix that leaves at least the last token to compute."""
        ids = np.asarray(token_ids, dtype=np.int32)
        exact = bool(self.parts.layout.spec.recurrent)
        return self.store.find(self.parts.realm, ids, prefer=prefer, limit=len(ids) - 1, exact=exact)

    def checkout(self, turn: int | None) -> None:
        """Move the head to a turn, or (None) to before the first one."""
        self.store.set_head(turn)
        if self.hot_turn != turn:
            self.evict()

    def begin_with(self, system: str) -> None:
        """Set the system text with which the first turn will start.

        Raises
        ------
            InputError: the conversation has begun with another one.
        """
        if self.tree.head_path():
            if system != (self.tree.system or ""):
                raise InputError(
                    f"agent {self.name!r} already has another system text: give the new text to an agent of another "
                    "name, or rewind this one to its start first."
                )
        else:
            self.store.set_meta("system", system)
            self.unmake = None

    def why(self) -> str:
        """What the last request found, and why not more; before the first one what the next will find."""
        if self.last_explained is not None:
            return self.last_explained
        known, residency = self.head_realization(), self.residency
        if residency is Residency.EMPTY:
            return "It has no turn to go on from: its next request computes all of its prompt."
        if known is None:
            return f"It is {residency}: its past has no state for this model and codec, and is computed once."
        ids = self.store.path_tokens(known.turn, self.parts.realm)
        n_stored = self.find([*(ids if ids is not None else ()), 0], prefer=known.turn).n_tokens
        return (
            f"No request was made to it since the engine was opened. It is {residency}: of its {known.n_tokens} tokens "
            f"{n_stored} can be reused by a request that only adds a message."
        )

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def hot_bytes(self) -> int:
        coming = self.incoming.nbytes if self.incoming is not None else 0
        return coming + (self.hot.nbytes if self.hot is not None else 0)

    def evict(self) -> None:
        """Let go of the state in memory; it is on disk."""
        if self.incoming is not None:
            self.incoming.abandon()
            self.incoming = None
        if self.hot is not None:
            self.hot.release()
        self.hot, self.hot_turn = None, None

    def pin(self, pinned: bool) -> None:
        """Whether the state stays in memory, whoever else needs room."""
        self.pinned = pinned

    def adopt(self, sequence: SequenceState, turn: int) -> None:
        """Keep a sequence as this agent's state at a turn's end."""
        if self.hot is not None and self.hot is not sequence:
            self.hot.release()
        self.hot, self.hot_turn = sequence, turn

    def begin_restore(self, spared: Collection[AgentSession] = ()) -> Restore | None:
        """Begin to read the head's state; `finish_restore` ends it. None if there is nothing to restore.

        Other agents make room for it, but those that are ``spared``.

        Raises
        ------
            MemoryBudgetError: there is no room for it.
        """
        if self.incoming is not None:
            return self.incoming
        head = self.store.head
        ids = self.store.path_tokens(head, self.parts.realm) if head is not None and self.hot_turn != head else None
        if ids is None:
            return None
        exact = bool(self.parts.layout.spec.recurrent)
        found = self.store.find(self.parts.realm, ids, prefer=head, exact=exact)
        if found.n_tokens < len(ids):
            return None  # a part is of no use before the next request, which restores it itself
        restore = Restore(self, found, find_again=Found)
        if not restore.start(spared=spared):
            raise self.parts.no_room(restore.room_nbytes(), self)
        self.incoming, self.incoming_turn = restore, head
        self.last_used = self.parts.tick()
        return restore

    def finish_restore(self, restore: Restore) -> None:
        """Adopt what was read, unless a request took it over, it was evicted, or the head has moved.

        Raises
        ------
            AmemError: it could not be read.
        """
        if self.incoming is not restore:
            return
        turn, self.incoming = self.incoming_turn, None
        sequence = restore.load()
        self.notes += restore.notes
        if turn is not None and turn == self.store.head and sequence.n_tokens:
            self.adopt(sequence, turn)
        else:
            sequence.release()

    def take_incoming(self, turn: int | None, n_tokens: int, find_again: Callable[[], Found]) -> Restore | None:
        """A restore that is under way and ends at a turn with at least this many tokens; any other is given up.

        ``find_again`` is what whoever takes it over wants, if it meets damage.
        """
        restore, self.incoming = self.incoming, None
        if restore is None:
            return None
        if self.incoming_turn == turn and restore.found.n_tokens >= n_tokens:
            restore.find_again = find_again
            return restore
        restore.abandon()
        return None

    def fork(self, store: AgentStore, at: int | None) -> AgentSession:
        """The session of a stored fork; it shares the state in memory where that stands at the same turn."""
        twin = AgentSession(self.parts, store)
        twin.tree.forget_lost_snapshots()
        stands_there = at is not None and self.hot_turn == at and not self.is_running
        # without room it is warm, and restored when it is asked
        if self.hot is not None and stands_there and self.parts.make_room(self.parts.layout.open_nbytes, keep=self):
            twin.hot, twin.hot_turn = self.hot.fork(), at
        return twin

    # -- what people see -------------------------------------------------------------------------------------------

    @property
    def residency(self) -> Residency:
        if self.store.head is None:
            return Residency.EMPTY
        if self.hot is not None and self.hot_turn == self.store.head:
            return Residency.HOT
        known = self.head_realization()
        return Residency.WARM if known and (known.last_block or known.tail or known.snapshot) else Residency.COLD

    def head_realization(self) -> Realization | None:
        """The head's tokens and blocks for this model; None if there are none."""
        head = self.store.head
        return self.store.realization(head, self.parts.realm) if head is not None else None

    def status(self) -> AgentStatus:
        known = self.head_realization()
        return AgentStatus(
            self.name,
            self.store.space,
            self.residency,
            known.n_tokens if known else 0,
            len(self.tree.head_path()),
            self.hot_bytes,
            self.store.nbytes,
            self.last_ttft_ms,
            self.pinned,
            self.saved,
        )

    def head_tokens(self) -> Tokens:
        """Ids of the whole history at the head."""
        head = self.store.head
        ids = self.store.path_tokens(head, self.parts.realm) if head is not None else None
        return ids if ids is not None else np.zeros(0, np.int32)
