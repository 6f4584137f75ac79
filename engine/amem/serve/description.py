"""The server's OpenAPI description, made of the same classes that check the bodies."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from amem.serve.bodies import ChatBody, CompletionBody, CountBody, MessagesBody

Json = dict[str, Any]

_REFUSALS = {
    400: "The request cannot be served as given; nothing has changed.",
    401: "No such API key.",
    403: "Called under a name that is not this machine's.",
    404: "No such model.",
    408: "The request took too long; its agent is as it was before.",
    409: "The agent is in use by another process, or the request was cancelled.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests run or wait; Retry-After says when to come back.",
    503: "The server is closing.",
}
_AGENT: Json = {
    "name": "X-Agent",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[A-Za-z0-9_-]+$"},
    "description": "The agent that answers, as the field agent does.",
}
_MODEL: Json = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def description(model: str, *, with_keys: bool) -> Json:
    """The OpenAPI 3.1 document."""
    bodies = (ChatBody, CompletionBody, MessagesBody, CountBody)
    _, found = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: Json = {
        "/v1/chat/completions": _post(
            "ChatBody", "Reply to a conversation, as OpenAI's clients ask for it.", "choices"
        ),
        "/v1/completions": _post("CompletionBody", "Continue a text as it stands.", "choices"),
        "/v1/messages": _post("MessagesBody", "Reply to a conversation, as Anthropic's clients ask for it.", "content"),
        "/v1/messages/count_tokens": _post(
            "CountBody", "How many tokens a conversation takes.", "input_tokens", replies=False
        ),
        "/v1/models": _get("The model that is loaded.", _schema("object", "data")),
        "/v1/models/{model}": _get("One model.", _schema("id", "object"), 404, parameters=[_MODEL]),
        "/health": _get("Whether the server answers.", _schema("status"), free=True),
        "/metrics": _get("Figures for Prometheus.", None),
    }
    components: Json = {"schemas": found["$defs"]}
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": f"amem: {model}", "version": version("amem")},
        "paths": paths,
        "components": components,
    }
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _post(body: str, text: str, part: str, *, replies: bool = True) -> Json:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body}"}}}
    of_reply = ("id", "model", "usage", "amem") if replies else ()
    given: Json = {"application/json": {"schema": _schema(part, *of_reply)}}
    if replies:
        given["text/event-stream"] = {"schema": {"type": "string"}}
    reply = {"description": "The reply; with stream, as server-sent events." if replies else text, "content": given}
    return {
        "post": {
            "summary": text,
            "parameters": [_AGENT] if replies else [],
            "requestBody": {"required": True, "content": content},
            "responses": {"200": reply, **{str(status): _refusal(status) for status in _REFUSALS}},
        }
    }


def _get(text: str, schema: Json | None, *more: int, parameters: list[Json] | None = None, free: bool = False) -> Json:
    content = {"application/json": {"schema": schema}} if schema else {"text/plain": {"schema": {"type": "string"}}}
    statuses = (403, *more) if free else (401, 403, *more)
    responses = {
        "200": {"description": text, "content": content},
        **{str(status): _refusal(status) for status in statuses},
    }
    return {"get": {"summary": text, "parameters": parameters or [], "responses": responses,
                    **({"security": []} if free else {})}}  # fmt: skip


def _refusal(status: int) -> Json:
    return {"description": _REFUSALS[status], "content": {"application/json": {"schema": _schema("error")}}}


def _schema(*required: str) -> Json:
    return {"type": "object", "required": list(required)}
