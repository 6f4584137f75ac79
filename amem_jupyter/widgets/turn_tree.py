"""The live form of `%amem tree`: a click on a turn stands the agent there."""

from __future__ import annotations

from amem_jupyter.widgets.panel import PanelWidget, source, style


class TurnTreeWidget(PanelWidget):
    """Sends ``{"act": "checkout", "turn": ...}`` when a turn is clicked."""

    _esm = source("turn_tree")
    _css = style("turn_tree")
