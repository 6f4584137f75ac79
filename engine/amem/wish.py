"""What a request wants to be continued: one more message where the agent stands, or a client's whole conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from amem.errors import InputError
from amem.match import carry, n_common
from amem.model.messages import Message, Tools, same_json

if TYPE_CHECKING:
    from amem.session import AgentSession
    from amem.store.records import TurnRecord
    from amem.turntree import History

RAW = "raw"  #: among a turn's settings: its prompt is a text without the chat template
_BRANCHES = 32  # a conversation that no branch begins with is compared with the newest ones
_CARRIED = 4  # of these, the best by their tokens are compared by their text


@dataclass(frozen=True)
class Place:
    """Where a turn goes: the history that it follows, the tokens of its prompt, and what is recorded of it."""

    history: History
    delta: list[int]  #: tokens after the history, up to where the reply begins
    prompt: str
    system: str | None  #: of a first turn
    recorded: Mapping[str, Any] = field(default_factory=dict)  #: what else the turn needs to be rendered again
    prefer: int | None = None  #: the turn whose path is likeliest to hold the tokens
    may_repeat: bool = False  #: a turn that is there already may be this one
    whole: bool = False  #: a whole conversation was given, not a message to add


class Wish(Protocol):
    """A request's input. Where it goes is decided when its turn comes: another request may have moved the head."""

    @property
    def text(self) -> str:
        """What seeds are derived from."""
        ...

    def parent(self, session: AgentSession) -> int | None:
        """The turn after which it would go now."""
        ...

    def place(self, session: AgentSession) -> Place:
        """Where it goes.

        Raises
        ------
            InputError: it cannot be continued as given; nothing has changed.
        """
        ...


@dataclass(frozen=True)
class MessageWish:
    """A message to an agent, by the rule on cells."""

    text: str
    system: str | None
    cell_id: str | None
    execution: str | None
    append: bool

    def parent(self, session: AgentSession) -> int | None:
        return session.tree.parent_for(self.cell_id, self.execution, self.append)[0]

    def place(self, session: AgentSession) -> Place:
        parent, left = session.tree.parent_for(self.cell_id, self.execution, self.append)
        system = self._system(session, parent)
        history = session.tree.history(parent, left)
        prompter, before = session.parts.prompter, history.token_ids
        delta = (
            prompter.first(system, self.text)
            if parent is None
            else prompter.next(self.text, last_id=before[-1] if before else None)
        )
        return Place(history, delta, self.text, system, prefer=session.store.head, may_repeat=self.cell_id is not None)

    def _system(self, session: AgentSession, parent: int | None) -> str | None:
        if parent is None:
            return session.tree.system if self.system is None else self.system
        if self.system is not None and self.system != (session.tree.system or ""):
            raise InputError(
                f"agent {session.name!r} already has another system text, which only the cell of its first turn can "
                "change: rewind it to its start, delete it, or give the new text to an agent of another name."
            )
        return None


