"""What is told of agents as they are asked and changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from amem.results import Event, Reply


class Watcher(Protocol):
    """Something that shows agents as they change. It may be told from any thread."""

    def began(self, agent: str) -> None:
        """A request to an agent begins."""
        ...

    def event(self, agent: str, event: Event) -> None:
        """A step of a request."""
        ...

    def answered(self, reply: Reply) -> None:
        """A request went well."""
        ...

    def changed(self, agent: str, *, over: bool = False) -> None:
        """An agent was changed; `over`: by a request that has ended, in whatever way."""
        ...

    def cell_began(self, cell_id: str | None) -> None:
        """A cell begins to run: what it showed when it ran before is gone."""
        ...

    def cell_ended(self) -> None:
        """The running cell has ended."""
        ...

    def forget(self) -> None:
        """Leave pictures that no longer change."""
        ...
