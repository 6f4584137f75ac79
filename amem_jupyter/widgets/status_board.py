"""The live form of `%amem status --live`: the dashboard, with buttons for each agent."""

from __future__ import annotations

from typing import Any

import traitlets

from amem_jupyter.widgets.panel import PanelWidget, source, style


class StatusBoardWidget(PanelWidget):
    """Sends ``{"act": ..., "agent": ...}`` when a button is pressed.

    `agents` has a name and the possible acts for each row of the picture's table.
    """

    _esm = source("status_board")
    _css = style("status_board")
    agents: traitlets.List[dict[str, Any]] = traitlets.List().tag(sync=True)
