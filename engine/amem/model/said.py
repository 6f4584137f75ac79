"""What a reply says, apart from how it was written: its thought, its content and its tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amem.errors import InputError
from amem.model.messages import Message, arguments_of, same_json

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True)
class Call:
    """A tool call in a reply."""

    name: str
    arguments: Any  #: a mapping, or text that is none


@dataclass(frozen=True)
class ReplyMarks:
    """How a model marks the parts of a reply."""

    think_start: str
    think_end: str
    opens_thought: bool  #: the template itself begins the thought, so that a reply has its end alone
    call_start: str | None  #: None: its tool calls cannot be told from text
    takes_tools: bool  #: the chat template shows descriptions of tools to the model


@dataclass(frozen=True)
class Said:
    """A reply's parts. White space around them is of no meaning, and is not kept."""

    text: str  #: all of it
    answer: str  #: without its thought
    thought: str
    content: str  #: without its thought and its tool calls
    calls: tuple[Call, ...]

    def is_said_by(self, message: Message) -> bool:
        """Whether a client's assistant message is this reply.

        Clients send a reply back with other white space around it, without its thought, or with its tool calls in a
        field of their own, whose arguments may be in another order.
        """
        content = str(message.get("content") or "").strip()
        calls = message.get("tool_calls") or ()
        if not calls:
            return content in (self.text, self.answer)
        sent = [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
        mine = [[call.name, call.arguments] for call in self.calls]
        return bool(mine) and same_json(sent, mine) and content in ("", self.content)


def read_reply(reply: str, tokenizer: TokenizerWrapper) -> Said:
    """Take a reply apart by its model's own marks; one without such marks is content alone."""
    start, end = tokenizer.think_start or "<think>", tokenizer.think_end or "</think>"
    thought, answer = _split_thought(reply, start, end)
    content, calls = answer, tuple[Call, ...]()
    parser = getattr(tokenizer, "tool_parser", None)
    if parser is not None and tokenizer.tool_call_start and tokenizer.tool_call_start in answer:
        content, calls = _split_calls(answer, tokenizer.tool_call_start, tokenizer.tool_call_end or "", parser)
    return Said(reply.strip(), answer.strip(), thought.strip(), content.strip(), calls)


def _split_thought(reply: str, start: str, end: str) -> tuple[str, str]:
    """A thought may have been begun by the template, so that the reply has its end alone."""
    before, found, after = reply.partition(end)
    if found:
        return before.strip().removeprefix(start), after
    before, found, after = reply.partition(start)
    return (after, before) if found and not before.strip() else ("", reply)


def _split_calls(
    answer: str, start: str, end: str, parser: Callable[[str, Any], object]
) -> tuple[str, tuple[Call, ...]]:
    """The text outside of tool calls, and the calls; one that cannot be read stays text."""
    pieces: list[str] = []
    calls: list[Call] = []
    rest = answer
    while start in rest:
        before, _, rest = rest.partition(start)
        body, _, after = rest.partition(end) if end else (rest, "", "")
        try:
            read = parser(body, None)
        except Exception:  # noqa: BLE001  # whatever a model wrote, and however its parser fails
            return answer, ()
        for call in read if isinstance(read, list) else [read]:
            if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
                return answer, ()
            try:
                calls.append(Call(call["name"], arguments_of(call.get("arguments"))))
            except InputError:
                return answer, ()
        pieces.append(before)
        rest = after
    return "".join([*pieces, rest]), tuple(calls)
