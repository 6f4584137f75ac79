"""The facade of one agent: what users call, from any thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from amem.options import AskOptions, ChatOptions, Seed
from amem.results import AgentStatus, BlockMap, Event, Reply, TurnInfo
from amem.stream import ReplyStream, events_of, last_reply, queued_request, wait_for

if TYPE_CHECKING:
    from amem.engine import Engine
    from amem.fidelity.figures import Receipt
    from amem.session import AgentSession


class Agent:
    """A named conversation with its own attention state. `Engine.agent` gives it; equal names mean the same agent."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self.name = name

    def __repr__(self) -> str:
        return f"<Agent {self.name!r}>"

    # -- asking --------------------------------------------------------------------------------------------------

    def ask(
        self,
        message: str,
        *,
        max_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: Seed = None,
        stop: Sequence[str] = (),
        system: str | None = None,
        append: bool = False,
        cached: bool = False,
        cell_id: str | None = None,
        execution: str | None = None,
    ) -> Reply:
        """Send a message and wait for the whole reply.

        Args:
            message: what the user says.
            max_tokens: the most tokens to generate.
            temperature: 0 takes the likeliest token each time.
            top_p: sample from the likeliest tokens that together have this probability.
            seed: of the sampling. None derives one from agent, parent turn, prompt and settings, so that the same
                cell gives the same reply; "random" takes a fresh one.
            stop: texts at which the reply ends; they are not part of it.
            system: the system text of the conversation; only its first turn can set it.
            append: go on from the head even if this cell has a turn already.
            cached: give the recorded reply, and compute nothing, if this prompt was asked at this place with these
                settings before.
            cell_id: the notebook cell that asks. A cell that asks again replaces what it did before.
            execution: which execution of that cell this is; a second ask within one appends.

        Raises
        ------
            InputError: the message or an option cannot be served as given. The agent is as it was.
            MemoryBudgetError: the conversation does not fit the memory budget.
            Cancelled: `KeyboardInterrupt` and the like; the agent is as it was.
        """
        return self.stream(
            message,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            system=system,
            append=append,
            cached=cached,
            cell_id=cell_id,
            execution=execution,
        ).reply()

    def stream(self, message: str, **options: Unpack[AskOptions]) -> ReplyStream:
        """Like `ask`, as events: pieces of text, progress, and the reply last.

        The input is checked and the request queued at once, before the first event is taken. Closing the iterator
        early, or an exception in the loop, cancels the request.
        """
        return ReplyStream(wait_for(self._engine.submit(self.name, message, **options)))

    async def aask(self, message: str, **options: Unpack[AskOptions]) -> Reply:
        """`ask` for async callers."""
        return await last_reply(self.astream(message, **options))

    async def astream(self, message: str, **options: Unpack[AskOptions]) -> AsyncIterator[Event]:
        """`stream` for async callers."""
        async for event in events_of(await queued_request(self._engine.submit(self.name, message, **options))):
            yield event

    # -- whole conversations ---------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: Seed = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
    ) -> Reply:
        """Send a whole conversation, as clients of a chat API do, and wait for the reply to its last message.

        It goes on from the longest branch of this agent's tree that it begins with, wherever the head is. A branch's
        replies count as the same if they come back with other white space around them, without their thought, or with
        their tool calls in a field of their own; the state keeps the tokens that were generated. From the first message
        that differs, the text decides how much is reused, and what comes after is a branch of its own. The head moves
        to the new turn.

        Args:
            messages: mappings with "role" (system, user, assistant or tool), "content", and what tools need
                ("tool_calls", "tool_call_id", "name"). The last one is the user's or a tool's.
            tools: descriptions of tools, for the model's chat template.
            max_tokens, temperature, top_p, seed, stop: as for `ask`.
            logprobs: tell how likely each token was, and this many (0 to 20) of the likeliest in its place.

        Raises
        ------
            InputError: the messages cannot be read, or the model's chat template refuses them. Nothing has changed.
            MemoryBudgetError, Cancelled: as for `ask`.
        """
        return self.chat_stream(
            messages,
            tools=tools,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop,
            logprobs=logprobs,
        ).reply()

    def chat_stream(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> ReplyStream:
        """Like `chat`, as events; see `stream`."""
        return ReplyStream(wait_for(self._engine.submit_chat(self.name, messages, **options)))

    async def achat(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Reply:
        """`chat` for async callers."""
        return await last_reply(self.achat_stream(messages, **options))

    async def achat_stream(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> AsyncIterator[Event]:
        """`chat_stream` for async callers."""
        async for event in events_of(await queued_request(self._engine.submit_chat(self.name, messages, **options))):
            yield event

    # -- the tree ------------------------------------------------------------------------------------------------

    @property
    def system(self) -> str | None:
        """The system text of the conversation."""
        return self._engine.with_session(self.name, lambda session: session.tree.system)

    @property
    def turns(self) -> list[TurnInfo]:
        """The turns from the first to the head."""
        return self._engine.with_session(self.name, lambda session: session.tree.infos(only_path=True))

    def tree(self) -> list[TurnInfo]:
        """All turns, those on other branches too."""
        return self._engine.with_session(self.name, lambda session: session.tree.infos(only_path=False))

    def rewind(self, turns: int = 1, *, to: int | str | None = None) -> None:
        """Move the head back by some turns, or to a turn or named snapshot that it came by.

        Nothing is lost: the turns stay as a branch.

        Raises
        ------
            InputError: there are fewer turns than that.
            UnknownTurn: the head did not come by that turn.
        """
        self._engine.with_idle_session(self.name, lambda session: session.checkout(session.tree.before(turns, to)))

    def checkout(self, turn: int | str) -> None:
        """Move the head to any turn of the tree, by its number or by a named snapshot's name.

        Raises
        ------
            UnknownTurn: there is no such turn.
        """
        self._engine.with_idle_session(self.name, lambda session: session.checkout(session.tree.turn_of(turn)))

    def snapshot(self, name: str, *, at: int | None = None) -> int:
        """Name the turn at which the agent stands, or another, for `checkout`, `rewind` and `fork`; gives the turn.

        Raises
        ------
            InputError: the name is not possible or another turn's, or there is no turn yet.
            UnknownTurn: there is no such turn.
        """
        return self._engine.with_session(self.name, lambda session: session.tree.name_snapshot(name, at))

    @property
    def snapshots(self) -> dict[str, int]:
        """The named snapshots, with their turns."""
        return self._engine.with_session(self.name, lambda session: session.tree.snapshots())

    def forget_snapshot(self, name: str) -> None:
        """Take a named snapshot's name away; its turn stays.

        Raises
        ------
            UnknownTurn: there is no such snapshot.
        """
        self._engine.with_session(self.name, lambda session: session.tree.forget_snapshot(name))

    def fork(
        self, name: str, *, at: int | str | None = None, keep_last: int | None = None, replace: bool = False
    ) -> Agent:
        """A new agent that starts where this one stands (or stood, at a turn). Stored blocks are shared, not copied.

        Args:
            name: the new agent's.
            at: a turn, or a named snapshot.
            keep_last: only the system text and so many turns before that point, as a conversation of its own: the way
                on when the context is full. What follows the system text stands elsewhere then, so it is computed
                again, with the new agent's first request.
            replace: delete an agent that has that name already, so that the same code can run again.

        Raises
        ------
            InputError: an agent of that name exists and is not to be replaced, or is answering, or is this one; or the
                name or keep_last is not possible.
            UnknownTurn: there is no such turn.
        """
        return self._engine.fork(self.name, name, at, keep_last, replace=replace)

    def why(self) -> str:
        """In plain lines: what this engine's last request found of its past, and why not more."""
        return self._engine.with_session(self.name, lambda session: session.why())

    # -- memory and disk -------------------------------------------------------------------------------------------

    @property
    def status(self) -> AgentStatus:
        """Residency, tokens, bytes."""
        return self._engine.with_session(self.name, lambda session: session.status())

    def block_map(self) -> BlockMap:
        """Every block of the head, or of what the request that runs has computed so far, with its text."""
        from amem.blocks import block_map

        return self._engine.with_session(self.name, block_map)

    def fidelity(self, n_tokens: int = 128, progress: Callable[[str], None] | None = None) -> Receipt:
        """What the stored state costs, on the agent's own last tokens: KL, top-1 agreement and more in a `Receipt`.

        Reads the stored state of everything before them, computes the same history again at full precision, and feeds
        the last tokens to both. That takes as long as a cold start, while others are served, and changes nothing.

        Args:
            n_tokens: about how many of the last tokens are fed; up to 64 more.
            progress: called with a sentence that says what it will take, before it starts.

        Raises
        ------
            InputError: the agent is answering, or nothing of it is stored in this form; nothing was computed.
            MemoryBudgetError: the budget has no room for the history at full precision.
        """
        return self._engine.fidelity(self.name, n_tokens, progress)

    def evict(self) -> None:
        """Take the state out of memory; it stays on disk, so the next request restores it."""
        from amem.kv.memory import give_back  # brings MLX

        def evict(session: AgentSession) -> None:
            session.evict()
            give_back()

        self._engine.with_idle_session(self.name, evict)

    def restore(self, *, background: bool = False) -> None:
        """Bring the stored state into memory; ``background`` returns at once, while it is read.

        Raises
        ------
            InputError: the agent is answering.
            MemoryBudgetError: the budget has no room for it.
        """
        done = self._engine.prefetch(self.name)
        if not background:
            done.result()

    def pin(self) -> None:
        """Keep the state in memory, whoever else needs room."""
        self._engine.with_session(self.name, lambda session: session.pin(True))

    def unpin(self) -> None:
        """Undo `pin`."""
        self._engine.with_session(self.name, lambda session: session.pin(False))

    def export(self, file: str | Path) -> int:
        """Write all of the agent to one file, which must not exist yet; gives its bytes. The agent may go on.

        Raises
        ------
            InputError: the file exists already.
            StoreError: it cannot be written.
        """
        from amem.store import export_agent

        return self._engine.with_session(
            self.name, lambda session: export_agent(session.store, Path(file).expanduser())
        )

    def delete(self) -> None:
        """Delete the agent, its transcript and every stored byte of it. Forks live on with their own copy."""
        self._engine.delete(self.name)
