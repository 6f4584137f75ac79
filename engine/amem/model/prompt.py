"""Conversations as tokens, by the model's own chat template.

An agent's history is only ever appended to, so a following message is rendered as a delta: what the template puts
between an assistant's reply and the next reply. It is found by rendering a conversation around a sentinel text in the
reply's place; nothing here knows a model by name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from amem.errors import InputError
from amem.model.messages import Message, Tools, plain_messages
from amem.model.reply import ReplyText
from amem.model.said import ReplyMarks, Said, read_reply

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_TITLES = {"user": "User", "tool": "Tool", "assistant": "Assistant"}


class Prompter:
    """Renders messages for one model.

    A model without a chat template (a base model) gets a plain form: the system text and an empty line, then
    ``User: <message>``, an empty line and ``Assistant:``.
    """

    def __init__(self, tokenizer: TokenizerWrapper, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._has_template = bool(tokenizer.has_chat_template)

    def first(self, system: str | None, message: str) -> list[int]:
        """Tokens of a conversation's first turn, up to where the reply begins.

        Raises
        ------
        InputError
            The message is empty, or a system text is given and the template has no place for one.
        """
        _check_text(message)
        messages = [{"role": "user", "content": message}]
        if system is None:
            return self._encode_start(self.render(messages))
        self._check_system()
        return self._encode_start(self.render([{"role": "system", "content": system}, *messages]))

    def next(self, message: str, *, last_id: int | None) -> list[int]:
        """Tokens that follow a reply: its end of turn, the next user message, the beginning of the next reply.

        Parameters
        ----------
        message
            The user's message.
        last_id
            The last token of the history so far. If it is an end-of-turn token, no other is put after it; a reply that
            was cut off without one gets the template's.

        Raises
        ------
        InputError
            The message is empty.
        """
        _check_text(message)
        return self.following([{"role": "user", "content": message}], last_id=last_id)

    def following(self, messages: Sequence[Message], *, last_id: int | None, tools: Tools = ()) -> list[int]:
        """Like `next`, for any messages that follow a reply: a tool's answer, or several turns of a client's."""
        text = self.after_reply(messages, tools)
        if text is None:
            return self._following_as_new(messages, last_id, tools)
        ids = self._encode(text)
        return ids[self._n_closing(ids, last_id) :]

    def after_reply(self, messages: Sequence[Message], tools: Tools = ()) -> str | None:
        """The text that the template puts between a reply's text and the next reply's; None if it has no such form."""
        if not self._has_template:
            return f"\n\n{_plain(messages)}"
        reply = _sentinel(json.dumps([*messages, *tools], ensure_ascii=False))
        return self._after(reply, [*_opening(reply), *messages], tools=tools)

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """A whole conversation as text, up to where the next reply begins.

        Raises
        ------
        InputError
            See `amem.model.messages.plain_messages`; or the template refuses these roles in this order.
        """
        plain = plain_messages(messages)
        if not self._has_template:
            return _plain(plain)
        try:
            return self._apply(plain, generation=True, tools=tools)
        except Exception as error:  # a template is a program, and may raise whatever it likes
            raise InputError(f"The model's chat template refuses these messages: {_reason(error)}") from error

    def history(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Tokens of a whole conversation; errors as `render`."""
        return self._encode_start(self.render(messages, tools))

    def raw(self, text: str) -> list[int]:
        """Tokens of a text that is to be continued as it stands; with a BOS if the tokenizer itself adds one."""
        ids = [int(id_) for id_ in self._tokenizer.encode(text, verbose=False)]  # too long a text is refused by us
        return ids[:-1] if ids and ids[-1] in self._eos_token_ids else ids

    def reply_marks(self) -> ReplyMarks:
        """How this model marks the parts of a reply, by its tokenizer and its chat template."""
        question = [{"role": "user", "content": "?"}]
        tool = {"type": "function", "function": {"name": _sentinel(""), "description": "", "parameters": {}}}
        start, end = self._tokenizer.think_start or "<think>", self._tokenizer.think_end or "</think>"
        try:
            takes_tools = _sentinel("") in self.render(question, [tool])
        except InputError:
            takes_tools = False
        parsed = getattr(self._tokenizer, "tool_parser", None) is not None
        return ReplyMarks(
            think_start=start,
            think_end=end,
            opens_thought=self.render(question).rstrip().endswith(start),
            call_start=(self._tokenizer.tool_call_start or None) if parsed else None,
            takes_tools=takes_tools,
        )

    def said(self, reply: str) -> Said:
        """A reply's parts: its thought, its content and its tool calls, by the model's own marks."""
        return read_reply(reply, self._tokenizer)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that text never merges with: a tokenizer looks for them before it looks at anything else."""
        return frozenset(self._tokenizer.all_special_ids) | frozenset(self._tokenizer.added_tokens_decoder)

    def reply(self, text: str, *, ended: bool) -> list[int]:
        """Tokens of a reply that is known as text alone; ``ended`` if it ended its turn itself."""
        ids = self._encode(text)
        return [*ids, int(self._tokenizer.eos_token_id)] if ended and self._tokenizer.eos_token_id is not None else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(token_ids)))

    def reply_text(self, stops: Sequence[str] = (), *, continues: bool = False) -> ReplyText:
        """Where a new reply's tokens become text; ``continues`` if it goes on from a bare text.

        Raises
        ------
        InputError
            A stop string is empty.
        """
        return ReplyText(self._tokenizer, self._eos_token_ids, stops, continues=continues)

    def _apply(self, messages: Sequence[Message], *, generation: bool, tools: Tools = ()) -> str:
        plain = [dict(message) for message in messages]
        given = [dict(tool) for tool in tools] or None
        rendered = self._tokenizer.apply_chat_template(
            plain, tools=given, tokenize=False, add_generation_prompt=generation
        )
        return str(rendered)

    def _after(
        self, sentinel: str, messages: Sequence[Message], *, generation: bool = True, tools: Tools = ()
    ) -> str | None:
        """What the template puts after the sentinel; None if it refuses the messages, or drops the sentinel."""
        try:
            _, found, after = self._apply(messages, generation=generation, tools=tools).rpartition(sentinel)
        except Exception:  # noqa: BLE001  # as in render; the caller has another way
            return None
        return after if found else None

    def _check_system(self) -> None:
        if not self._has_template:
            return
        sentinel = _sentinel("")
        messages = [{"role": "system", "content": sentinel}, {"role": "user", "content": "?"}]
        if self._after(sentinel, messages) is None:
            raise InputError(
                "This model's chat template has no place for a system text; leave it out, or put it into the first "
                "message."
            )

    def _n_closing(self, ids: Sequence[int], last_id: int | None) -> int:
        """How many tokens at the start of a delta only close the reply, where the history is closed already."""
        if last_id not in self._eos_token_ids:
            return 0
        for n, id_ in enumerate(ids):
            if id_ in self._closing_ids:
                return n + 1
            if str(self._tokenizer.decode([id_])).strip():
                break
        return 0

    @cached_property
    def _closing_ids(self) -> frozenset[int]:
        """End-of-turn tokens, and the one that stands for them inside a conversation.

        Some templates end the last reply with another token than earlier ones (gpt-oss: return, else end). It is a
        special token in the place where a conversation that ends there has an end-of-turn token, with the special
        tokens of the user's header still to come.
        """
        reply, message = _sentinel(""), _sentinel(_sentinel(""))
        at_end = self._after(reply, _opening(reply), generation=False)
        inside = self._after(reply, [*_opening(reply), {"role": "user", "content": message}])
        if not at_end or not inside:
            return self._eos_token_ids
        last, middle = self._encode(at_end), self._encode(inside.partition(message)[0])
        if not last or not middle:
            return self._eos_token_ids
        special = self.special_ids
        stands_in = (
            last[0] in self._eos_token_ids
            and middle[:1] != last[:1]
            and middle[0] in special
            and any(id_ in special for id_ in middle[1:])
        )
        return self._eos_token_ids | {middle[0]} if stands_in else self._eos_token_ids

    def _following_as_new(self, messages: Sequence[Message], last_id: int | None, tools: Tools) -> list[int]:
        """The messages as if they began a conversation, for templates that render no reply: closed, without a BOS."""
        ids = self._encode(self.render(messages, tools))
        if ids[:1] == [self._tokenizer.bos_token_id] and ids.count(ids[0]) == 1:
            ids = ids[1:]
        if last_id in self._eos_token_ids or self._tokenizer.eos_token_id is None:
            return ids
        return [int(self._tokenizer.eos_token_id), *ids]

    def _encode(self, text: str) -> list[int]:
        """Tokens of text in mid-stream: the tokenizer adds nothing of its own."""
        return [int(id_) for id_ in self._tokenizer.encode(text, add_special_tokens=False, verbose=False)]

    def _encode_start(self, text: str) -> list[int]:
        """Tokens of a conversation from its start. A template writes its own BOS; plain text gets the tokenizer's."""
        return self._encode(text) if self._has_template else self.raw(text)


def _opening(reply: str) -> list[Message]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]


def _sentinel(text: str) -> str:
    """A word that is not in ``text``, and that no template changes."""
    n = 0
    while (word := f"Qz{n}xReplyx{n}zQ") in text:
        n += 1
    return word


def _plain(messages: Sequence[Message]) -> str:
    parts = []
    for message in messages:
        calls = json.dumps(message["tool_calls"], ensure_ascii=False) if message.get("tool_calls") else ""
        text = f"{message['content']}{calls}"
        parts.append(text if message["role"] == "system" else f"{_TITLES[message['role']]}: {text}")
    return "\n\n".join([*parts, "Assistant:"])


def _check_text(message: str) -> None:
    if not message.strip():
        raise InputError("The message is empty: write what the reply is to be to.")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
