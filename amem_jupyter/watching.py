"""Hands what happens to agents on to everything that shows them."""

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


class Watchers:
    """Several as one."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def began(self, agent: str) -> None:
        for watcher in self._watchers:
            watcher.began(agent)

    def event(self, agent: str, event: Event) -> None:
        for watcher in self._watchers:
            watcher.event(agent, event)

    def answered(self, reply: Reply) -> None:
        for watcher in self._watchers:
            watcher.answered(reply)

    def changed(self, agent: str, *, over: bool = False) -> None:
        for watcher in self._watchers:
            watcher.changed(agent, over=over)

    def cell_began(self, cell_id: str | None) -> None:
        for watcher in self._watchers:
            watcher.cell_began(cell_id)

    def cell_ended(self) -> None:
        for watcher in self._watchers:
            watcher.cell_ended()

    def forget(self) -> None:
        for watcher in self._watchers:
            watcher.forget()
