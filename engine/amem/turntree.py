"""An agent's turns: the paths through them, their tokens for a model, and the names that people gave to some."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amem.errors import InputError, UnknownTurn
from amem.results import TurnInfo
from amem.sizes import count
from amem.store import AgentStore
from amem.store.records import TurnRecord
from amem.wish import RAW, messages_of

if TYPE_CHECKING:
    from amem.parts import EngineParts
    from amem.wish import Place

_NAMED = "snapshot:"  # before a named snapshot's name, among the agent's small texts


@dataclass(frozen=True)
class History:
    """Where a turn starts: its parent, and the tokens of everything before it."""

    parent: int | None
    token_ids: list[int]
    rendered: tuple[tuple[int, list[int]], ...] = ()  #: (turn, its ids) of turns that had none for this model
    left: tuple[int, ...] = ()  #: turns of the old path that this one leaves on another branch


class TurnTree:
    """The turns of one agent, as its store has them. It belongs to the owner thread."""

    def __init__(self, parts: EngineParts, store: AgentStore) -> None:
        self._parts = parts
        self._store = store
        self.executions: dict[int, str | None] = {}  #: of turns that this engine made, or found unchanged

    @property
    def system(self) -> str | None:
        """The system text of the head's path, or the one that the first turn will have."""
        path = self.head_path()
        if path:
            return self._store.turns()[path[0]].system
        if (text := self._store.meta.get("system")) is not None:
            return text
        roots = self._store.children(None)  # rewound to its start, it still has the text that it began with
        return self._store.turns()[roots[-1]].system if roots else None

    def head_path(self) -> list[int]:
        return self._store.path(self._store.head) if self._store.head is not None else []

    def parent_for(self, cell_id: str | None, execution: str | None, append: bool) -> tuple[int | None, list[int]]:
        """Where a new turn starts, by the rule on cells, and the turns that it leaves behind.

        A cell that runs again starts where its last execution started, if that lies on the head's path. A second ask
        within one execution goes on from the head.
        """
        path = self.head_path()
        head = path[-1] if path else None
        if append or cell_id is None:
            return head, []
        turns = self._store.turns()
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
        ids = self._store.path_tokens(parent, self._parts.realm)
        if ids is not None:
            return History(parent, ids.tolist(), (), tuple(left))
        turns = self._store.turns()
        token_ids: list[int] = []
        rendered: list[tuple[int, list[int]]] = []
        for turn in self._store.path(parent):
            known = self._store.realization(turn, self._parts.realm)
            own = known.token_ids.tolist() if known else self._ids_again(turns[turn], token_ids)
            if not known:
                rendered.append((turn, own))
            token_ids.extend(own)
        return History(parent, token_ids, tuple(rendered), tuple(left))

    def _ids_again(self, turn: TurnRecord, before: Sequence[int]) -> list[int]:
        """A turn's ids: as they were generated if only the codec is another, else rendered from its text."""
        for realm in self._store.realms(turn.id):
            known = self._store.realization(turn.id, realm)
            if known is not None and realm.fingerprint == self._parts.realm.fingerprint:
                return [int(token) for token in known.token_ids]
        return self._render(turn, before)

    def _render(self, turn: TurnRecord, before: Sequence[int]) -> list[int]:
        reply = self._parts.prompter.reply(turn.reply, ended=turn.finish_reason == "stop")
        return [*self.prompt_ids(turn, before), *reply]

    def prompt_ids(self, turn: TurnRecord, before: Sequence[int]) -> list[int]:
        """A turn's prompt as this model's template renders it after the tokens before it."""
        if turn.settings.get(RAW):
            return self._parts.prompter.raw(turn.prompt)
        prompter, messages, tools = self._parts.prompter, messages_of(turn), turn.settings.get("tools", ())
        if turn.parent is None:
            return prompter.history(messages, tools)
        return prompter.following(messages, last_id=before[-1] if before else None, tools=tools)

    def n_opening(self, root: int) -> int:
        """Tokens that a first turn's system text and tools take, with what the template puts around them."""
        turn, prompter = self._store.turns()[root], self._parts.prompter
        message = [{"role": "user", "content": "?"}]
        system = [{"role": "system", "content": turn.system}] if turn.system is not None else []
        return len(prompter.history([*system, *message], turn.settings.get("tools", ())))

    def leaves(self, below: int | None) -> list[int]:
        """The turns that no turn follows, of those that follow ``below``; of None: of all. The newest last."""
        turns = self._store.turns()
        inside: set[int] = set()
        for number, turn in turns.items():  # parents come before their children
            if turn.parent == below or turn.parent in inside:
                inside.add(number)
        return sorted(inside - {turn.parent for turn in turns.values()})

    def repeats(self, place: Place) -> bool:
        """Whether a turn with this prompt was computed before at this place.

        A prompt by the template ends with what begins a reply; a bare text may be the beginning of a longer one.
        """
        bare, turns = bool(place.recorded.get(RAW)), self._store.turns()
        for number in self._store.children(place.history.parent):
            turn, known = turns[number], self._store.realization(number, self._parts.realm)
            if bool(turn.settings.get(RAW)) != bare or (bare and turn.prompt != place.prompt):
                continue
            if known is not None and known.token_ids[: len(place.delta)].tolist() == place.delta:
                return True
        return False

    def infos(self, *, only_path: bool) -> list[TurnInfo]:
        """Turns in the order in which they were made."""
        path = set(self.head_path())
        infos = []
        for turn in self._store.turns().values():
            if only_path and turn.id not in path:
                continue
            known = self._store.realization(turn.id, self._parts.realm)
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
                raise UnknownTurn(f"agent {self._store.name!r} has no snapshot {place!r}: {known}.")
            return named[place]
        turn = _whole_number(place)
        if turn is None or turn not in self._store.turns():
            raise UnknownTurn(f"agent {self._store.name!r} has no turn {place!r}: agent.tree() lists its turns.")
        return turn

    def snapshots(self) -> dict[str, int]:
        """Names that were given to turns, with their turns. A fork has those of the turns that it took over."""
        turns = self._store.turns()
        named = {
            key.removeprefix(_NAMED): int(value) for key, value in self._store.meta.items() if key.startswith(_NAMED)
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
        turn = self.turn_of(at) if at is not None else self._store.head
        if turn is None:
            raise InputError(f"agent {self._store.name!r} has no turn yet that could be named.")
        if self.snapshots().get(name, turn) != turn:
            raise InputError(
                f"agent {self._store.name!r} has a snapshot {name!r} already: choose another name, or forget that one "
                "first."
            )
        self._store.set_meta(_NAMED + name, str(turn))
        return turn

    def forget_snapshot(self, name: str) -> None:
        """Take a name away; its turn stays.

        Raises
        ------
            UnknownTurn: there is no such snapshot.
        """
        self.turn_of(name)
        self._store.set_meta(_NAMED + name, None)

    def before(self, turns: int, to: int | str | None) -> int | None:
        """Where a rewind leads: back by some turns, or to a turn or named snapshot on the head's path.

        Raises
        ------
            InputError: the head's path is shorter than that.
            UnknownTurn: there is no such turn on it.
        """
        path = self.head_path()
        if to is not None:
            turn = self.turn_of(to)
            if turn not in path:
                raise UnknownTurn(
                    f"agent {self._store.name!r} did not come by turn {turn}, so it cannot rewind to it: use checkout."
                )
            return turn
        n = _whole_number(turns)
        if n is None or not 1 <= n <= len(path):
            known = f"agent {self._store.name!r} has {count(len(path), 'turn')} to rewind"
            hint = f"give a whole number from 1 to {len(path)}" if path else "it stands before its first"
            raise InputError(f"{known}, so {turns!r} is not possible: {hint}.")
        return path[-n - 1] if n < len(path) else None

    def forget_lost_snapshots(self) -> None:
        """Take the names of turns away that are not here: a turn of its own may get such a number."""
        turns = self._store.turns()
        for key, value in self._store.meta.items():
            if key.startswith(_NAMED) and int(value) not in turns:
                self._store.set_meta(key, None)


def _whole_number(value: object) -> int | None:
    """An integer of any kind as Python's own; None for anything else, a bool and 1.0 included."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
