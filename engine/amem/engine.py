"""The engine: one model, one store, one owner thread, any number of agents."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from amem.agent import Agent
from amem.checks import check_store, check_text, engine_options
from amem.errors import Cancelled, EngineClosed, InputError
from amem.options import AskOptions, ChatOptions, TextOptions
from amem.results import EngineStatus, Reply
from amem.run.owner import OwnerThread
from amem.run.worker import Workers
from amem.sizes import parse_size
from amem.stream import ReplyStream

if TYPE_CHECKING:
    from amem.asked import Asked
    from amem.fidelity.figures import Receipt
    from amem.model.capacity import CapacityRow
    from amem.model.said import ReplyMarks, Said
    from amem.opening import Opened
    from amem.run.request import Request
    from amem.session import AgentSession
    from amem.store import AgentEntry, VerifyReport
    from amem.store.records import TurnRecord

T = TypeVar("T")

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_STORE = "~/.amem"
DEFAULT_DISK = 10 * 10**9


class Engine:
    """Serves agents whose attention state is kept in memory and on disk.

    Args:
        model: a bundled model's name, a local folder, or a hub id. Default: ``$AMEM_MODEL``, else ``smollm2-135m``.
        store: the folder of all agents. Default: ``$AMEM_STORE``, else ``~/.amem``.
        space: agents of different spaces do not meet, even if their names are the same.
        memory: the most that K and V may take in memory, in bytes or like "2GB". Default: ``$AMEM_MEMORY``, else a
            quarter of the RAM.
        disk: the most that the store may take on disk, in bytes or like "20GB". Default: 10 GB.
        codec: how K and V are stored: "auto", "q4", "q4-affine", "q3", "q2", "q8" or "fp16". "auto" measures once for
            each model on a short text, and takes the first of q4, q8 and fp16 that is true enough (see status).
        attention: "auto", "cpu" (kernels for Linux on a CPU, with numba) or "reference" (MLX's operations).
        prefill_chunk: tokens of one prefill step, a multiple of 64. Default: by device.
        max_batch: the most requests that run at once.
        step_ms: the most that a reply waits for its next token while another agent's prompt is computed, and a
            cancelled request for its end. What cannot be divided (a decode step, a layer of a chunk) may take longer.
        io_threads: threads that read stored blocks while agents decode; 0 reads them between two steps instead.
        prefetch: whether agents that usually come next are restored while the present one is answered.
        progress: called with a sentence while the model is fetched and loaded.

    Raises
    ------
        InputError: an option is not possible.
        ModelError: the model cannot be found, read or carried.
        StoreError: the store cannot be opened.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        store: str | Path | None = None,
        *,
        space: str = "default",
        memory: str | int | None = None,
        disk: str | int | None = None,
        codec: str = "auto",
        attention: str = "auto",
        prefill_chunk: int | None = None,
        max_batch: int = 16,
        step_ms: float = 500,
        io_threads: int = 2,
        prefetch: bool = True,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        name = str(model or os.environ.get("AMEM_MODEL") or DEFAULT_MODEL)
        root = store_folder(store)
        budget = parse_size(memory if memory is not None else os.environ.get("AMEM_MEMORY") or _quarter_of_ram())
        quota = parse_size(disk) if disk is not None else DEFAULT_DISK
        engine_options(
            max_batch=max_batch, prefill_chunk=prefill_chunk, step_ms=step_ms, io_threads=io_threads, space=space,
            memory=budget,
        )  # fmt: skip
        from amem.opening import open_parts  # brings MLX: `import amem` alone stays quick

        self._owner = OwnerThread()
        self._space = space
        readers, writer = Workers(io_threads, "amem-read"), Workers(1, "amem-write")
        given_up = threading.Event()

        def tell(sentence: str) -> None:
            if given_up.is_set():
                raise Cancelled("the loading was interrupted.")
            if progress is not None:
                progress(sentence)

        def load() -> Opened:
            opened = open_parts(
                name,
                root,
                budget=budget,
                quota=quota,
                codec=codec,
                attention=attention,
                prefill_chunk=prefill_chunk,
                max_batch=max_batch,
                step_ms=step_ms,
                readers=readers,
                writer=writer,
                prefetch=prefetch,
                progress=tell,
            )
            if given_up.is_set():
                opened.discard()
                raise Cancelled("the loading was interrupted.")
            return opened

        opening: Future[Opened] | None = None
        try:
            opening = self._owner.submit(load)
            self._opened = opening.result()
        except BaseException:
            given_up.set()  # an interrupt does not wait for the load, which ends at its next step
            if opening is not None:
                opening.add_done_callback(_let_go)
            self._owner.close(wait=opening is not None and opening.done())
            readers.shutdown()
            writer.shutdown()
            raise
        self._whole: Engine | None = None  # of a view on another space: the engine that must live as long
        self._parts, self._roster = self._opened.parts, self._opened.roster
        # arrays belong to the thread that made them: a new one begins without them
        self._owner.drive(self._parts.scheduler, recover=self._roster.evict_all)
        # holds no reference to the engine: one that is dropped, or still open at exit, is closed all the same
        self._close = weakref.finalize(self, _close, os.getpid(), self._owner, self._opened)

    def __repr__(self) -> str:
        return f"<Engine {self._parts.model_name} on {self._opened.root}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End running requests, and let go of the model, the memory and the locks. Nothing that was saved is lost."""
        self._close()

    # -- agents --------------------------------------------------------------------------------------------------

    def agent(self, name: str, system: str | None = None, *, create: bool = True) -> Agent:
        """The agent of this name, made at its first use.

        Args:
            name: any text of 1 to 128 characters.
            system: the system text with which its conversation starts.
            create: make it now, if there is none. Else its first request does, unless that fails.

        Raises
        ------
            InputError: the name is not possible, or the agent has another system text already.
            AgentLocked: another engine or process is writing to it.
        """
        check_text("the system text", system)

        def begin() -> None:
            if not create and system is None and not self._parts.store.has(name, self._space):
                return
            session = self._roster.make(self._space, name)
            if system is not None:
                session.begin_with(system)

        self._owner.call(begin)
        return Agent(self, name)

    def agents(self) -> list[str]:
        """Names of all agents of this space, those on disk too."""
        return self._owner.call(lambda: [entry.name for entry in self._parts.store.agents(self._space)])

    def ask_all(self, messages: Mapping[str, str], **options: Unpack[AskOptions]) -> dict[str, Reply]:
        """Ask several agents at once, as one batch; options as for `Agent.ask`.

        Raises
        ------
            Exception: the first error of any of them; the others have finished by then.
        """
        streams = self.stream_all(messages, **options)
        replies: dict[str, Reply] = {}
        errors: list[Exception] = []
        try:
            for name, events in streams.items():
                try:
                    replies[name] = events.reply()
                except Exception as error:  # noqa: BLE001  # raised below, when the others have finished
                    errors.append(error)
        except BaseException:
            _close_all(streams.values())
            raise
        if errors:
            raise errors[0]
        return replies

    def stream_all(self, messages: Mapping[str, str], **options: Unpack[AskOptions]) -> dict[str, ReplyStream]:
        """Like `ask_all`, as one stream of events for each agent; options as for `Agent.stream`.

        All of them start together. Each is read, cancelled and closed by itself, in whatever thread.

        Raises
        ------
            InputError: one message or an option is not possible; nobody was asked.
        """
        streams: dict[str, ReplyStream] = {}

        def begin() -> None:
            for name, text in messages.items():
                streams[name] = Agent(self, name).stream(text, **options)

        begun = self._owner.submit(begin)  # one job: no step comes between
        try:
            begun.result()
        except BaseException:
            if not begun.cancel():
                begun.exception()
            _close_all(streams.values())
            raise
        return streams

    def fork(
        self,
        name: str,
        new_name: str,
        at: int | str | None = None,
        keep_last: int | None = None,
        *,
        replace: bool = False,
    ) -> Agent:
        """See `Agent.fork`."""
        if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
            raise InputError(f"keep_last must be a whole number of turns of at least 1, not {keep_last!r}.")

        self._owner.call(lambda: self._roster.fork(self._space, name, new_name, at, keep_last, replace=replace))
        return Agent(self, new_name)

    def delete(self, name: str) -> None:
        """See `Agent.delete`."""
        self._owner.call(lambda: self._roster.delete(self._space, name))

    def release(self, name: str) -> None:
        """Let other processes write to an agent: its state leaves memory, its files are closed. Its next use opens it.

        Raises
        ------
            InputError: it is answering.
        """
        self._owner.call(lambda: self._roster.release(self._space, name))

    def import_agent(self, file: str | Path, name: str | None = None) -> Agent:
        """Make an agent in this space of a file that `Agent.export` wrote, under its own name or another.

        Raises
        ------
            InputError: there is no such file, or an agent of that name already.
            CorruptState: the file is damaged, or no export; nothing was imported.
        """
        from amem.store import import_agent

        def run() -> str:
            with import_agent(self._parts.store, Path(file).expanduser(), name=name, space=self._space) as agent:
                return agent.name

        return Agent(self, self._owner.call(run))

    # -- spaces --------------------------------------------------------------------------------------------------

    @property
    def space(self) -> str:
        """The space whose agents these are."""
        return self._space

    def in_space(self, space: str) -> Engine:
        """The same engine, for the agents of another space: one model, memory, store and thread, closed together."""
        view = copy.copy(self)
        view.__dict__ |= {"_space": space, "_whole": self._whole or self}
        return view

    def spaces(self) -> list[str]:
        """Names of all spaces of the store that have agents, the most recently used first."""
        return self._owner.call(lambda: list(dict.fromkeys(entry.space for entry in self._parts.store.agents())))

    def entries(self) -> list[AgentEntry]:
        """The space's agents as the store lists them, the most recently used first."""
        return self._owner.call(lambda: self._parts.store.agents(self._space))

    def transcript(self, entry: AgentEntry) -> dict[int, TurnRecord]:
        """All turns of all branches of a listed agent, read without keeping or using it.

        Raises
        ------
            AgentLocked: another engine or process is writing to it.
        """

        def read() -> dict[int, TurnRecord]:
            with self._parts.store.borrow(entry.key) as agent:
                return agent.turns()

        return self._owner.call(read)

    def cell_ids(self, space: str) -> frozenset[str]:
        """Ids of all notebook cells that made turns of a space's agents.

        Raises
        ------
            AgentLocked: another engine or process is writing to one of them.
        """

        def read() -> frozenset[str]:
            found: set[str] = set()
            for entry in self._parts.store.agents(space):
                with self._parts.store.borrow(entry.key) as agent:
                    found.update(turn.cell_id for turn in agent.turns().values() if turn.cell_id is not None)
            return frozenset(found)

        return self._owner.call(read)

    def adopt(self, space: str) -> list[str]:
        """Take all agents of another space into this one; gives their names.

        Raises
        ------
            InputError: both spaces have an agent of the same name; nothing has changed.
            AgentLocked: another engine or process is writing to one of them.
        """
        return self._owner.call(lambda: self._roster.move(space, self._space))

    def with_session(self, name: str, job: Callable[[AgentSession], T]) -> T:
        """Run a job on the session of an agent that exists, in the owner thread.

        Raises
        ------
            InputError: there is no agent of that name.
        """
        return self._owner.call(lambda: job(self._roster.known(self._space, name)))

    def soon(self, job: Callable[[], T]) -> Future[T]:
        """Run a job in the owner thread, between two steps; what it calls of this engine is done at once."""
        return self._owner.submit(job)

    def with_idle_session(self, name: str, job: Callable[[AgentSession], T]) -> T:
        """Like `with_session`, refused while a request to the agent is running.

        Raises
        ------
            InputError: one is.
        """
        return self._owner.call(lambda: job(self._roster.idle(self._space, name)))

    def prefetch(self, name: str) -> Future[None]:
        """Begin to bring an agent's stored state into memory, while others are served. Done: it is there.

        Raises
        ------
            InputError: there is no such agent, or it is answering.
            MemoryBudgetError: the budget has no room for it.
        """
        return self._owner.call(lambda: self._roster.restore(self._space, name))

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, name: str, message: str, **options: Unpack[AskOptions]) -> Future[Request]:
        """Check a message to an agent and queue it. `Agent.ask` explains the options.

        Raises
        ------
            InputError: the message or an option is not possible; nothing has changed.
        """
        from amem.asked import Asked

        return self._queue(name, Asked.message(message, **options))

    def submit_chat(
        self, name: str, messages: Sequence[Mapping[str, object]], **options: Unpack[ChatOptions]
    ) -> Future[Request]:
        """Check a whole conversation and queue it. `Agent.chat` explains the options.

        Raises
        ------
            InputError: the messages or an option are not possible; nothing has changed.
        """
        from amem.asked import Asked

        return self._queue(name, Asked.chat(messages, **options))

    def submit_text(self, name: str, text: str, **options: Unpack[TextOptions]) -> Future[Request]:
        """Queue a text that is to be continued as it stands, without the chat template. Options as for `Agent.chat`.

        Raises
        ------
            InputError: the text is empty, or an option is not possible; nothing has changed.
        """
        from amem.asked import Asked

        return self._queue(name, Asked.text(text, **options))

    def _queue(self, name: str, asked: Asked) -> Future[Request]:
        """The request, as soon as the owner thread is between two steps."""

        def queue() -> Request:
            request = asked.request(self._roster.for_request(self._space, name))
            self._parts.scheduler.submit(request)
            return request

        if self._owner.is_current:
            done: Future[Request] = Future()
            done.set_result(queue())
            return done
        return self._owner.submit(queue)

    def n_tokens(self, text: str) -> int:
        """How many tokens a bare text has."""
        return self._owner.call(lambda: len(self._parts.prompter.raw(text)))

    def chat_text(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()) -> str:
        """A whole conversation as the model's chat template writes it.

        Raises
        ------
            InputError: the messages or tools are not possible.
        """
        from amem.model.messages import plain_messages, plain_tools

        plain, shown = plain_messages(messages), plain_tools(tools)
        return self._owner.call(lambda: self._parts.prompter.render(plain, shown))

    def n_chat_tokens(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()
    ) -> int:
        """How many tokens a whole conversation takes, as a prompt that nothing is stored of.

        Raises
        ------
            InputError: the messages or tools are not possible.
        """
        from amem.model.messages import plain_messages, plain_tools

        plain, shown = plain_messages(messages), plain_tools(tools)
        return self._owner.call(lambda: len(self._parts.prompter.history(plain, shown)))

    def said(self, reply: str) -> Said:
        """A reply's thought, content and tool calls, by the model's own marks. Any thread may ask."""
        return self._parts.prompter.said(reply)

    def reply_marks(self) -> ReplyMarks:
        """How the model marks the parts of a reply, and whether its chat template takes descriptions of tools."""
        return self._owner.call(self._parts.prompter.reply_marks)

    # -- the whole -----------------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """The engine at this instant. Every figure is read or measured now."""
        from amem.overview import engine_status

        return self._owner.call(lambda: engine_status(self._opened, self._space))

    def capacity(self, contexts: Sequence[int] = ()) -> tuple[CapacityRow, ...]:
        """How many agents of these many tokens (default: 4K to 32K) fit the memory budget, codec by codec.

        Raises
        ------
            InputError: a context is not at least one token.
        """
        from amem.model.capacity import CONTEXTS, TABLE_CODECS, capacity_table

        if contexts and min(contexts) < 1:
            raise InputError("a context has at least one token.")
        parts = self._parts
        specs = {parts.model_name: parts.layout.spec}
        codecs = dict.fromkeys((*TABLE_CODECS, parts.realm.codec))
        return capacity_table(specs, memory_bytes=parts.pool.total, contexts=contexts or CONTEXTS, codecs=codecs)

    def fidelity(self, name: str, n_tokens: int = 128, progress: Callable[[str], None] | None = None) -> Receipt:
        """See `Agent.fidelity`."""
        from amem.fidelity.receipt import AgentReplay

        replay = self.with_idle_session(name, lambda session: AgentReplay(session, n_tokens))
        if progress is not None:
            progress(str(self._owner.call(lambda: replay.cost)))
        try:
            self._owner.call(replay.begin).result()
            while (receipt := self._owner.call(replay.step)) is None:
                pass  # others are served between two steps
        finally:
            with contextlib.suppress(EngineClosed):
                self._owner.call(replay.release)
        return receipt

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Check every stored byte of every agent against its checksum; ``repair`` mends what can be mended."""
        from amem.store import verify

        return self._owner.call(lambda: verify(self._parts.store, repair=repair))


def _close_all(streams: Iterable[ReplyStream]) -> None:
    """Cancel all of them before waiting for any."""
    for events in streams:
        events.cancel()
    for events in streams:
        events.close()


def store_folder(store: str | Path | None) -> Path:
    """The folder of all agents: ``store``, or the environment's, or the default.

    Raises
    ------
        InputError: it names a user that there is not, or is something else than a folder.
    """
    root = Path(store or os.environ.get("AMEM_STORE") or DEFAULT_STORE)
    try:
        root = root.expanduser()
    except RuntimeError as error:
        raise InputError(f"store {str(root)!r}: there is no such user.") from error
    check_store(root)
    return root


def _let_go(opening: Future[Opened]) -> None:
    """Close what was opened for nobody; called in the owner thread if the load is still going on."""
    if opening.exception() is None:
        opening.result().discard()


def _close(pid: int, owner: OwnerThread, opened: Opened) -> None:
    """End an engine's requests and thread, and let go of its locks; in the process that made it only."""
    if os.getpid() != pid or owner.closed:
        return
    parts = opened.parts

    def release() -> None:
        parts.scheduler.fail_all(EngineClosed("the engine was closed while this request was running."))
        opened.roster.finish_writes()
        opened.roster.close()
        with contextlib.suppress(Exception):
            parts.store.close()
        opened.finish()

    owner.submit(release)
    owner.close()
    parts.readers.shutdown()
    parts.writer.shutdown()


def _quarter_of_ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
