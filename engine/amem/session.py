"""One agent as the owner thread sees it: its stored tree, its head, and its state in memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from amem.errors import InputError, UnknownTurn
from amem.kv.sequence import SequenceState
from amem.parts import EngineParts
from amem.restoring import Restore
from amem.results import AgentStatus, Residency, TurnInfo
from amem.store import AgentStore
from amem.store.records import Found, Realization, Tokens, TurnRecord
from amem.wish import RAW, messages_of

if TYPE_CHECKING:
    from amem.wish import Place

_NAMED = "snapshot:"  # before a named snapshot's name, among the agent's small texts


@dataclass(frozen=True)
class History:
    """Where a turn starts: its parent, and the tokens of everything before it."""

    parent: int | None
    token_ids: list[int]
    rendered: tuple[tuple[int, list[int]], ...] = ()  #: (turn, its ids) of turns that had none for this model
    left: tuple[int, ...] = ()  #: turns of the old path that this one leaves on another branch


class AgentSession:
    """The state of one agent. It belongs to the owner thread."""

    def __init__(self, parts: EngineParts, store: AgentStore) -> None:
        self.parts = parts
        self.store = store
        self.hot: SequenceState | None = None
        self.hot_turn: int | None = None  #: the turn at whose end the state in memory stands
        self.incoming: Restore | None = None  #: state that is being restored for no request yet
        self.incoming_turn: int | None = None
        self.last_used = 0
        self.pinned = False
        self.saved = True
        self.last_ttft_ms: float | None = None
        self.last_explained: str | None = None  #: `ReplyMetrics.explain` of this engine's last request to it
        self.executions: dict[int, str | None] = {}  #: of turns that this engine made, or found unchanged
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

    # -- the tree ------------------------------------------------------------------------------------------------

    @property
    def system(self) -> str | None:
        """The system text of the head's path, or the one that the first turn will have."""
        path = self._head_path()
        if path:
            return self.store.turns()[path[0]].system
        if (text := self.store.meta.get("system")) is not None:
            return text
        roots = self.store.children(None)  # rewound to its start, it still has the text that it began with
        return self.store.turns()[roots[-1]].system if roots else None

    def _head_path(self) -> list[int]:
        return self.store.path(self.store.head) if self.store.head is not None else []

    def parent_for(self, cell_id: str | None, execution: str | None, append: bool) -> tuple[int | None, list[int]]:
        """Where a new turn starts, by the rule on cells, and the turns that it leaves behind.

        A cell that runs again starts where its last execution started, if that lies on the head's path. A second ask
        within one execution goes on from the head.
        """
        path = self._head_path()
        head = path[-1] if path else None
        if append or cell_id is None:
            return head, []
        turns = self.store.turns()
        mine = [turn for turn in path if turns[turn].cell_id == cell_id]
        executions = {turn: self.executions.get(turn, turns[turn].execution) for turn in mine}
        if not mine or (execution is not None and executions[mine[-1]] == execution):
            return head, []
        first = next(turn for turn in mine if executions[turn] == executions[mine[-1]])
        return turns[first].parent, path[path.index(first) :]

    def history(self, parent: int | None, left: Sequence[int]) -> History:
        """The tokens up to a turn's end; turns without a realization for this model are rendered from their text."""
        if parent is None:
            return History(None, [], (), tuple(left))
        ids = self.store.path_tokens(parent, self.parts.realm)
        if ids is not None:
            return History(parent, ids.tolist(), (), tuple(left))
        turns = self.store.turns()
        token_ids: list[int] = []
        rendered: list[tuple[int, list[int]]] = []
        for turn in self.store.path(parent):
            known = self.store.realization(turn, self.parts.realm)
            own = known.token_ids.tolist() if known else self._ids_again(turns[turn], token_ids)
            if not known:
                rendered.append((turn, own))
            token_ids.extend(own)
        return History(parent, token_ids, tuple(rendered), tuple(left))

    def _ids_again(self, turn: TurnRecord, before: Sequence[int]) -> list[int]:
        """A turn's ids: as they were generated if only the codec is another, else rendered from its text."""
        for realm in self.store.realms(turn.id):
            known = self.store.realization(turn.id, realm)
            if known is not None and realm.fingerprint == self.parts.realm.fingerprint:
                return [int(token) for token in known.token_ids]
        return self._render(turn, before)

    def _render(self, turn: TurnRecord, before: Sequence[int]) -> list[int]:
        reply = self.parts.prompter.reply(turn.reply, ended=turn.finish_reason == "stop")
        return [*self.prompt_ids(turn, before), *reply]

    def prompt_ids(self, turn: TurnRecord, before: Sequence[int]) -> list[int]:
        """A turn's prompt as this model's template renders it after the tokens before it."""
        if turn.settings.get(RAW):
            return self.parts.prompter.raw(turn.prompt)
        prompter, messages, tools = self.parts.prompter, messages_of(turn), turn.settings.get("tools", ())
        if turn.parent is None:
            return prompter.history(messages, tools)
        return prompter.following(messages, last_id=before[-1] if before else None, tools=tools)

    def n_opening(self, root: int) -> int:
        """Tokens that a first turn's system text and tools take, with what the template puts around them."""
        turn, prompter = self.store.turns()[root], self.parts.prompter
        message = [{"role": "user", "content": "?"}]
        system = [{"role": "system", "content": turn.system}] if turn.system is not None else []
        return len(prompter.history([*system, *message], turn.settings.get("tools", ())))

    def leaves(self, below: int | None) -> list[int]:
        """The turns that no turn follows, of those that follow ``below``; of None: of all. The newest last."""
        turns = self.store.turns()
        inside: set[int] = set()
        for number, turn in turns.items():  # parents come before their children
            if turn.parent == below or turn.parent in inside:
                inside.add(number)
        return sorted(inside - {turn.parent for turn in turns.values()})

    def find(self, token_ids: Sequence[int], prefer: int | None) -> Found:
        """The longest stored prefix that leaves at least the last token to compute."""
        ids = np.asarray(token_ids, dtype=np.int32)
        exact = bool(self.parts.layout.spec.recurrent)
        return self.store.find(self.parts.realm, ids, prefer=prefer, limit=len(ids) - 1, exact=exact)

    def repeats(self, place: Place) -> bool:
        """Whether a turn with this prompt was computed before at this place.

        A prompt by the template ends with what begins a reply; a bare text may be the beginning of a longer one.
        """
        bare, turns = bool(place.recorded.get(RAW)), self.store.turns()
        for number in self.store.children(place.history.parent):
            turn, known = turns[number], self.store.realization(number, self.parts.realm)
            if bool(turn.settings.get(RAW)) != bare or (bare and turn.prompt != place.prompt):
                continue
            if known is not None and known.token_ids[: len(place.delta)].tolist() == place.delta:
                return True
        return False

    def turn_infos(self, only_path: bool) -> list[TurnInfo]:
        """Turns in the order in which they were made."""
        path = set(self._head_path())
        infos = []
        for turn in self.store.turns().values():
            if only_path and turn.id not in path:
                continue
            known = self.store.realization(turn.id, self.parts.realm)
            infos.append(
                TurnInfo(
                    turn.id,
                    turn.parent,
                    turn.prompt,
                    turn.reply,
                    turn.finish_reason,
                    turn.created,
                    turn.cell_id,
                    turn.id in path,
                    known.n_tokens if known else 0,
                )
            )
        return infos

    def turn_of(self, place: int | str) -> int:
        """The turn of a number, or of a named snapshot.

        Raises
        ------
            UnknownTurn: there is none.
        """
        if isinstance(place, str):
            named = self.snapshots()
            if place not in named:
                known = f"its snapshots are {', '.join(named)}" if named else "it has no named snapshots"
                raise UnknownTurn(f"agent {self.name!r} has no snapshot {place!r}: {known}.")
            return named[place]
        turn = _whole_number(place)
        if turn is None or turn not in self.store.turns():
            raise UnknownTurn(f"agent {self.name!r} has no turn {place!r}: agent.tree() lists its turns.")
        return turn

    def checkout(self, place: int | str | None) -> None:
        """Move the head to a turn, a named snapshot, or (None) to before the first turn.

        Raises
        ------
            UnknownTurn: there is no such turn.
        """
        turn = self.turn_of(place) if place is not None else None
        self.store.set_head(turn)
        if self.hot_turn != turn:
            self.evict()

    def rewind(self, turns: int, to: int | str | None) -> None:
        """Move the head back by some turns, or to a turn or named snapshot on its path.

        Raises
        ------
            InputError: the head's path is shorter than that.
            UnknownTurn: there is no such turn on it.
        """
        path = self._head_path()
        if to is not None:
            turn = self.turn_of(to)
            if turn not in path:
                raise UnknownTurn(
                    f"agent {self.name!r} did not come by turn {turn}, so it cannot rewind to it: use checkout."
                )
            self.checkout(turn)
            return
        n = _whole_number(turns)
        if n is None or not 1 <= n <= len(path):
            raise InputError(f"agent {self.name!r} has {len(path)} turns to rewind, so {turns!r} is not possible.")
        self.checkout(path[-n - 1] if n < len(path) else None)

    def snapshots(self) -> dict[str, int]:
        """Names that were given to turns, with their turns. A fork has those of the turns that it took over."""
        turns = self.store.turns()
        named = {
            key.removeprefix(_NAMED): int(value) for key, value in self.store.meta.items() if key.startswith(_NAMED)
        }
        return {name: turn for name, turn in named.items() if turn in turns}

    def name_snapshot(self, name: str, at: int | None) -> int:
        """Give the head's turn, or another, a name.

        Raises
        ------
            InputError: there is no turn yet, or the name is not possible, or another turn's.
            UnknownTurn: there is no such turn.
        """
        if not isinstance(name, str) or not 1 <= len(name.strip()) <= 128 or name.strip().isdigit():
            raise InputError("a snapshot's name is a text of 1 to 128 characters that is not a number.")
        turn = self.turn_of(at) if at is not None else self.store.head
        if turn is None:
            raise InputError(f"agent {self.name!r} has no turn yet that could be named.")
        if self.snapshots().get(name, turn) != turn:
            raise InputError(
                f"agent {self.name!r} has a snapshot {name!r} already: choose another name, or forget that one first."
            )
        self.store.set_meta(_NAMED + name, str(turn))
        return turn

    def forget_snapshot(self, name: str) -> None:
        """Take a name away; its turn stays.

        Raises
        ------
            UnknownTurn: there is no such snapshot.
        """
        self.turn_of(name)
        self.store.set_meta(_NAMED + name, None)

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

    def begin_with(self, system: str) -> None:
        """Set the system text with which the first turn will start.

        Raises
        ------
            InputError: the conversation has begun with another one.
        """
        if self._head_path():
            if system != (self.system or ""):
                raise InputError(
                    f"agent {self.name!r} already has another system text: give the new text to an agent of another "
                    "name, or rewind this one to its start first."
                )
        else:
            self.store.set_meta("system", system)
            self.unmake = None

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
        turns = store.turns()
        for key, value in store.meta.items():
            if key.startswith(_NAMED) and int(value) not in turns:
                store.set_meta(key, None)  # a turn of its own may get that number
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
            len(self._head_path()),
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


def _whole_number(value: object) -> int | None:
    """An integer of any kind as Python's own; None for anything else, a bool and 1.0 included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
