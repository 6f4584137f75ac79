"""The block maps of a notebook: live widgets while a cell asks an agent, static pictures whenever the kernel rests.

A widget's view that is saved shows "model not found" when the notebook is opened again, and no HTML beside it helps.
So a widget lives only from a request to the end of the cell that made it: what is saved is the picture.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from amem_jupyter.live import INTERVAL_S, Output
from amem_jupyter.render import stage_words
from amem_jupyter.tables import map_picture

if TYPE_CHECKING:
    from amem.results import BlockMap, Event
    from amem_jupyter.widgets.block_map import BlockMapWidget


class LiveMap:
    """One map in the output of one cell."""

    def __init__(self, agent: str, cell_id: str | None, blocks: BlockMap) -> None:
        self.agent = agent
        self.cell_id = cell_id
        self._output = Output()
        self._widget: BlockMapWidget | None = None
        self._picture = map_picture(blocks)
        self._told_at = 0.0
        self._output.show(self._picture)

    def draw(self, blocks: BlockMap) -> None:
        """Show these blocks, in whichever form the map has now."""
        self._picture = map_picture(blocks)
        if self._widget is None:
            self._output.show(self._picture)
        else:
            self._widget.picture = self._picture.html

    def wake(self) -> None:
        """Become a widget."""
        if self._widget is None:
            from amem_jupyter.widgets.block_map import BlockMapWidget

            self._widget = BlockMapWidget(picture=self._picture.html)
            self._output.send(_view(self._widget, self._picture.text))

    def tell(self, words: str, *, now: bool = False) -> None:
        """Say what goes on, at most ten times a second."""
        at = time.monotonic()
        if self._widget is not None and (now or at - self._told_at >= INTERVAL_S):
            self._told_at = at
            self._widget.doing = words

    def rest(self) -> None:
        """Become a picture, and leave no model behind."""
        if self._widget is not None:
            widget, self._widget = self._widget, None
            self._output.send(self._picture.bundle())
            widget.layout.close()  # ipywidgets leaves it open
            widget.close()


def _view(widget: BlockMapWidget, text: str) -> dict[str, Any]:
    """The MIME bundle that shows a widget."""
    bundle = widget._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    return {**(data or {}), "text/plain": text}


class Maps:
    """All maps of one notebook."""

    def __init__(self, block_map: Callable[[str], BlockMap | None]) -> None:
        self._block_map = block_map
        self._maps: list[LiveMap] = []
        self._stale = False

    def open(self, agent: str, cell_id: str | None, blocks: BlockMap) -> None:
        """Put a map into the running cell. Without a cell id an agent has one map, the newest."""
        if cell_id is None:
            self.forget(lambda live: live.cell_id is None and live.agent == agent)
        live = LiveMap(agent, cell_id, blocks)
        live.wake()
        self._maps.append(live)

    def began(self, agent: str) -> None:
        """A request to `agent` begins: its maps come alive."""
        for live in self._of(agent):
            live.wake()

    def event(self, agent: str, event: Event) -> None:
        """A step of a request to `agent`."""
        for live in self._of(agent):
            live.tell("writing" if event.text else stage_words(event))

    def changed(self, agent: str) -> None:
        """A request to `agent` or a change of it is over: draw its maps anew, and the others when the cell ends."""
        self._stale = True
        for live in self._of(agent):
            live.tell("", now=True)
        self._draw(self._of(agent))

    def cell_began(self, cell_id: str | None) -> None:
        """A cell begins: the maps that it made when it ran before are gone from the page."""
        if cell_id is not None:
            self.forget(lambda live: live.cell_id == cell_id)

    def cell_ended(self) -> None:
        """A cell has ended: pictures again, and those of agents that it touched in passing are drawn anew."""
        if self._stale:
            self._stale = False
            self._draw(self._maps)
        for live in self._maps:
            live.rest()

    def forget(self, which: Callable[[LiveMap], bool] = lambda _live: True) -> None:
        """Leave maps as they are, as pictures that no longer change."""
        for live in self._maps:
            if which(live):
                live.rest()
        self._maps = [live for live in self._maps if not which(live)]

    def _of(self, agent: str) -> list[LiveMap]:
        return [live for live in self._maps if live.agent == agent]

    def _draw(self, maps: list[LiveMap]) -> None:
        drawn = {live.agent: self._block_map(live.agent) for live in maps}
        for live in maps:
            blocks = drawn[live.agent]
            if blocks is not None:
                live.draw(blocks)
