"""The live form of `%amem map`: the same picture as the static one, changed in place while a cell runs."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

HERE = Path(__file__).parent


class BlockMapWidget(anywidget.AnyWidget):
    """Shows `picture`, and `doing` in a line below it. Nothing of it is written into the notebook's document."""

    _esm = HERE / "block_map.js"
    _css = HERE / "block_map.css"
    picture = traitlets.Unicode().tag(sync=True)
    doing = traitlets.Unicode().tag(sync=True)
