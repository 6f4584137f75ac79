"""Fingerprints of a conversation's beginnings, by which the session that said the same is found. They hold no text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amem.model.said import Said

PIECE = 256  #: characters; about a group of 64 tokens, the least that can be reused


@dataclass(frozen=True)
class Mark:
    """A beginning of a conversation."""

    digest: bytes  #: of all the text up to here
    n_chars: int  #: of text up to here


def marks_of(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], said: Callable[[str], Said]
) -> list[Mark]:
    """The marks of a conversation in plain form: after each 256 characters of a message, and at its end.

    Parameters
    ----------
    messages, tools
        In the plain form of `amem.model.messages`.
    said
        Takes a reply apart. A reply counts as the same without its thought, with other white space around it, or with
        its tool calls in a field of their own. What is the same here need not be continued in the end: that is decided
        message by message, by the agent itself.
    """
    chain = _Chain(b"chat" + json.dumps(tools, sort_keys=True).encode())
    return [mark for message in messages for mark in chain.add(*_heading_and_text(message, said))]


def marks_of_text(text: str) -> list[Mark]:
    """The marks of a bare text."""
    return list(_Chain(b"text").add("", text, ended=False))


class _Chain:
    def __init__(self, root: bytes) -> None:
        self._digest = hashlib.blake2b(root, digest_size=16).digest()
        self._n_chars = 0

    def add(self, heading: str, text: str, *, ended: bool = True) -> Iterator[Mark]:
        self._digest = self._after(heading)
        for start in range(0, len(text) - PIECE + 1, PIECE):
            yield self._mark(text[start : start + PIECE])
        rest = text[len(text) // PIECE * PIECE :]
        if rest or ended:
            yield self._mark(rest, "\0end")

    def _mark(self, piece: str, ending: str = "") -> Mark:
        self._digest = self._after(piece + ending)
        self._n_chars += len(piece)
        return Mark(self._digest, self._n_chars)

    def _after(self, text: str) -> bytes:
        return hashlib.blake2b(self._digest + text.encode(), digest_size=16).digest()


def _heading_and_text(message: Mapping[str, Any], said: Callable[[str], Said]) -> tuple[str, str]:
    rest = {key: value for key, value in message.items() if key not in ("content", "tool_calls", "reasoning_content")}
    content = str(message["content"])
    if message["role"] == "assistant":
        read = said(content)
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        calls = calls or [{"name": call.name, "arguments": call.arguments} for call in read.calls]
        content = json.dumps(calls, sort_keys=True) if calls else read.answer
    return json.dumps(rest, sort_keys=True), content
