"""Where requests are taken in: how many at once, for which agent, until when, and what is told when one ends early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from amem.checks import check_text
from amem.errors import AgentLocked, Cancelled, ContextOverflow
from amem.model.messages import plain_messages, plain_tools
from amem.results import Event, Reply
from amem.serve.errors import HttpError
from amem.serve.keys import OWNER, SESSIONS
from amem.serve.limits import Limits
from amem.serve.marks import marks_of, marks_of_text
from amem.serve.measures import Measures
from amem.serve.named import NamedAgents
from amem.serve.sessions import Marks, Session, Sessions
from amem.serve.taken import Taken
from amem.serve.threads import in_thread
from amem.stream import queued_request

if TYPE_CHECKING:
    from concurrent.futures import Future

    from amem.engine import Engine
    from amem.run.request import Request

COUNTED = 32_768  #: characters of a long text that are made tokens at once
_CHARS_PER_TOKEN = 6  # hardly any text has more; what has fewer is counted once, and what is longer is counted before
_CUT_TOKENS = 16  # that a piece may have more than its part of the whole: at its two ends, and a BOS


class ClientGoneError(Exception):
    """Nobody is there to be told."""


@dataclass(frozen=True)
class Wanted:
    """What a request asks for, whichever API it came by."""

    settings: Mapping[str, Any]  #: max_tokens, temperature, top_p, seed, stop, logprobs
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    text: str | None = None  #: a bare text in place of messages
    agent: str | None = None  #: None: a session without a name

    def submit(self, engine: Engine, name: str) -> Future[Request]:
        """Queue it for an agent."""
        if self.text is not None:
            return engine.submit_text(name, self.text, **self.settings)
        return engine.submit_chat(name, self.messages, tools=self.tools, **self.settings)

    def marks(self, engine: Engine, reply: str | None = None) -> Marks:
        """The marks of what is asked, or of that and its reply."""
        if self.text is not None:
            return marks_of_text(self.text + (reply or ""))
        messages = list(plain_messages(self.messages))
        said = [] if reply is None else [{"role": "assistant", "content": reply}]
        return marks_of([*messages, *said], plain_tools(self.tools), engine.said)


class Desk:
    """Takes requests to one engine. It belongs to one event loop."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine = engine
        self.limits = limits
        self.measures = Measures(lambda: self._n_taken, lambda: sum(map(len, self._sessions.values())))
        self.named = NamedAgents(limits.open_sessions)
        self.closed = False
        self._context_length = engine.status().context_length
        self._endings: set[_Ending] = set()
        self._arrivals: set[asyncio.Timeout] = set()
        self._n_taken = 0
        self._sessions: dict[str, Sessions] = {}
        self._mean_s = 1.0  # of late requests

    def space(self, domain: str) -> Engine:
        """The engine for a domain's named agents: the owner's are those of cells and of the command line."""
        return self.engine if domain == OWNER else self.engine.in_space(f"{self.engine.space}/{domain}")

    def sessions(self, domain: str) -> Sessions:
        """A domain's sessions without a name, in a space of their own."""
        if domain not in self._sessions:
            inside = self.space(domain)
            self._sessions[domain] = Sessions(inside.in_space(f"{inside.space}/{SESSIONS}"), self.limits)
        return self._sessions[domain]

    def close(self) -> None:
        """Take no more requests, and end those that run or are being read: their clients are told to come back."""
        self.closed = True
        for ending in self._endings:
            ending.close()
        for arrival in self._arrivals:
            if not arrival.expired():
                arrival.reschedule(asyncio.get_running_loop().time())

    def watch(self, ending: _Ending) -> None:
        """Have a request end with the server."""
        self._endings.add(ending)
        if self.closed:
            ending.close()

    def unwatch(self, ending: _Ending) -> None:
        """It has ended."""
        self._endings.discard(ending)

    @contextlib.asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """While a request is being read: for as long as it may take, and no longer than the server is open.

        Raises
        ------
            HttpError: its time is up, or the server ends.
        """
        try:
            async with asyncio.timeout(0 if self.closed else self.limits.timeout_s) as arrival:
                self._arrivals.add(arrival)
                try:
                    yield
                finally:
                    self._arrivals.discard(arrival)
        except TimeoutError:
            raise closing() if self.closed else self._late("the body did not come within") from None

    async def expire(self, domains: Iterable[str]) -> None:
        """Delete the sessions that were idle for too long, those of earlier servers too."""
        for domain in domains:
            await self.sessions(domain).expire()

    @contextlib.asynccontextmanager
    async def take(
        self, domain: str, wanted: Sequence[Wanted], gone: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[list[AsyncIterator[Event]]]:
        """The events of requests that came as one. They end with this context, with ``gone``, or when their time is up.

        Raises
        ------
            HttpError: too many requests are waiting, one is too long, their time is up, or the server ends.
            ClientGoneError: the client went away; the agent is as it was.
            AmemError: one cannot be served.
        """
        with self._admitted(len(wanted)):
            for one in wanted:
                await self._check_length(one)
            async with contextlib.AsyncExitStack() as stack:
                taken = [await self._queued(stack, domain, one) for one in wanted]
                end = stack.enter_context(_Ending([one.request for one in taken], gone, self))
                streams: list[AsyncIterator[Event]] = []
                for one, of_one in zip(wanted, taken, strict=True):
                    events = self._events(one, of_one, end)
                    streams.append(await stack.enter_async_context(contextlib.aclosing(events)))
                yield streams

    async def count(self, wanted: Wanted) -> int:
        """How many tokens a conversation takes. Raises HttpError as `take` does, and InputError if it is none."""
        with self._admitted(1):
            await self._check_length(wanted)
            return await in_thread(partial(self.engine.n_chat_tokens, wanted.messages, wanted.tools))

    async def _queued(self, stack: contextlib.AsyncExitStack, domain: str, wanted: Wanted) -> Taken:
        if wanted.agent is not None:
            engine = self.space(domain)
            await stack.enter_async_context(self.named.use(engine, wanted.agent))
            taken = Taken(await queued_request(wanted.submit(engine, wanted.agent)))
        else:
            taken = Taken(*await self._placed(stack, self.sessions(domain), wanted))
        stack.push_async_callback(taken.aclose)
        return taken

    async def _placed(
        self, stack: contextlib.AsyncExitStack, sessions: Sessions, wanted: Wanted
    ) -> tuple[Request, Callable[[Reply], None]]:
        """The request, queued for a session without a name; and what is to be done with its reply."""
        asked = wanted.marks(self.engine)
        while True:
            session = await stack.enter_async_context(sessions.place(asked))
            try:
                request = await queued_request(wanted.submit(sessions.engine, session.name))
            except AgentLocked:  # another server took the session over: this conversation goes on elsewhere
                if session.is_new:
                    raise
                sessions.forget(session)
                continue
            return request, partial(self._record, sessions, session, wanted, asked)

    def _record(self, sessions: Sessions, session: Session, wanted: Wanted, asked: Marks, reply: Reply) -> None:
        if reply.metrics.saved:
            sessions.record(session, asked, wanted.marks(self.engine, reply.text), reply.turn)

    async def _check_length(self, wanted: Wanted) -> None:
        """Refuse what is far too long before all of it is made tokens, which others would have to wait for.

        A long text, or what the chat template makes of long messages, is counted piece by piece, and others are served
        between two. What is not refused here is counted exactly later.
        """
        limit = self._context_length
        if wanted.text is not None:
            check_text("the text", wanted.text)
            text = wanted.text
        else:
            if len(wanted.messages) > limit:  # each takes a token at least
                raise _too_long(wanted, f"more than {limit}", limit)
            if len(json.dumps([wanted.messages, wanted.tools])) <= _CHARS_PER_TOKEN * limit:
                return
            text = await in_thread(partial(self.engine.chat_text, wanted.messages, wanted.tools))
        if len(text) <= _CHARS_PER_TOKEN * limit:
            return
        n_tokens = 0
        for start in range(0, len(text), COUNTED):
            piece = text[start : start + COUNTED]
            n_tokens += await in_thread(partial(self.engine.n_tokens, piece)) - _CUT_TOKENS
            if n_tokens > limit:
                raise _too_long(wanted, f"more than {n_tokens}", limit)

    @contextlib.contextmanager
    def _admitted(self, n: int) -> Iterator[None]:
        """While a client's requests run or wait."""
        if self.closed:
            raise closing()
        most = self.limits.requests
        if n > most:
            raise HttpError(
                400, f"{n} at once are more than this server takes on: send at most {most}.", param="prompt"
            )
        if self._n_taken + n > most:
            raise HttpError(
                429,
                f"{self._n_taken} requests run or wait already: come back later.",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(min(60, max(1, round(self._mean_s))))},
            )
        self._n_taken += n
        started = time.monotonic()
        try:
            yield
        finally:
            self._n_taken -= n
            self._mean_s += 0.1 * (time.monotonic() - started - self._mean_s)

    async def _events(self, wanted: Wanted, taken: Taken, end: _Ending) -> AsyncGenerator[Event, None]:
        try:
            async for event in taken:
                if event.reply is not None:
                    self.measures.reply(event.reply.metrics)
                yield event
        except ContextOverflow:
            raise _too_long(wanted, str(len(taken.request.prompt_ids)), self._context_length) from None
        except Cancelled:
            if end.gone:
                self.measures.gone()
                raise ClientGoneError from None
            if end.late:
                raise self._late("its agent is as it was before: the request took longer than") from None
            if self.closed:
                raise closing() from None
            raise

    def _late(self, what: str) -> HttpError:
        return HttpError(408, f"{what} {self.limits.timeout_s:g} s.", kind="timeout_error", code="timeout")


