"""Named agents that requests are served by: how many of them stay open."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amem.errors import AmemError
from amem.serve.threads import in_thread

if TYPE_CHECKING:
    from amem.engine import Engine


@dataclass(eq=False)
class NamedAgent:
    """One that is open, or about to be."""

    engine: Engine  #: the view on its space
    name: str
    n_users: int = 0  #: requests

    def release(self) -> None:
        """Close its files and give back its memory, unless somebody else is asking it or pinned it."""

        def release() -> None:
            if not self.engine.with_session(self.name, lambda session: session.pinned):
                self.engine.release(self.name)

        with contextlib.suppress(AmemError):
            self.engine.soon(release).result()


class NamedAgents:
    """Those of all domains. All of it belongs to one event loop; only the engine's work is in threads."""

    def __init__(self, most_open: int) -> None:
        self._most_open = most_open
        self._agents: OrderedDict[tuple[str, str], NamedAgent] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._agents)

    @contextlib.asynccontextmanager
    async def use(self, engine: Engine, name: str) -> AsyncIterator[None]:
        """Count a request to an agent. Those that are used no more are released, the least recently used first."""
        key = engine.space, name
        agent = self._agents.setdefault(key, NamedAgent(engine, name))
        agent.n_users += 1
        try:
            yield
        finally:
            agent.n_users -= 1
            self._agents.move_to_end(key)
            await self._release_idle()

    async def _release_idle(self) -> None:
        idle = [key for key, agent in self._agents.items() if not agent.n_users]
        released = [self._agents.pop(key) for key in idle[: max(0, len(self._agents) - self._most_open)]]
        for agent in released:
            await in_thread(agent.release)
