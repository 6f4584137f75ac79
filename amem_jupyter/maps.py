"""The block maps of a notebook: live widgets while a cell asks an agent, static pictures whenever the kernel rests.

A widget's view that is saved shows "model not found" when the notebook is opened again, and no HTML beside it helps.
So a widget lives only while a cell runs, or a request to its agent goes on behind the cells: what is saved in between
is the picture.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from amem_jupyter.markup import Picture
from amem_jupyter.panels import Panel
from amem_jupyter.render import stage_words
from amem_jupyter.tables import map_picture

if TYPE_CHECKING:
    from amem.results import BlockMap, Event, Reply
    from amem_jupyter.widgets.panel import PanelWidget


class LiveMap(Panel):
    """One map in the output of one cell."""

    def __init__(self, agent: str, cell_id: str | None, blocks: BlockMap) -> None:
        super().__init__(cell_id, map_picture(blocks), _widget)
        self.agent = agent


def _widget(picture: Picture) -> PanelWidget:
    from amem_jupyter.widgets.block_map import BlockMapWidget

    return BlockMapWidget(picture)


class Maps:
    """All maps of one notebook. Cells and requests behind them may call this from several threads."""

    def __init__(self, block_map: Callable[[str], BlockMap | None]) -> None:
        self._block_map = block_map
        self._maps: list[LiveMap] = []
        self._asked: Counter[str] = Counter()  # requests that go on, by agent
        self._in_cell = False
        self._stale = False
        self._lock = threading.RLock()

    def open(self, agent: str, cell_id: str | None, blocks: BlockMap) -> None:
        """Put a map into the running cell. Without a cell id an agent has one map, the newest."""
        with self._lock:
            if cell_id is None:
                self.forget(lambda live: live.cell_id is None and live.agent == agent)
            live = LiveMap(agent, cell_id, blocks)
            live.wake()
            self._maps.append(live)

    def began(self, agent: str) -> None:
        """A request to `agent` begins: its maps come alive."""
        with self._lock:
            self._asked[agent] += 1
            for live in self._of(agent):
                live.wake()

    def event(self, agent: str, event: Event) -> None:
        """A step of a request to `agent`."""
        with self._lock:
            for live in self._of(agent):
                live.tell("writing" if event.text else stage_words(event))

    def answered(self, reply: Reply) -> None:
        """Nothing more than its blocks, which `changed` draws."""

    def changed(self, agent: str, *, over: bool = False) -> None:
        """An agent was changed, or a request to it is over: draw its maps now, and the others when the cell ends."""
        blocks = self._block_map(agent) if self._of(agent) else None  # may wait for the engine: not under the lock
        with self._lock:
            self._stale = True
            if over:
                self._asked[agent] -= 1
            for live in self._of(agent):
                live.tell("", now=True)
                if blocks is not None:
                    live.draw(map_picture(blocks))
            if not self._in_cell:
                self._rest()

    def cell_began(self, cell_id: str | None) -> None:
        """A cell begins: the maps that it made when it ran before are gone from the page."""
        with self._lock:
            self._in_cell = True
            if cell_id is not None:
                self.forget(lambda live: live.cell_id == cell_id)

    def cell_ended(self) -> None:
        """A cell has ended: pictures again, and those of agents that it touched in passing are drawn anew."""
        drawn = {live.agent: self._block_map(live.agent) for live in list(self._maps)} if self._stale else {}
        with self._lock:
            self._stale, self._in_cell = False, False
            for live in self._maps:
                blocks = drawn.get(live.agent)
                if blocks is not None:
                    live.draw(map_picture(blocks))
            self._rest()

    def forget(self, which: Callable[[LiveMap], bool] = lambda _live: True) -> None:
        """Leave maps as they are, as pictures that no longer change."""
        with self._lock:
            for live in self._maps:
                if which(live):
                    live.rest()
            self._maps = [live for live in self._maps if not which(live)]

    def _rest(self) -> None:
        """Turn the maps of agents that nobody asks into pictures."""
        for live in self._maps:
            if self._asked[live.agent] <= 0:
                live.rest()

    def _of(self, agent: str) -> list[LiveMap]:
        return [live for live in self._maps if live.agent == agent]