def closing() -> HttpError:
    """The refusal of a server that ends."""
    return HttpError(
        503,
        "the server is shutting down: send the request again later; nothing of it was kept.",
        kind="server_error",
        code="shutting_down",
        headers={"Retry-After": "5"},
    )


def _too_long(wanted: Wanted, n_tokens: str, limit: int) -> HttpError:
    """The refusal of a request for which the model has no room, in the client's terms."""
    said, param = ("these messages take", "messages") if wanted.text is None else ("this prompt takes", "prompt")
    most = wanted.settings.get("max_tokens")
    room = limit - int(n_tokens) if n_tokens.isdigit() else 0
    remedy = f"give max_tokens of at most {room}" if room > 0 else f"shorten the {param}"
    more = ", which" if most is None else f", and with max_tokens={most} that"
    return HttpError(
        400,
        f"{said} {n_tokens} tokens{more} is more than the model's context of {limit}: {remedy}.",
        code="context_length_exceeded",
        param=param,
    )


class _Ending:
    """Cancels a client's requests when it goes away, when their time is up, or when the server ends."""

    def __init__(self, requests: Sequence[Request], gone: Callable[[], Awaitable[object]], desk: Desk) -> None:
        self._requests = requests
        self._gone = gone
        self._desk = desk
        self.gone = False
        self.late = False

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self._desk.limits.timeout_s, self._time_is_up)
        self._watch = asyncio.ensure_future(self._wait())
        self._desk.watch(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self._watch.cancel()
        self._desk.unwatch(self)

    def close(self) -> None:
        """The server ends, or for another reason nobody waits for them any more."""
        for request in self._requests:
            request.cancel()

    def _time_is_up(self) -> None:
        self.late = True
        self.close()

    async def _wait(self) -> None:
        await self._gone()
        self.gone = True
        self.close()
