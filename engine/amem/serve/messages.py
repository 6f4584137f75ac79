"""/v1/messages: requests and replies in the forms of Anthropic."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amem.results import Reply, ReplyMetrics
from amem.serve.bodies import CountBody, MessagesBody, MessagesMessage
from amem.serve.chat import metrics_of, tools_for
from amem.serve.desk import Wanted
from amem.serve.errors import HttpError
from amem.serve.parts import Part, whole_of
from amem.serve.streaming import server_event

if TYPE_CHECKING:
    from amem.model.said import Call, ReplyMarks

Json = dict[str, Any]


def messages_wanted(body: MessagesBody, agent: str | None, marks: ReplyMarks) -> Wanted:
    """What a request asks for; errors as `conversation_of`."""
    settings = body.sampling(body.max_tokens, body.stop_sequences or [], None, None)
    return Wanted(settings, *conversation_of(body, marks), agent=agent)


def conversation_of(body: CountBody, marks: ReplyMarks) -> tuple[list[Json], list[Json]]:
    """A body's blocks as messages of the engine, and its tools as chat templates know them.

    Raises
    ------
    HttpError
        A block that is neither text, nor a tool's call or answer; or tools that the model cannot be shown.
    """
    messages: list[Json] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for message in body.messages:
        messages += _messages(message)
    tools = tools_for(marks, body.tools, wanted=body.tool_choice != {"type": "none"})
    return messages, [_tool(tool) for tool in tools]


@dataclass
class MessageReply:
    """One message, whole or as events."""

    model: str
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    async def whole(self, parts: AsyncIterator[Part]) -> Json:
        """The body of a reply that is not streamed. A thought is no part of it."""
        whole = await whole_of(parts)
        content = [_block(call) for call in whole.calls]
        if whole.text or not content:
            content.insert(0, {"type": "text", "text": whole.text})
        metrics = whole.reply.metrics
        return {**self._message(content), **_end(whole.reply, content), "usage": usage_of(metrics),
                "amem": metrics_of(metrics)}  # fmt: skip

    async def chunks(self, parts: AsyncIterator[Part]) -> AsyncIterator[str]:
        """The events of a stream. What was reused is known, and told, at its end."""
        start = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=start | {"usage": {"input_tokens": 0, "output_tokens": 0}})
        blocks: list[Json] = []
        has_text = False
        async for part in parts:
            if part.text and not has_text:
                has_text = True
                yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
                blocks.append({"type": "text"})
            if part.text:
                yield _delta(0, {"type": "text_delta", "text": part.text})
            if part.call is not None:
                if has_text and len(blocks) == 1:
                    yield _event("content_block_stop", index=0)
                block = _block(part.call)
                for event in _call_events(len(blocks), block):
                    yield event
                blocks.append(block)
            if part.reply is not None:
                if has_text and len(blocks) == 1:
                    yield _event("content_block_stop", index=0)
                yield _event(
                    "message_delta",
                    delta=_end(part.reply, blocks),
                    usage=usage_of(part.reply.metrics),
                    amem=metrics_of(part.reply.metrics),
                )
        yield _event("message_stop")

    def _message(self, content: Sequence[Json]) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": list(content)}


def usage_of(metrics: ReplyMetrics) -> Json:
    """Tokens; here those that were read from a cache are not counted among the input's."""
    return {
        "input_tokens": metrics.computed_tokens,
        "output_tokens": metrics.generated_tokens,
        "cache_read_input_tokens": metrics.reused_tokens,
        "cache_creation_input_tokens": 0,
    }


def _event(name: str, **data: object) -> str:
    return server_event({"type": name, **data}, name)


def _delta(index: int, delta: Json) -> str:
    return _event("content_block_delta", index=index, delta=delta)


def _call_events(index: int, block: Json) -> Iterator[str]:
    yield _event("content_block_start", index=index, content_block=block | {"input": {}})
    yield _delta(index, {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)})
    yield _event("content_block_stop", index=index)


def _end(reply: Reply, content: Sequence[Json]) -> Json:
    if any(block["type"] == "tool_use" for block in content):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reply.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": "max_tokens" if reply.finish_reason == "length" else "end_turn", "stop_sequence": None}


def _block(call: Call) -> Json:
    arguments = call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name, "input": arguments}


# -- what came in ----------------------------------------------------------------------------------------------------


def _messages(message: MessagesMessage) -> list[Json]:
    """A message's blocks: its text and calls are one message, each tool's answer is another, before it."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    answers: list[Json] = []
    texts: list[Json] = []
    calls: list[Json] = []
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_result" and message.role == "user":
            answer = _text(block.get("content") or "", "a tool's result")
            answers.append({"role": "tool", "content": answer, "tool_call_id": block.get("tool_use_id")})
        elif kind == "tool_use" and message.role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            texts.append(block)
    if not texts and answers:
        return answers
    plain: Json = {"role": message.role, "content": _text(texts, "a message")}
    return [*answers, plain | ({"tool_calls": calls} if calls else {})]


def _text(content: object, what: str) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    texts = []
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise HttpError(400, f"{what} can only hold blocks of type 'text' here.", param="content")
        texts.append(block["text"])
    return "".join(texts)


def _tool(tool: Json) -> Json:
    """A tool as chat templates know it."""
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema", {}), dict):
        raise HttpError(400, "each tool needs a name and an input_schema.", param="tools")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}