@dataclass(frozen=True)
class ChatWish:
    """A whole conversation, in plain form (`amem.model.messages.plain_messages`).

    It follows the longest path of turns that it begins with, message by message: their replies count as the same
    whatever a client made of them (`Said.is_said_by`), and stay in the tokens that were generated. What comes after is
    compared with the other branches as text (`amem.match.carry`).
    """

    messages: tuple[Message, ...]
    tools: Tools

    @property
    def text(self) -> str:
        return json.dumps([self.messages, self.tools], ensure_ascii=False, sort_keys=True)

    def parent(self, session: AgentSession) -> int | None:
        del session  # the messages alone say where it goes
        return None

    def place(self, session: AgentSession) -> Place:
        prompter = session.parts.prompter
        whole = prompter.render(self.messages, self.tools)
        for parent, n_said in reversed(self._followed(session)):
            history = session.tree.history(parent, ())
            delta = self._delta(session, history, whole, self.messages[n_said:])
            if delta is not None:
                return self._placed(session, history, delta, self.messages[n_said:], None)
        system, rest = _system_of(self.messages)
        history = session.tree.history(None, ())
        return self._placed(session, history, prompter.history(self.messages, self.tools), rest, system)

    def _delta(self, session: AgentSession, history: History, whole: str, rest: Sequence[Message]) -> list[int] | None:
        """The tokens that come after a history; None if the text of the whole does not go on from it.

        A template may render messages otherwise after what was really said than after any reply (it may number them):
        then the whole text must begin with the history's own.
        """
        prompter, before = session.parts.prompter, history.token_ids
        text = prompter.after_reply(rest, self.tools)
        if text is not None and whole.endswith(text):
            return prompter.following(rest, last_id=before[-1] if before else None, tools=self.tools)
        ids = prompter.history(self.messages, self.tools)
        carried = carry(ids, before, prompter.special_ids, prompter.decode)
        return carried.token_ids[carried.n_stored :] if carried.extends else None

    def _placed(
        self, session: AgentSession, history: History, delta: list[int], rest: Sequence[Message], system: str | None
    ) -> Place:
        recorded: dict[str, Any] = {}
        if len(rest) != 1 or rest[0] != {"role": "user", "content": rest[0]["content"]}:
            recorded["messages"] = [dict(message) for message in rest]
        if history.parent is None and self.tools:
            recorded["tools"] = [dict(tool) for tool in self.tools]
        delta, prefer = _from_branches(session, history, delta)
        return Place(history, delta, str(rest[-1]["content"]), system, recorded, prefer, may_repeat=True, whole=True)

    def _followed(self, session: AgentSession) -> list[tuple[int, int]]:
        """Turns on the longest path that the messages begin with, each with the number of messages up to its end."""
        said = session.parts.prompter.said
        turns = session.store.turns()
        below: dict[int | None, list[int]] = {}
        for number, turn in turns.items():
            below.setdefault(turn.parent, []).append(number)
        best: list[tuple[int, int]] = []
        pending: list[list[tuple[int, int]]] = [[]]
        while pending:
            path = pending.pop()
            at, n = path[-1] if path else (None, 0)
            most = best[-1][1] if best else 0
            if n > most or (n == most and n and at == session.hot_turn):
                best = path  # of several that say the same, the one in memory, else the one that was made first
            for number in reversed(below.get(at, [])):
                turn = turns[number]
                own = messages_of(turn)
                end = n + len(own)
                if (
                    end + 1 < len(self.messages)
                    and not turn.settings.get(RAW)
                    and (at is not None or same_json(self.tools, turn.settings.get("tools", []), ordered=True))
                    and same_json(self.messages[n:end], own)
                    and self.messages[end]["role"] == "assistant"
                    and said(turn.reply).is_said_by(self.messages[end])
                ):
                    pending.append([*path, (number, end + 1)])
        return best


@dataclass(frozen=True)
class TextWish:
    """A text to be continued as it stands, without the chat template. Its turn begins a conversation."""

    text: str

    def parent(self, session: AgentSession) -> int | None:
        del session  # always the root
        return None

    def place(self, session: AgentSession) -> Place:
        history = session.tree.history(None, ())
        delta, prefer = _from_branches(session, history, session.parts.prompter.raw(self.text))
        return Place(history, delta, self.text, None, {RAW: True}, prefer, may_repeat=True)


def messages_of(turn: TurnRecord) -> list[Message]:
    """The messages of a turn, without its reply."""
    system = [{"role": "system", "content": turn.system}] if turn.parent is None and turn.system is not None else []
    recorded = turn.settings.get("messages") or [{"role": "user", "content": turn.prompt}]
    return [*system, *recorded]


def _system_of(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    """The system text with which a conversation begins, and the rest."""
    first = messages[0]
    if len(messages) > 1 and first == {"role": "system", "content": first["content"]}:
        return str(first["content"]), messages[1:]
    return None, messages


def _from_branches(session: AgentSession, history: History, delta: list[int]) -> tuple[list[int], int | None]:
    """The delta in the tokens of the branch that says most of it already, and that branch's last turn."""
    prompter, start = session.parts.prompter, len(history.token_ids)
    branches = []
    for leaf in session.tree.leaves(history.parent)[-_BRANCHES:]:
        ids = session.store.path_tokens(leaf, session.parts.realm)
        if ids is not None:
            own = ids[start:].tolist()
            branches.append((n_common(delta, own), leaf, own))
    best, prefer, most = delta, history.parent, 0
    for _, leaf, own in sorted(branches, reverse=True)[:_CARRIED]:
        carried = carry(delta, own, prompter.special_ids, prompter.decode)
        if carried.n_common > most:
            best, prefer, most = carried.token_ids, leaf, carried.n_common
    return best, prefer
