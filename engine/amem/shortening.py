"""The end of a conversation as one of its own: the system text and the last turns, when the context is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from amem.store.records import NewTurn, Realm

if TYPE_CHECKING:
    from amem.session import AgentSession
    from amem.store import AgentStore
    from amem.store.records import TurnRecord

SHORTENED = "shortened"  #: among an agent's small texts: the last of the turns with which it was made, if it was so


@dataclass(frozen=True)
class Shortened:
    """Turns as text and tokens, the first of them with the system text. Their K/V are still to be computed."""

    realm: Realm
    turns: tuple[NewTurn, ...]  #: without their parents
    token_ids: tuple[tuple[int, ...], ...]  #: of each turn alone

    def write(self, store: AgentStore) -> None:
        """Commit them, one after the other, to a new agent."""
        parent: int | None = None
        n_tokens = 0
        for turn, ids in zip(self.turns, self.token_ids, strict=True):
            n_tokens += len(ids)
            parent = store.commit(
                replace(turn, parent=parent), self.realm, np.asarray(ids, dtype=np.int32), n_tokens
            ).id
        store.set_meta(SHORTENED, str(parent))


def shortened(session: AgentSession, at: int | None, n_last: int) -> Shortened | None:
    """The last turns up to ``at``; None if that is all of them, so that there is nothing to leave out."""
    path = session.store.path(at) if at is not None else []
    if n_last >= len(path):
        return None
    turns = session.store.turns()
    root = turns[path[0]]
    kept: list[NewTurn] = []
    ids: list[tuple[int, ...]] = []
    last: int | None = None
    for number in path[-n_last:]:
        turn = turns[number]
        settings = dict(turn.settings)
        if not kept and "tools" in root.settings:
            settings["tools"] = root.settings["tools"]
        new = NewTurn(
            None,
            turn.prompt,
            turn.reply,
            turn.finish_reason,
            None if kept else root.system,
            settings,
            turn.cell_id,
            turn.execution,
        )
        own = (*_prompt_ids(session, new, last), *_reply_ids(session, turn))
        kept.append(new)
        ids.append(own)
        last = own[-1]
    return Shortened(session.parts.realm, tuple(kept), tuple(ids))


def _prompt_ids(session: AgentSession, turn: NewTurn, last_id: int | None) -> Sequence[int]:
    """A turn's prompt where it stands now: first, or after a turn that ends with ``last_id``."""
    messages = turn.settings.get("messages") or [{"role": "user", "content": turn.prompt}]
    prompter = session.parts.prompter
    if last_id is not None:
        return prompter.following(messages, last_id=last_id)
    system = [{"role": "system", "content": turn.system}] if turn.system is not None else []
    return prompter.history([*system, *messages], turn.settings.get("tools", ()))


def _reply_ids(session: AgentSession, turn: TurnRecord) -> Sequence[int]:
    """A turn's reply as it was generated, if this model knows it; else rendered from its text."""
    realm, before = session.parts.realm, None
    known = session.store.realization(turn.id, realm)
    if turn.parent is not None:
        before = session.store.path_tokens(turn.parent, realm)
    prompt = session.tree.prompt_ids(turn, before.tolist() if before is not None else ())
    if known is not None and known.token_ids[: len(prompt)].tolist() == list(prompt):
        return [int(id_) for id_ in known.token_ids[len(prompt) :]]
    return session.parts.prompter.reply(turn.reply, ended=turn.finish_reason == "stop")
