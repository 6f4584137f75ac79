"""The live form of `%amem map`: the same picture as the static one, changed in place while a cell runs."""

from __future__ import annotations

from amem_jupyter.widgets.panel import PanelWidget, source, style


class BlockMapWidget(PanelWidget):
    """Marks the blocks that changed since the last picture."""

    _esm = source("block_map")
    _css = style("block_map")
