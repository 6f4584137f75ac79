"""One output of a cell that is a live widget while that is of use, and a picture before and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from amem_jupyter.live import INTERVAL_S, Output
from amem_jupyter.markup import Picture

if TYPE_CHECKING:
    from amem_jupyter.widgets.panel import PanelWidget


class Panel:
    """A picture in the running cell, which can become a widget and a picture again.

    Args:
        cell_id: the cell that it stands in, if that is known.
        picture: what it shows at first.
        make: makes its widget; called when it comes alive, so that ipywidgets is not imported before.
    """

    def __init__(self, cell_id: str | None, picture: Picture, make: Callable[[Picture], PanelWidget]) -> None:
        self.cell_id = cell_id
        self._make = make
        self._output = Output()
        self._widget: PanelWidget | None = None
        self._picture = picture
        self._told_at = 0.0
        self._output.show(picture)

    @property
    def awake(self) -> bool:
        """Whether it is a widget now."""
        return self._widget is not None

    def draw(self, picture: Picture, **more: Any) -> None:
        """Show another picture, in whichever form it has now; `more` are the widget's own traits."""
        self._picture = picture
        if self._widget is None:
            self._output.show(picture)
        else:
            self._widget.show(picture, **more)

    def wake(self) -> PanelWidget:
        """Become a widget."""
        if self._widget is None:
            self._widget = self._make(self._picture)
            self._output.send(self._widget.bundle())
        return self._widget

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
            widget.end()
