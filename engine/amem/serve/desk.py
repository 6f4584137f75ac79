"""Where requests are taken in: how many at once, for which agent, until when, and what is told when one ends early."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from amem.agent import events_of, queued_request
from amem.errors import AgentLocked, Cancelled
from amem.model.messages import plain_messages, plain_tools
from amem.results import Event, Reply
from amem.serve.errors import HttpError
from amem.serve.keys import OWNER
from amem.serve.limits import Limits
from amem.serve.marks import marks_of, marks_of_text
from amem.serve.measures import Measures
from amem.serve.named import NamedAgent, NamedAgents
from amem.serve.sessions import Marks, Session, Sessions

if TYPE_CHECKING:
    from concurrent.futures import Future

    from amem.engine import Engine
    from amem.run.request import Request


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
            self._sessions[domain] = Sessions(inside.in_space(f"{inside.space}/http"), self.limits)
        return self._sessions[domain]

    async def expire(self) -> None:
        """Delete the sessions that were idle for too long."""
        for sessions in list(self._sessions.values()):
            await sessions.expire()

    @contextlib.asynccontextmanager
    async def take(
        self, domain: str, wanted: Wanted, gone: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """A request's events. It ends with this context, when ``gone`` comes to its end, or when its time is up.

        Raises
        ------
            HttpError: too many requests are waiting, or its time is up.
            ClientGoneError: the client went away; the agent is as it was.
            AmemError: it cannot be served.
        """
        self._admit()
        started = time.monotonic()
        try:
            async with contextlib.AsyncExitStack() as stack:
                note: Callable[[Reply], None]
                if wanted.agent is not None:
                    agent = await stack.enter_async_context(self.named.use(self.space(domain), wanted.agent))
                    request, note = await queued_request(agent.submit(wanted)), partial(_answered, agent)
                else:
                    request, note = await self._placed(stack, self.sessions(domain), wanted)
                end = stack.enter_context(_Ending(request, gone, self.limits.timeout_s))
                events = self._events(request, end, note)
                await stack.enter_async_context(contextlib.aclosing(events))
                yield events
        finally:
            self._n_taken -= 1
            self._mean_s += 0.1 * (time.monotonic() - started - self._mean_s)

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

    def _admit(self) -> None:
        if self._n_taken >= self.limits.requests:
            raise HttpError(
                429,
                f"{self._n_taken} requests run or wait already: come back later.",
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(min(60, max(1, round(self._mean_s))))},
            )
        self._n_taken += 1

    async def _events(
        self, request: Request, end: _Ending, note: Callable[[Reply], None]
    ) -> AsyncGenerator[Event, None]:
        try:
            async with contextlib.aclosing(events_of(request)) as events:
                async for event in events:
                    if event.reply is not None:
                        self.measures.reply(event.reply.metrics)
                        note(event.reply)
                    yield event
        except Cancelled:
            if end.gone:
                self.measures.gone()
                raise ClientGoneError from None
            if end.late:
                raise HttpError(
                    408,
                    f"the request took longer than {self.limits.timeout_s:g} s; its agent is as it was before.",
                    kind="timeout_error",
                    code="timeout",
                ) from None
            raise


def _answered(agent: NamedAgent, _reply: Reply) -> None:
    agent.is_new = False


class _Ending:
    """Cancels a request when its client goes away, or when its time is up."""

    def __init__(self, request: Request, gone: Callable[[], Awaitable[object]], timeout_s: float) -> None:
        self._request = request
        self._gone = gone
        self._timeout_s = timeout_s
        self.gone = False
        self.late = False

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._time_is_up)
        self._watch = asyncio.ensure_future(self._wait())
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        self._watch.cancel()

    def _time_is_up(self) -> None:
        self.late = True
        self._request.cancel()

    async def _wait(self) -> None:
        await self._gone()
        self.gone = True
        self._request.cancel()
