"""The live form of `%amem map`: the static picture, changed in place while agents answer, with zoom and keys."""

from __future__ import annotations

from amem_jupyter.widgets.panel import PanelWidget, source, style


class BlockMapWidget(PanelWidget):
    """Marks the blocks that changed since the last picture; tells about the one that is pointed at or has the focus."""

    _esm = source("block_map")
    _css = style("block_map")
