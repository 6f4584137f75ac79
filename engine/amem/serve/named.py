"""Named agents that requests are served by: how many stay open, and what is left of one that was never answered."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amem.errors import AmemError, InputError
from amem.serve.threads import in_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from amem.engine import Engine
    from amem.run.request import Request
    from amem.serve.desk import Wanted


@dataclass(eq=False)
class NamedAgent:
    """One that is open, or about to be."""

    engine: Engine  #: the view on its space
    name: str
    n_users: int = 0  #: requests
    is_new: bool = False  #: a request made it, and none was answered yet

    def submit(self, wanted: Wanted) -> Future[Request]:
        """Queue a request for it, and note whether that makes it: in one job, so that nobody comes between."""

        def queue() -> Request:
            try:
                self.engine.with_session(self.name, lambda _session: None)
            except InputError:
                self.is_new = True
            return wanted.submit(self.engine, self.name).result()

        return self.engine.soon(queue)

    def discard(self) -> None:
        """Delete it, unless somebody else gave it a turn or a system text, or is asking it."""

        def delete() -> None:
            is_empty = self.engine.with_idle_session(
                self.name, lambda session: not session.store.turns() and session.system is None
            )
            if is_empty:
                self.engine.delete(self.name)

        with contextlib.suppress(AmemError):  # it was never made, or is not ours any more
            self.engine.soon(delete).result()

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
    async def use(self, engine: Engine, name: str) -> AsyncIterator[NamedAgent]:
        """An agent, for one request. Those that are used no more are released, the least recently used first.

        If the request made it and was not answered, it is deleted again.
        """
        key = engine.space, name
        agent = self._agents.setdefault(key, NamedAgent(engine, name))
        agent.n_users += 1
        try:
            yield agent
        finally:
            agent.n_users -= 1
            self._agents.move_to_end(key)
            if agent.is_new and not agent.n_users:
                await in_thread(agent.discard)
                if not agent.n_users:  # nobody came meanwhile
                    self._agents.pop(key, None)
            await self._release_idle()

    async def _release_idle(self) -> None:
        idle = [key for key, agent in self._agents.items() if not agent.n_users]
        released = [self._agents.pop(key) for key in idle[: max(0, len(self._agents) - self._most_open)]]
        for agent in released:
            await in_thread(agent.release)
