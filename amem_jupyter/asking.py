"""One request from a cell: options and text in, replies that stream into the page out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from IPython.core.error import UsageError

from amem_jupyter.background import PendingReplies, PendingReply
from amem_jupyter.cells import Cells
from amem_jupyter.errors import Interrupted, reason
from amem_jupyter.message import Replies, body_text, expand, quoted, system_text
from amem_jupyter.parse import Arguments
from amem_jupyter.protocol import AgentLike, EngineLike, EventStream
from amem_jupyter.reply import CellReplies, CellReply
from amem_jupyter.watching import Watcher

if TYPE_CHECKING:
    from amem.results import Reply
    from amem_jupyter.live import Page, ReplyView


@dataclass(frozen=True)
class Settings:
    """How to generate, as the engine takes it."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | Literal["random"] | None
    stop: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What a cell asks for."""

    names: tuple[str, ...]
    text: str
    settings: Settings
    system: str | None
    into: str | None
    how: str
    append: bool
    cached: bool
    dry_run: bool
    background: bool


def request_of(arguments: Arguments, body: str | None, user_ns: Mapping[str, Any], defaults: Settings, how: str,
               said: Replies) -> Request:  # fmt: skip
    """The request that a line and a body make; nothing has been asked yet, and every mistake in them is found here.

    `said` gives the last reply of an agent, for {{name}} and `--from`.
    """
    text = arguments.rest if body is None else body_text(body)
    if not arguments.get("raw", False):
        text = expand(text, user_ns, said)
    if not text.strip():
        below = "write it in the lines below the first" if body is not None else "write it after the name"
        raise UsageError(f"there is no message: {below}")
    text = "\n\n".join([*(quoted(agent, said) for agent in arguments.get("from", ())), text])
    name = arguments.get("NAME")
    system = arguments.get("system")
    given = {key: value for key, value in arguments.values.items() if key in asdict(defaults)}
    return Request(
        names=name if isinstance(name, tuple) else (name,),
        text=text,
        settings=Settings(**{**asdict(defaults), **given}),
        system=None if system is None else system_text(system),
        into=arguments.get("into"),
        how=arguments.get("format", how),
        append=arguments.get("append", False),
        cached=arguments.get("cached", False),
        dry_run=arguments.get("dry_run", False),
        background=arguments.get("background", False),
    )


def dry_run_text(request: Request) -> str:
    """What `--dry-run` shows: the text as it would be sent, and how it would be answered."""
    settings = ", ".join(f"{name} {value!r}" for name, value in asdict(request.settings).items())
    system = [] if request.system is None else [f"system: {request.system}"]
    names = ", ".join(request.names)
    return "\n".join([f"would be sent to {names} ({settings}):", *system, request.text, "", "nothing was sent"])


def stream_reply(agent: AgentLike, request: Request, view: ReplyView, watch: Watcher, cells: Cells) -> CellReply:
    """Ask, and show the reply as it comes.

    An interrupt is shown and raised on, so that the queued cells stop; the engine leaves the agent as it was.
    """
    stream = agent.stream(request.text, system=request.system, **_wish(request, cells))
    return CellReply(_follow(agent.name, stream, view, watch), cells, request.how)


def reply_behind(agent: AgentLike, request: Request, page: Page, watch: Watcher, cells: Cells) -> PendingReply:
    """Ask, and let the reply come while other cells run."""
    stream = agent.stream(request.text, system=request.system, **_wish(request, cells))
    page.draw(begins=True)
    return _pending(agent.name, stream, request, page.cards[agent.name], watch, cells, page.show_again)


def replies_behind(engine: EngineLike, request: Request, views: Mapping[str, ReplyView], watch: Watcher, cells: Cells,
                   show_again: Callable[[], None]) -> PendingReplies:  # fmt: skip
    """Ask several agents in one batch, and let their replies come, each in a thread of its own."""
    streams = engine.stream_all(dict.fromkeys(request.names, request.text), **_wish(request, cells))
    pending: dict[str, PendingReply] = {}
    try:
        for name, stream in streams.items():
            pending[name] = _pending(name, stream, request, views[name], watch, cells, show_again)
    except BaseException:
        for stream in streams.values():
            stream.cancel()
        raise
    return PendingReplies(pending, cells)


def wait_for_all(pending: PendingReplies) -> CellReplies:
    """The replies of several agents, when all are there. An interrupt cancels all of them.

    Raises
    ------
        AmemError: the first that failed, when the others have ended.
    """
    try:
        pending.wait()
    except KeyboardInterrupt:
        pending.cancel()
        pending.wait()
        names = ", ".join(pending)
        raise Interrupted(f"interrupted; whoever of {names} had not answered is as before") from None
    return pending.replies


def _pending(name: str, stream: EventStream, request: Request, view: ReplyView, watch: Watcher, cells: Cells,
             show_again: Callable[[], None]) -> PendingReply:  # fmt: skip
    execution = cells.execution

    def follow() -> CellReply:
        return CellReply(_follow(name, stream, view, watch), cells, request.how, execution)

    return PendingReply(name, cells, stream, follow, show_again)


def _follow(agent: str, stream: EventStream, view: ReplyView, watch: Watcher) -> Reply:
    """Show a request's events to their end."""
    reply: Reply | None = None
    watch.began(agent)
    try:
        # Leaving early must cancel the request now, not when the iterator happens to be collected.
        with closing(stream) as events:
            for event in events:
                reply = event.reply or reply
                view.take(event)
                watch.event(agent, event)
    except BaseException as error:
        why = reason(error, agent)
        view.stop(why)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(why) from None
        raise
    else:
        assert reply is not None, "the last event of a stream has the reply"
        view.finish(reply)
        watch.answered(reply)
        return reply
    finally:
        watch.changed(agent, over=True)


def _wish(request: Request, cells: Cells) -> dict[str, Any]:
    """The settings of a request, and who makes it, as the engine takes them."""
    place = {"cell_id": cells.cell_id, "execution": cells.execution, "append": request.append,
             "cached": request.cached}  # fmt: skip
    return {**asdict(request.settings), **place}
