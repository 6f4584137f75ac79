"""/v1/chat/completions and /v1/completions: replies in the forms of OpenAI."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amem.results import Alternative, Reply, ReplyMetrics, TokenLogprob
from amem.serve.bodies import ChatBody, CompletionBody
from amem.serve.desk import Wanted
from amem.serve.errors import HttpError
from amem.serve.parts import Part

if TYPE_CHECKING:
    from amem.model.said import Call, ReplyMarks

Json = dict[str, Any]


def chat_wanted(body: ChatBody, agent: str | None, marks: ReplyMarks, max_tokens: int) -> Wanted:
    """What a chat request asks for.

    Raises
    ------
    HttpError
        It gives tools, and the model's chat template has no place for them.
    """
    tools = tools_for(marks, body.tools, wanted=body.tool_choice != "none")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs is not None and logprobs is None:
        raise HttpError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    n = body.max_completion_tokens or body.max_tokens or max_tokens
    settings = body.sampling(n, body.stops, body.seed, logprobs)
    return Wanted(settings, [message.plain() for message in body.messages], tools, agent=agent or body.agent)


def text_wanted(body: CompletionBody, agent: str | None, max_tokens: int) -> Wanted:
    """What a completion request asks for."""
    settings = body.sampling(body.max_tokens or max_tokens, body.stops, body.seed, body.logprobs)
    return Wanted(settings, text=body.text, agent=agent or body.agent)


def tools_for(marks: ReplyMarks, tools: Sequence[Json] | None, *, wanted: bool) -> Sequence[Json]:
    """The tools that the model is shown.

    Raises
    ------
    HttpError
        It cannot be shown any.
    """
    if not tools or not wanted:
        return ()
    if not marks.takes_tools:
        raise HttpError(
            400, "this model's chat template has no place for tools: leave them out.", code="unsupported", param="tools"
        )
    return tools


def metrics_of(metrics: ReplyMetrics) -> Json:
    """What the request cost, as plain values. Blocks are left to the notebook, and a client knows the model's name."""
    return {name: value for name, value in metrics.to_dict().items() if name not in ("blocks", "model")}


def usage_of(metrics: ReplyMetrics) -> Json:
    """Tokens: cached are those whose K and V were really reused."""
    return {
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.generated_tokens,
        "total_tokens": metrics.prompt_tokens + metrics.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": metrics.reused_tokens},
    }


@dataclass
class ChatReply:
    """One chat reply, whole or as chunks."""

    model: str
    fingerprint: str
    with_logprobs: bool
    with_usage: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, parts: AsyncIterator[Part]) -> Json:
        """The body of a reply that is not streamed."""
        text = thought = ""
        calls: list[Json] = []
        logprobs: list[Json] = []
        reply: Reply | None = None
        async for part in parts:
            text += part.text
            thought += part.thought
            logprobs += _chat_logprobs(part.logprobs)
            if part.call is not None:
                calls.append(_call(part.call))
            reply = part.reply or reply
        assert reply is not None
        message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": logprobs, "refusal": None} if self.with_logprobs else None,
            "finish_reason": "tool_calls" if calls else reply.finish_reason,
        }
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage_of(reply.metrics),
            "amem": metrics_of(reply.metrics),
        }

    async def chunks(self, parts: AsyncIterator[Part]) -> AsyncIterator[str]:
        """The events of a stream."""
        yield self._chunk({"role": "assistant", "content": ""})
        n_calls = 0
        async for part in parts:
            if part.thought:
                yield self._chunk({"reasoning_content": part.thought})
            if part.text or (part.logprobs and self.with_logprobs):
                yield self._chunk({"content": part.text}, logprobs=part.logprobs)
            if part.call is not None:
                yield self._chunk({"tool_calls": [{"index": n_calls, **_call(part.call)}]})
                n_calls += 1
            if part.reply is not None:
                reason = "tool_calls" if n_calls else part.reply.finish_reason
                yield self._chunk({}, reason, amem=metrics_of(part.reply.metrics))
                if self.with_usage:
                    last = {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_of(part.reply.metrics)}
                    yield server_event(last)
        yield "data: [DONE]\n\n"

    def _chunk(
        self, delta: Json, reason: str | None = None, logprobs: tuple[TokenLogprob, ...] = (), **more: object
    ) -> str:
        told = {"content": _chat_logprobs(logprobs), "refusal": None} if self.with_logprobs and logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": told, "finish_reason": reason}
        usage = {"usage": None} if self.with_usage else {}
        return server_event({**self._head("chat.completion.chunk"), "choices": [choice], **usage, **more})

    def _head(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass
class TextReply:
    """One completion, whole or as chunks."""

    model: str
    fingerprint: str
    with_logprobs: bool
    with_usage: bool = False
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, parts: AsyncIterator[Part]) -> Json:
        """The body of a reply that is not streamed."""
        text, logprobs = "", list[TokenLogprob]()
        reply: Reply | None = None
        async for part in parts:
            text += part.text
            logprobs += part.logprobs
            reply = part.reply or reply
        assert reply is not None
        return {
            **self._body(text, reply.finish_reason, logprobs, 0),
            "usage": usage_of(reply.metrics),
            "amem": metrics_of(reply.metrics),
        }

    async def chunks(self, parts: AsyncIterator[Part]) -> AsyncIterator[str]:
        """The events of a stream."""
        offset = 0
        async for part in parts:
            if part.text or (part.logprobs and self.with_logprobs):
                yield server_event(self._body(part.text, None, part.logprobs, offset))
                offset += sum(len(entry.text) for entry in part.logprobs)
            if part.reply is not None:
                done = self._body("", part.reply.finish_reason, (), offset)
                yield server_event({**done, "amem": metrics_of(part.reply.metrics)})
                if self.with_usage:
                    yield server_event({**done, "choices": [], "usage": usage_of(part.reply.metrics)})
        yield "data: [DONE]\n\n"

    def _body(self, text: str, reason: str | None, logprobs: Sequence[TokenLogprob], offset: int) -> Json:
        told = _text_logprobs(logprobs, offset) if self.with_logprobs and (logprobs or reason is None) else None
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": [{"index": 0, "text": text, "logprobs": told, "finish_reason": reason}],
        }


def server_event(data: Json, name: str | None = None) -> str:
    """One server-sent event."""
    heading = f"event: {name}\n" if name else ""
    return f"{heading}data: {json.dumps(data, ensure_ascii=False)}\n\n"


def call_id() -> str:
    """An id for a tool call, by which its answer names it."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _call(call: Call) -> Json:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call_id(), "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _chat_logprobs(entries: Iterable[TokenLogprob]) -> list[Json]:
    return [{**_alternative(entry), "top_logprobs": [_alternative(one) for one in entry.top]} for entry in entries]


def _alternative(entry: Alternative) -> Json:
    whole = "\ufffd" not in entry.text  # a part of a character has no text of its own
    return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.text.encode()) if whole else None}


def _text_logprobs(entries: Sequence[TokenLogprob], offset: int) -> Json:
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{one.text: one.logprob for one in entry.top} for entry in entries],
        "text_offset": offsets,
    }
