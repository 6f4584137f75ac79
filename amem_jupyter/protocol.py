"""What this layer asks of an engine: the public interface of `amem`, which a scripted engine can stand in for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Unpack

if TYPE_CHECKING:
    from amem.fidelity.figures import Receipt
    from amem.model.capacity import CapacityRow
    from amem.options import AskOptions
    from amem.results import AgentStatus, BlockMap, EngineStatus, Event, TurnInfo
    from amem.store import VerifyReport


class EventStream(Iterator["Event"], Protocol):
    """The events of one request; the last one has the reply."""

    def cancel(self) -> None:
        """Ask from any thread that the request ends."""
        ...

    def close(self) -> None:
        """Cancel, and wait until the agent is as it was."""
        ...


class AgentLike(Protocol):
    """One agent of an engine."""

    name: str

    @property
    def status(self) -> AgentStatus:
        """Its residency and sizes now."""
        ...

    @property
    def turns(self) -> list[TurnInfo]:
        """The turns on its head's path."""
        ...

    def stream(self, message: str, **options: Unpack[AskOptions]) -> EventStream:
        """Ask; the last event has the reply. Closing the iterator cancels, and leaves the agent as it was."""
        ...

    def tree(self) -> list[TurnInfo]:
        """All turns, branches too."""
        ...

    def block_map(self) -> BlockMap:
        """The blocks of its head."""
        ...

    def rewind(self, turns: int = 1, *, to: int | str | None = None) -> object:
        """Take turns back."""
        ...

    def fork(
        self, name: str, *, at: int | str | None = None, keep_last: int | None = None, replace: bool = False
    ) -> AgentLike:
        """A new agent with its state, or with the last turns of it, in place of one that has that name."""
        ...

    def checkout(self, turn: int | str) -> object:
        """Stand on another turn."""
        ...

    @property
    def snapshots(self) -> Mapping[str, int]:
        """Names of turns."""
        ...

    def snapshot(self, name: str, *, at: int | None = None) -> int:
        """Name a turn."""
        ...

    def forget_snapshot(self, name: str) -> object:
        """Take a name away."""
        ...

    def why(self) -> str:
        """What its last request found of its past."""
        ...

    def evict(self) -> object:
        """Take its K/V out of memory."""
        ...

    def restore(self, *, background: bool = False) -> object:
        """Bring its K/V into memory; in the background if others are to be served meanwhile."""
        ...

    def pin(self) -> object:
        """Keep it in memory."""
        ...

    def unpin(self) -> object:
        """Let it be evicted."""
        ...

    def delete(self) -> object:
        """Delete all about it."""
        ...

    def fidelity(self, n_tokens: int = 128, progress: Callable[[str], None] | None = None) -> Receipt:
        """What its stored state costs; tells first what finding out will take."""
        ...

    def export(self, file: str) -> int:
        """Write all of it to a file; gives the file's bytes."""
        ...


class EngineLike(Protocol):
    """An engine."""

    def agent(self, name: str, *, create: bool = True) -> AgentLike:
        """The agent of that name, made now if it is new, or by its first request."""
        ...

    def agents(self) -> list[str]:
        """The names of the space's agents."""
        ...

    def stream_all(self, messages: Mapping[str, str], **options: Unpack[AskOptions]) -> Mapping[str, EventStream]:
        """Ask several agents in one batch; their events, by name."""
        ...

    def status(self) -> EngineStatus:
        """The engine now."""
        ...

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Check the store."""
        ...

    def capacity(self, contexts: Sequence[int] = ()) -> Sequence[CapacityRow]:
        """How many agents fit."""
        ...

    def import_agent(self, file: str, name: str | None = None) -> AgentLike:
        """An agent of an exported file."""
        ...

    def spaces(self) -> list[str]:
        """All spaces that have agents."""
        ...

    def cell_ids(self, space: str) -> Collection[str]:
        """The cells that made a space's turns."""
        ...

    def adopt(self, space: str) -> list[str]:
        """Take a space's agents into this one; gives their names."""
        ...

    def close(self) -> None:
        """End it; agents stay on disk."""
        ...
