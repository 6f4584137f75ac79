"""Why a request found what it found: where it left a stored branch, and what most likely did that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amem.kv.codec import GROUP
from amem.match import n_common
from amem.model.messages import same_json
from amem.results import Match, Why
from amem.shortening import SHORTENED
from amem.wish import Place, messages_of

if TYPE_CHECKING:
    from amem.session import AgentSession
    from amem.store.records import TurnRecord

_BRANCHES = 32  # the newest ones are looked at
_SHOWN = 12  # tokens of either side
_MOMENT = re.compile(
    r"\d|\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b"
    r"|\b(mon|tue|wed|thu|fri|sat|sun)[a-z]*day\b|\b(am|pm)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Request:
    """What a request wanted, and what it got."""

    place: Place
    token_ids: Sequence[int]  #: of its whole prompt
    cell_id: str | None
    match: Match
    n_reused: int


@dataclass(frozen=True)
class _Seam:
    """Where a request and a stored branch part."""

    turn: TurnRecord
    position: int
    in_prompt: bool  #: of that turn, and not in its reply
    stored: list[int]
    wanted: list[int]


def explain(session: AgentSession, request: Request) -> Why:
    """What a request of this agent met, before its turn is saved."""
    place = request.place
    if place.history.rendered:
        return _other_realm(session, place.history.rendered[0][0])
    turns = session.store.turns()
    if not turns:
        return Why("This is the agent's first turn: nothing was stored before it.", "Nothing: the next turn reuses it.")
    if all(session.store.realization(turn, session.parts.realm) is None for turn in turns):
        return _other_realm(session, min(turns))
    if request.n_reused < len(place.history.token_ids) // GROUP * GROUP:
        return _whole(session, request)
    seam = _seam(session, request)
    if seam is not None:
        cause, remedy = _cause(session, request, seam)
        if request.n_reused < seam.position // GROUP * GROUP:
            cause += f" Of the {seam.position} tokens before that, {request.n_reused} had stored state to go on from."
        decode = session.parts.prompter.decode
        return Why(
            cause,
            remedy,
            seam.position,
            seam.turn.id,
            decode(request.token_ids[max(0, seam.position - _SHOWN) : seam.position]),
            decode(seam.stored[:_SHOWN]),
            decode(seam.wanted[:_SHOWN]),
        )
    return _whole(session, request)


def _whole(session: AgentSession, request: Request) -> Why:
    """Of a request that left no branch: what of its past was not there any more."""
    n_past, n_all = len(request.place.history.token_ids), len(request.token_ids)
    if request.match is Match.EXACT and request.n_reused:
        return Why(
            "This prompt was there already, at this place.",
            f"Nothing: only its last {n_all - request.n_reused} of {n_all} tokens were computed.",
        )
    if n_past == 0 and session.tree.repeats(request.place):
        return _not_reused(request)
    if n_past == 0 and _is_begun_by(session, request):
        return Why(
            f"This text is the beginning of one that was there already; {request.n_reused} of its {n_all} tokens had "
            "stored state that could be reused.",
            "Nothing: state is reused in whole groups of 64 tokens, and the last token is always computed.",
        )
    if request.n_reused >= n_past:
        return Why("The conversation only grew.", "Nothing: its whole past was reused.")
    if request.n_reused >= n_past // GROUP * GROUP:
        return Why(
            "The conversation only grew, but its last turn's open group of 64 tokens is not stored any more.",
            "Give the store more room with disk=: snapshots of open groups are the first to go when it is full.",
        )
    if session.store.meta.get(SHORTENED) == str(max(session.store.turns())):
        return Why(
            "This fork was shortened to its system text and its last turns (keep_last=): they stand elsewhere than "
            "they did, so their K/V is computed with the fork's first request.",
            "Nothing: it is stored from this turn on.",
        )
    kept = "none" if not request.n_reused else f"the first {request.n_reused} tokens"
    return Why(
        f"The conversation only grew, but of its {n_past} past tokens {kept} had stored K/V: the rest was never "
        "computed, was evicted because the store is full, or was set aside because it was damaged.",
        "Give the store more room with disk=, or look for damage with verify; it is stored again from this turn on.",
    )


def _not_reused(request: Request) -> Why:
    """Of a first prompt that was there already, of which nothing or less than it has in whole groups was reused."""
    n_all = len(request.token_ids)
    if n_all <= GROUP:
        return Why(
            f"This prompt was there already, but nothing of it could be reused: its {n_all} tokens do not fill a group "
            "of 64 with a token left to compute, and only whole groups are stored of a prompt.",
            "Nothing: so short a prompt is quickly computed.",
        )
    return Why(
        f"This prompt was there already, but of its {n_all} tokens only {request.n_reused} had stored K/V: the rest "
        "was evicted because the store is full, or was set aside because it was damaged.",
        "Give the store more room with disk=, or look for damage with verify; it is stored again from this turn on.",
    )


def _is_begun_by(session: AgentSession, request: Request) -> bool:
    """Whether a stored branch begins with all that the request wants, and goes on."""
    wanted = list(request.token_ids)
    for leaf in session.tree.leaves(None)[-_BRANCHES:]:
        own = session.store.path_tokens(leaf, session.parts.realm)
        if own is not None and len(own) > len(wanted) and n_common(wanted, own) == len(wanted):
            return True
    return False


def _other_realm(session: AgentSession, turn: int) -> Why:
    """Of a past that has no tokens or K/V for what is loaded."""
    mine = session.parts.realm
    others = session.store.realms(turn)
    if any(realm.fingerprint == mine.fingerprint for realm in others):
        codecs = ", ".join(sorted({realm.codec for realm in others}))
        return Why(
            f"Its state is stored with another codec ({codecs}), not with {mine.codec}.",
            f"Load the engine with codec {codecs} to go on where it was; with {mine.codec} its past is computed once.",
        )
    return Why(
        "Its state is of another model, or of the same one with other weights, another tokenizer or another chat "
        "template.",
        "Load that model again to go on where it was; with this one its past is computed once.",
    )


def _seam(session: AgentSession, request: Request) -> _Seam | None:
    """Where the request parts from the branch that says most of it; None if it parts from none."""
    place, wanted = request.place, list(request.token_ids)
    if request.match is Match.EXACT:
        return None
    leaves = session.tree.leaves(place.history.parent)[-_BRANCHES:]
    best, most, ids = None, len(place.history.token_ids), None
    for leaf in leaves:
        own = session.store.path_tokens(leaf, session.parts.realm)
        n = n_common(wanted, own) if own is not None else 0
        if own is not None and n < min(len(wanted), len(own)) and (best is None or n >= most):
            best, most, ids = leaf, n, own
    if best is None or ids is None or not _looked_for_more(request):
        return None
    turns, start = session.store.turns(), 0
    for number in session.store.path(best):
        known = session.store.realization(number, session.parts.realm)
        if known is not None and known.n_tokens > most:
            decode, own = session.parts.prompter.decode, ids[start : known.n_tokens].tolist()
            in_prompt = len(decode(own[: most - start])) < _reply_at(session, turns[number], own)
            return _Seam(turns[number], most, in_prompt, ids[most:].tolist(), wanted[most:])
        start = known.n_tokens if known is not None else start
    return None


def _reply_at(session: AgentSession, turn: TurnRecord, own: list[int]) -> int:
    """Where in the text of a turn's tokens its reply begins, without white space before it.

    The reply ends them but for special tokens. It may be empty, so that it is found everywhere.
    """
    prompter, n = session.parts.prompter, len(own)
    while n and own[n - 1] in prompter.special_ids:
        n -= 1
    text, reply = prompter.decode(own[:n]).rstrip(), turn.reply.strip()
    return len(text) - len(reply) if text.endswith(reply) else prompter.decode(own).rfind(reply)


def _looked_for_more(request: Request) -> bool:
    """Whether the request could have found more: not if it is a new message at the end of what was reused whole."""
    place = request.place
    return bool(place.history.left) or place.whole or request.match in (Match.DIVERGE, Match.COLD)


def _cause(session: AgentSession, request: Request, seam: _Seam) -> tuple[str, str]:
    """The likeliest reason, and what to do."""
    place, turn = request.place, seam.turn
    if not seam.in_prompt:
        return _reply_cause(session, seam)
    first = turn.parent is None and place.history.parent is None
    if first and turn.system != place.system:
        if _same_but_for_time(turn.system or "", place.system or ""):
            return (
                "The system text has another date, time or number in it.",
                "Leave it out of the system text, or put it into the last message: what follows it is computed anew.",
            )
        return (
            "The system text is another.",
            "Keep it as it was; what should vary belongs at the end of the last message.",
        )
    if first and not same_json(turn.settings.get("tools", []), place.recorded.get("tools", []), ordered=True):
        return (
            "The descriptions of tools are others, or in another order.",
            "Send the same tools in the same order with every request: the template writes them at the start.",
        )
    if request.cell_id is not None and turn.cell_id == request.cell_id and turn.prompt != place.prompt:
        return (
            f"The cell of turn {turn.id} was edited.",
            "Nothing, if the edit was meant: what lies before it is reused. What should vary belongs at the end.",
        )
    messages = messages_of(turn)
    own = _messages_of_place(place)
    if same_json(own[: len(messages)], messages):
        return (
            "The chat template renders the same messages otherwise: it may write the date, or depend on what follows.",
            "Nothing: turns that are appended one by one keep the text that they began with.",
        )
    if _same_but_for_time(str(messages), str(own[: len(messages)])):
        return (
            "A message has another date, time or number in it.",
            "Put what changes at the end of the last message: all that follows it is computed again.",
        )
    return (
        f"The message of turn {turn.id} is another.",
        "Nothing, if it was meant: both stay as branches, and what they share is reused.",
    )


def _messages_of_place(place: Place) -> list[object]:
    """The messages that a request adds to the history."""
    system = [{"role": "system", "content": place.system}] if place.system is not None else []
    return [*system, *(place.recorded.get("messages") or [{"role": "user", "content": place.prompt}])]


def _reply_cause(session: AgentSession, seam: _Seam) -> tuple[str, str]:
    prompter = session.parts.prompter
    thought = prompter.said(seam.turn.reply).thought
    if thought and thought not in prompter.decode(seam.wanted):
        return (
            f"The reply of turn {seam.turn.id} came back without its thought, and not as it was otherwise.",
            "Send replies back whole, or with nothing but their thought left out.",
        )
    return (
        f"The reply of turn {seam.turn.id} came back changed.",
        "Send replies back as they came (white space around them does not matter).",
    )


def _same_but_for_time(one: str, other: str) -> bool:
    return one != other and _MOMENT.sub("", one) == _MOMENT.sub("", other)
