"""/v1/chat/completions and /v1/completions: replies in the forms of OpenAI."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from amem.results import Alternative, ReplyMetrics, TokenLogprob
from amem.serve.bodies import ChatBody, CompletionBody
from amem.serve.desk import Wanted
from amem.serve.errors import HttpError
from amem.serve.parts import Part, whole_of
from amem.serve.streaming import server_event

if TYPE_CHECKING:
    from amem.model.said import Call, ReplyMarks

Json = dict[str, Any]
DONE = "data: [DONE]\n\n"  #: the last event of a stream
_LEAST = -9999.0  # JSON has no minus infinity; clients know this number in its place


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
    return Wanted(settings, [message.plain() for message in body.messages], tools, agent=agent)


def texts_wanted(body: CompletionBody, agent: str | None, max_tokens: int) -> list[Wanted]:
    """What a completion request asks for, for each of its texts."""
    settings = body.sampling(body.max_tokens or max_tokens, body.stops, body.seed, body.logprobs)
    return [Wanted(settings, text=text, agent=agent) for text in body.texts]


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


def usage_of(costs: Sequence[ReplyMetrics]) -> Json:
    """Tokens of all choices: cached are those whose K and V were really reused."""
    n_prompt, n_generated = (sum(one.prompt_tokens for one in costs), sum(one.generated_tokens for one in costs))
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": sum(one.reused_tokens for one in costs)},
    }


@dataclass
class _OpenAIReply:
    """What both kinds of replies tell of themselves."""

    model: str
    fingerprint: str
    with_logprobs: bool
    with_usage: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    kind: ClassVar[str]
    prefix: ClassVar[str]  #: of the id

    def _body(self, choices: Sequence[Json], **more: object) -> Json:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


@dataclass
class ChatReply(_OpenAIReply):
    """One chat reply, whole or as chunks."""

    kind: ClassVar[str] = "chat.completion"
    prefix: ClassVar[str] = "chatcmpl"

    async def whole(self, parts: AsyncIterator[Part]) -> Json:
        """The body of a reply that is not streamed."""
        whole = await whole_of(parts)
        text, calls = whole.text, [_call(call) for call in whole.calls]
        message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if whole.thought:
            message["reasoning_content"] = whole.thought
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(whole.logprobs) if self.with_logprobs else None,
            "finish_reason": "tool_calls" if calls else whole.reply.finish_reason,
        }
        metrics = whole.reply.metrics
        return self._body([choice], usage=usage_of([metrics]), amem=metrics_of(metrics))

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
                    yield self._event([], usage=usage_of([part.reply.metrics]))
        yield DONE

    def _chunk(
        self, delta: Json, reason: str | None = None, logprobs: tuple[TokenLogprob, ...] = (), **more: object
    ) -> str:
        told = self._logprobs(logprobs) if self.with_logprobs and logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": told, "finish_reason": reason}
        usage = {"usage": None} if self.with_usage else {}
        return self._event([choice], **usage, **more)

    def _event(self, choices: Sequence[Json], **more: object) -> str:
        return server_event({**self._body(choices, **more), "object": f"{self.kind}.chunk"})

    @staticmethod
    def _logprobs(entries: Iterable[TokenLogprob]) -> Json:
        told = [{**_alternative(entry), "top_logprobs": [_alternative(one) for one in entry.top]} for entry in entries]
        return {"content": told, "refusal": None}


@dataclass
class TextReply(_OpenAIReply):
    """The completions of some texts, a choice for each, whole or as chunks."""

    kind: ClassVar[str] = "text_completion"
    prefix: ClassVar[str] = "cmpl"

    async def whole(self, parts: Sequence[AsyncIterator[Part]]) -> Json:
        """The body of a reply that is not streamed."""
        choices, costs = [], []
        for index, of_one in enumerate(parts):
            whole = await whole_of(of_one)
            choices.append(self._choice(index, whole.text, whole.reply.finish_reason, whole.logprobs))
            costs.append(whole.reply.metrics)
        told = [metrics_of(metrics) for metrics in costs]
        return self._body(choices, usage=usage_of(costs), amem=told if len(told) > 1 else told[0])

    async def chunks(self, parts: Sequence[AsyncIterator[Part]]) -> AsyncIterator[str]:
        """The events of a stream: those of the first text, then those of the next, which was computed meanwhile."""
        costs = []
        for index, of_one in enumerate(parts):
            offset = 0
            async for part in of_one:
                if part.text or (part.logprobs and self.with_logprobs):
                    yield server_event(self._body([self._choice(index, part.text, None, part.logprobs, offset)]))
                    offset += sum(len(entry.text) for entry in part.logprobs)
                if part.reply is not None:
                    last = self._choice(index, "", part.reply.finish_reason)
                    yield server_event(self._body([last], amem=metrics_of(part.reply.metrics)))
                    costs.append(part.reply.metrics)
        if self.with_usage:
            yield server_event(self._body([], usage=usage_of(costs)))
        yield DONE

    def _choice(
        self, index: int, text: str, reason: str | None, logprobs: Sequence[TokenLogprob] = (), offset: int = 0
    ) -> Json:
        told = _text_logprobs(logprobs, offset) if self.with_logprobs and (logprobs or reason is None) else None
        return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}


def _call(call: Call) -> Json:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _alternative(entry: Alternative) -> Json:
    whole = "\ufffd" not in entry.text  # a part of a character has no text of its own
    return {
        "token": entry.text,
        "logprob": max(entry.logprob, _LEAST),
        "bytes": list(entry.text.encode()) if whole else None,
    }


def _text_logprobs(entries: Sequence[TokenLogprob], offset: int) -> Json:
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [max(entry.logprob, _LEAST) for entry in entries],
        "top_logprobs": [{one.text: max(one.logprob, _LEAST) for one in entry.top} for entry in entries],
        "text_offset": offsets,
    }
