"""Conversations as tokens, by the model's own chat template.

An agent's history is only ever appended to, so a following message is rendered as a delta: what the template puts
between an assistant's reply and the next reply. It is found by rendering a conversation around a sentinel text in the
reply's place; nothing here knows a model by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from amem.errors import InputError
from amem.model.reply import ReplyText

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Message = Mapping[str, str]

_ROLES = ("system", "user", "assistant")


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
        if not self._has_template:
            return self._encode(f"\n\n{_plain_user(message)}")
        reply = _sentinel(message)
        text = self._after(reply, [*_opening(reply), {"role": "user", "content": message}])
        if text is None:
            return self._next_as_new(message, last_id)
        ids = self._encode(text)
        return ids[self._n_closing(ids, last_id) :]

    def render(self, messages: Sequence[Message]) -> str:
        """A whole conversation as text, up to where the next reply begins.

        Raises
        ------
        InputError
            No messages, a role other than system, user and assistant, the last one not the user's, or an order of
            roles that the template refuses.
        """
        _check_messages(messages)
        if not self._has_template:
            return _plain(messages)
        try:
            return self._apply(messages, generation=True)
        except Exception as error:  # a template is a program, and may raise whatever it likes
            raise InputError(f"The model's chat template refuses these messages: {_reason(error)}") from error

    def history(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a whole conversation; errors as `render`."""
        return self._encode_start(self.render(messages))

    def reply(self, text: str, *, ended: bool) -> list[int]:
        """Tokens of a reply that is known as text alone; ``ended`` if it ended its turn itself."""
        ids = self._encode(text)
        return [*ids, int(self._tokenizer.eos_token_id)] if ended and self._tokenizer.eos_token_id is not None else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(token_ids)))

    def reply_text(self, stops: Sequence[str] = ()) -> ReplyText:
        """Where a new reply's tokens become text.

        Raises
        ------
        InputError
            A stop string is empty.
        """
        return ReplyText(self._tokenizer, self._eos_token_ids, stops)

    def _apply(self, messages: Sequence[Message], *, generation: bool) -> str:
        plain = [dict(message) for message in messages]
        rendered = self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=generation)
        return str(rendered)

    def _after(self, sentinel: str, messages: Sequence[Message], *, generation: bool = True) -> str | None:
        """What the template puts after the sentinel; None if it refuses the messages, or drops the sentinel."""
        try:
            _, found, after = self._apply(messages, generation=generation).rpartition(sentinel)
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
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        stands_in = (
            last[0] in self._eos_token_ids
            and middle[:1] != last[:1]
            and middle[0] in special
            and any(id_ in special for id_ in middle[1:])
        )
        return self._eos_token_ids | {middle[0]} if stands_in else self._eos_token_ids

    def _next_as_new(self, message: str, last_id: int | None) -> list[int]:
        """The message as if it began a conversation, for templates that render no reply: closed, without a BOS."""
        ids = self._encode(self.render([{"role": "user", "content": message}]))
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
        if self._has_template:
            return self._encode(text)
        ids = [int(id_) for id_ in self._tokenizer.encode(text, verbose=False)]  # too long a text is refused by us
        return ids[:-1] if ids and ids[-1] in self._eos_token_ids else ids


def _opening(reply: str) -> list[Message]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]


def _sentinel(text: str) -> str:
    """A word that is not in ``text``, and that no template changes."""
    n = 0
    while (word := f"Qz{n}xReplyx{n}zQ") in text:
        n += 1
    return word


def _plain_user(message: str) -> str:
    return f"User: {message}\n\nAssistant:"


def _plain(messages: Sequence[Message]) -> str:
    parts = []
    for message in messages:
        if message["role"] == "system":
            parts.append(message["content"])
        elif message["role"] == "user":
            parts.append(_plain_user(message["content"]))
        else:
            parts[-1] += f" {message['content']}"
    return "\n\n".join(parts)


def _check_text(message: str) -> None:
    if not message.strip():
        raise InputError("The message is empty.")


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise InputError("There are no messages.")
    for number, message in enumerate(messages):
        if message.get("role") not in _ROLES:
            raise InputError(f"Message {number} has the role {message.get('role')!r}; known: {', '.join(_ROLES)}.")
        if not isinstance(message.get("content"), str):
            raise InputError(f"Message {number} has no text in 'content'.")
    if messages[-1]["role"] != "user":
        raise InputError("The last message must be the user's: the reply to it is what is asked for.")
    _check_text(messages[-1]["content"])


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
