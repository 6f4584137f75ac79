"""The routes: what each path takes and gives, who may ask, and how a refusal is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from amem.errors import StoreError
from amem.results import Event
from amem.serve.bodies import ChatBody, CompletionBody, CountBody, MessagesBody
from amem.serve.chat import ChatReply, TextReply, chat_wanted, texts_wanted
from amem.serve.description import description
from amem.serve.desk import ClientGoneError, Desk, Wanted, closing
from amem.serve.errors import HttpError, http_error
from amem.serve.keys import Keys
from amem.serve.messages import MessageReply, conversation_of, messages_wanted
from amem.serve.parts import Part, parts_of, raw_parts_of
from amem.serve.streaming import EventStream, server_event

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

log = logging.getLogger("amem.serve")

Json = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]
_EXPIRE_EVERY_S = 60.0
_LIMITS = ("too_long", "too_short", "string_too_long", "string_too_short")  # pydantic's types of errors


class App:
    """The application of one engine. ``hosts`` are the names under which it may be called; None: any."""

    def __init__(self, desk: Desk, keys: Keys, hosts: frozenset[str] | None = None) -> None:
        self._desk = desk
        self._keys = keys
        self._hosts = hosts
        status = desk.engine.status()
        self._model = model_id(status.model)
        self._fingerprint = f"amem-{status.fingerprint[:12]}-{status.codec}"
        self._context_length = status.context_length
        self._marks = desk.engine.reply_marks()
        self.routes = Starlette(
            routes=[
                self._route("/health", self._health, "GET", free=True),
                self._route("/openapi.json", self._description, "GET", free=True),
                self._route("/metrics", self._metrics, "GET"),
                self._route("/v1/models", self._models, "GET"),
                self._route("/v1/models/{model:path}", self._one_model, "GET"),
                self._route("/v1/chat/completions", self._chat, "POST"),
                self._route("/v1/completions", self._completions, "POST"),
                self._route("/v1/messages", self._messages, "POST"),
                self._route("/v1/messages/count_tokens", self._count_tokens, "POST"),
            ],
            lifespan=self._lifespan,
            exception_handlers={404: _not_found, 405: _not_found},
        )
        self.routes.router.redirect_slashes = False  # it would answer with a name that the client made up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.routes(scope, receive, send)
        except asyncio.CancelledError:
            if not self._desk.closed:
                raise  # else a stream is cut off, as it must be: nothing that a log should tell of
        except Exception as error:  # noqa: BLE001  # a server's log would show its words, which may be a client's
            _report("the end of a request", error)

    def close(self) -> None:
        """End all requests: their clients are told to come back."""
        self._desk.close()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self._expire())
        yield
        task.cancel()

    async def _expire(self) -> None:
        every = min(_EXPIRE_EVERY_S, self._desk.limits.idle_s)
        while True:
            await asyncio.sleep(every)
            try:
                await self._desk.expire(self._keys.domains)
            except Exception as error:  # noqa: BLE001  # the next round may go better; this one must not end them all
                _report("the deletion of idle sessions", error)

    # -- every request -----------------------------------------------------------------------------------------------

    def _route(self, path: str, handler: Handler, method: str, *, free: bool = False) -> Route:
        async def guarded(request: Request) -> Response:
            try:
                self._check_host(request)
                if not free:
                    request.state.domain = self._domain(request)
                response = await handler(request)
            except (ClientGoneError, ClientDisconnect):
                response = Response(status_code=499)  # nobody reads it
            except asyncio.CancelledError:
                if not self._desk.closed:
                    raise
                told = closing()  # the server ends, and waits no longer
                response = JSONResponse(told.told(path), told.status, told.headers)
            except Exception as error:  # noqa: BLE001  # whatever it was, the client is told and the log keeps no text
                told = _told(path, error)
                response = JSONResponse(told.told(path), told.status, told.headers)
            self._desk.measures.request(path, response.status_code)
            return response

        return Route(path, guarded, methods=[method])

    def _check_host(self, request: Request) -> None:
        """Only names of this machine, so that no page of a browser reaches it under a name of its own."""
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self._hosts is not None and name.lower() not in self._hosts:
            raise HttpError(403, "this server answers to names of its own machine only.", code="wrong_host")

    def _domain(self, request: Request) -> str:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        sent = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key")
        domain = self._keys.domain_of(sent)
        if domain is None:
            raise HttpError(
                401,
                "no such API key: send the server's as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return domain

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        """The request's body, checked."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HttpError(415, "the body must be JSON, with 'Content-Type: application/json'.", code="no_json")
        raw = bytearray()
        async with self._desk.arriving():
            async for piece in request.stream():
                raw += piece
                if len(raw) > self._desk.limits.body_bytes:
                    most = self._desk.limits.body_bytes
                    raise HttpError(413, f"the body has more than {most} bytes.", code="too_large")
        try:
            return kind.model_validate_json(bytes(raw))
        except ValidationError as error:
            raise _misfit(error) from None

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model:
            raise HttpError(
                404, f"there is no model {name!r} here: use {self._model!r}.", code="model_not_found", param="model"
            )

    @staticmethod
    def _agent(request: Request, named: str | None) -> str | None:
        """The agent that a request names, in its body or in a header."""
        try:
            names = {
                header.encode("latin-1").decode() for header in request.headers.getlist("x-agent")
            }  # sent as bytes
        except UnicodeDecodeError:
            raise HttpError(400, "X-Agent is not UTF-8.", param="agent") from None
        if "" in names:
            raise HttpError(400, "X-Agent is empty: give a name, or leave it out.", param="agent")
        names |= set() if named is None else {named}
        if len(names) > 1:
            raise HttpError(400, "X-Agent and the field agent name two agents: give one.", param="agent")
        return names.pop() if names else None

    # -- replies -----------------------------------------------------------------------------------------------------

    async def _answer(
        self,
        request: Request,
        wanted: Sequence[Wanted],
        whole: Callable[[list[AsyncIterator[Part]]], Awaitable[Json]],
        chunks: Callable[[list[AsyncIterator[Part]]], AsyncIterator[str]] | None,
    ) -> Response:
        """The reply, whole; or as a stream, once it is sure that there is one."""
        async with contextlib.AsyncExitStack() as stack:
            streams = await stack.enter_async_context(
                self._desk.take(request.state.domain, wanted, lambda: _until_gone(request))
            )
            firsts = [
                await anext(events) for events in streams
            ]  # what cannot be served is refused before a stream begins
            parts = [
                self._parts(one, _joined(first, events))
                for one, first, events in zip(wanted, firsts, streams, strict=True)
            ]
            if chunks is None:
                return JSONResponse(await whole(parts))
            return EventStream(chunks(parts), stack.pop_all(), _stream_error(request.url.path))

    def _parts(self, wanted: Wanted, events: AsyncIterator[Event]) -> AsyncIterator[Part]:
        if wanted.text is not None:
            return raw_parts_of(events)
        return parts_of(events, self._marks, self._desk.engine.said, with_tools=bool(wanted.tools))

    async def _chat(self, request: Request) -> Response:
        body = await self._read(request, ChatBody)
        self._check_model(body.model)
        wanted = chat_wanted(body, self._agent(request, body.agent), self._marks, self._desk.limits.max_tokens)
        reply = ChatReply(self._model, self._fingerprint, bool(body.logprobs), body.with_usage)
        return await self._answer_one(request, wanted, reply, stream=bool(body.stream))

    async def _completions(self, request: Request) -> Response:
        body = await self._read(request, CompletionBody)
        self._check_model(body.model)
        wanted = texts_wanted(body, self._agent(request, body.agent), self._desk.limits.max_tokens)
        reply = TextReply(self._model, self._fingerprint, body.logprobs is not None, body.with_usage)
        return await self._answer(request, wanted, reply.whole, reply.chunks if body.stream else None)

    async def _messages(self, request: Request) -> Response:
        body = await self._read(request, MessagesBody)
        self._check_model(body.model)
        wanted = messages_wanted(body, self._agent(request, body.agent), self._marks)
        return await self._answer_one(request, wanted, MessageReply(self._model), stream=bool(body.stream))

    async def _answer_one(
        self, request: Request, wanted: Wanted, reply: ChatReply | MessageReply, *, stream: bool
    ) -> Response:
        return await self._answer(
            request,
            [wanted],
            lambda parts: reply.whole(parts[0]),
            (lambda parts: reply.chunks(parts[0])) if stream else None,
        )

    async def _count_tokens(self, request: Request) -> Response:
        body = await self._read(request, CountBody)
        self._check_model(body.model)
        wanted = Wanted({}, *conversation_of(body, self._marks))
        return JSONResponse({"input_tokens": await self._desk.count(wanted)})

    # -- the rest ----------------------------------------------------------------------------------------------------

    async def _health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._model})

    async def _description(self, _request: Request) -> Response:
        return JSONResponse(description(self._model, with_keys=bool(self._keys)))

    async def _metrics(self, _request: Request) -> Response:
        measures = self._desk.measures
        status = await asyncio.to_thread(self._desk.engine.status)
        return Response(measures.text(status), media_type=measures.content_type)

    async def _models(self, _request: Request) -> Response:
        page = {"has_more": False, "first_id": self._model, "last_id": self._model}
        return JSONResponse({"object": "list", "data": [self._model_entry()], **page})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model_entry())

    def _model_entry(self) -> Json:
        """In the form of OpenAI and in that of Anthropic at once."""
        entry = {"id": self._model, "object": "model", "created": 0, "owned_by": "amem"}
        named = {"type": "model", "display_name": self._model, "created_at": "1970-01-01T00:00:00Z"}
        return entry | named | {"context_length": self._context_length}


