"""A reply's parts while it streams: its thought, its text, its tool calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from amem.model.reply import overlap
from amem.results import Event, Reply, TokenLogprob

if TYPE_CHECKING:
    from amem.model.said import Call, ReplyMarks, Said


@dataclass(frozen=True)
class Part:
    """A piece of a reply: of thought, of text, a call, or the whole reply at its end."""

    thought: str = ""
    text: str = ""
    call: Call | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  #: of the tokens since the last part that had any
    reply: Reply | None = None


@dataclass(frozen=True)
class Whole:
    """All of a reply's parts."""

    thought: str
    text: str
    calls: tuple[Call, ...]
    logprobs: tuple[TokenLogprob, ...]
    reply: Reply


async def whole_of(parts: AsyncIterator[Part]) -> Whole:
    """A reply, once all its parts have come."""
    came = [part async for part in parts]
    replies = [part.reply for part in came if part.reply is not None]
    return Whole(
        "".join(part.thought for part in came),
        "".join(part.text for part in came),
        tuple(part.call for part in came if part.call is not None),
        tuple(entry for part in came for entry in part.logprobs),
        replies[-1],
    )


async def parts_of(
    events: AsyncIterator[Event], marks: ReplyMarks, said: Callable[[str], Said], *, with_tools: bool
) -> AsyncIterator[Part]:
    """The parts of a reply as they come, its calls at its end. Without ``with_tools`` a call is text like any other."""
    split = Splitter(marks, with_tools=with_tools)
    n_told = 0
    async for event in events:
        if event.text:
            thought, text = split.add(event.text)
            n_told += len(event.logprobs)
            if thought or text or event.logprobs:
                yield Part(thought, text, logprobs=event.logprobs)
        if event.reply is not None:
            thought, text, held = split.finish()
            calls = said(event.reply.text).calls if held else ()
            if calls:
                before = split.text.strip()
                content = said(event.reply.text).content
                text = content.removeprefix(before) if content.startswith(before) else ""
            else:
                text += held
            if thought or text:
                yield Part(thought, text)
            for call in calls:
                yield Part(call=call)
            yield Part(logprobs=event.reply.logprobs[n_told:], reply=event.reply)


async def raw_parts_of(events: AsyncIterator[Event]) -> AsyncIterator[Part]:
    """The parts of a bare text's continuation: text as it was generated, whatever marks are in it."""
    n_told = 0
    async for event in events:
        if event.text:
            n_told += len(event.logprobs)
            yield Part(text=event.text, logprobs=event.logprobs)
        if event.reply is not None:
            yield Part(logprobs=event.reply.logprobs[n_told:], reply=event.reply)


class _State(Enum):
    OPENING = auto()  # white space, or the beginning of a thought's mark
    THOUGHT = auto()
    TEXT = auto()
    CALLS = auto()


class Splitter:
    """Cuts a reply at the marks of its thought and of its first tool call, wherever the pieces' boundaries are."""

    def __init__(self, marks: ReplyMarks, *, with_tools: bool) -> None:
        self._start, self._end = marks.think_start, marks.think_end
        self._call = marks.call_start if with_tools else None
        self._state = _State.THOUGHT if marks.opens_thought else _State.OPENING
        self._held = ""
        self._follows_thought = False
        self.text = ""  #: given out so far

    def add(self, piece: str) -> tuple[str, str]:
        """The thought and the text that are known now."""
        self._held += piece
        thought = text = ""
        if self._state is _State.OPENING:
            self._open()
        if self._state is _State.THOUGHT:
            thought, ended = self._take(self._end)
            if ended:
                self._held, self._state = self._held.removeprefix(self._end), _State.TEXT
                self._follows_thought = True
        if self._follows_thought:
            self._held = self._held.lstrip()
            self._follows_thought = not self._held
        if self._state is _State.TEXT:
            text, ended = self._take(self._call)
            self.text += text
            if ended:
                self._state = _State.CALLS
        return thought, text

    def finish(self) -> tuple[str, str, str]:
        """What was held back: of the thought, of the text, and all from a tool call's mark on."""
        held, self._held = self._held, ""
        if self._state is _State.THOUGHT:
            return held, "", ""
        return ("", "", held) if self._state is _State.CALLS else ("", held, "")

    def _open(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._start):
            self._held, self._state = begun.removeprefix(self._start), _State.THOUGHT
        elif not self._start.startswith(begun):
            self._state = _State.TEXT

    def _take(self, mark: str | None) -> tuple[str, bool]:
        """What lies before a mark, and whether the mark came; text that may be its beginning is held back."""
        n, found = len(self._held), -1
        if mark is not None:
            found = self._held.find(mark)
            n = found if found >= 0 else n - overlap(self._held, mark)
        free, self._held = self._held[:n], self._held[n:]
        return free, found >= 0