def model_id(name: str) -> str:
    """What clients call the model: its name, or its folder's; they need not know where that lies."""
    return Path(name).name if Path(name).is_absolute() or Path(name).is_dir() else name


async def _joined(first: Event, rest: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for event in rest:
        yield event


async def _until_gone(request: Request) -> None:
    """Comes to its end when the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "no such path" if status == 404 else "this path does not take that method"
    served = "/v1/chat/completions, /v1/completions, /v1/messages and /v1/models"
    told = HttpError(status, f"{what}; there are {served}, and /openapi.json describes them.")
    return JSONResponse(told.told(request.url.path), status, getattr(error, "headers", None))


def _stream_error(path: str) -> Callable[[Exception], str | None]:
    """How an error is told in a stream that has begun; None: nobody is there."""

    def tell(error: Exception) -> str | None:
        if isinstance(error, ClientGoneError):
            return None
        return server_event(_told(path, error).told(path), "error" if path == "/v1/messages" else None)

    return tell


def _misfit(error: ValidationError) -> HttpError:
    """The first field that is not as it should be, and why."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    field = found[0]["loc"][:1]
    # of a field's alternatives, one that only breaks a limit is the one that was meant
    broken = [one for one in found if one["loc"][:1] == field and one["type"] in _LIMITS]
    if not broken:
        first = found[0]
        where = ".".join(map(str, first["loc"]))
        return HttpError(400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None)
    where = ".".join(part for part in map(str, broken[0]["loc"]) if not part.endswith((")", "]", "-str")))
    return HttpError(400, f"{where}: {broken[0]['msg']}", param=where)


def _told(path: str, error: Exception) -> HttpError:
    """What the client is told of an error; what it could do nothing about is logged."""
    told = http_error(error)
    if told is None:
        _report(path, error)
        return HttpError(500, "an error inside the server; its log says where.", kind="server_error")
    if isinstance(error, StoreError) and told.status == 503:
        cause = error.__cause__  # the system's words hold paths at most; ours may hold a name
        reason = str(cause) if isinstance(cause, (OSError, sqlite3.Error)) else "no error of the system's"
        log.error("%s: the store failed with %s: %s", path, type(error).__name__, reason)
    return told


def _report(where: str, error: Exception) -> None:
    """Log an unexpected error: its kind and its place. Its words may hold a client's text, and are left out."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s failed with %s, at\n%s", where, type(error).__name__, frames)
