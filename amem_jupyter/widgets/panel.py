"""What all live widgets have in common: a picture that changes in place, and a line below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from amem_jupyter.markup import Picture

HERE = Path(__file__).parent


def source(name: str) -> str:
    """A widget's JavaScript, below the part that all of them share."""
    return "\n".join((HERE / f"{file}.js").read_text(encoding="utf-8") for file in ("panel", name))


def style(name: str) -> str:
    """A widget's CSS, below the part that all of them share."""
    return "\n".join((HERE / f"{file}.css").read_text(encoding="utf-8") for file in ("panel", name))


class PanelWidget(anywidget.AnyWidget):
    """Shows `picture`, and `doing` in a line below it.

    `text` is the picture as text. The front end puts both into the notebook's document in place of the view, which
    would be no use without its kernel.
    """

    _esm = ""
    picture = traitlets.Unicode().tag(sync=True)
    text = traitlets.Unicode().tag(sync=True)
    doing = traitlets.Unicode().tag(sync=True)
    view_id = traitlets.Unicode().tag(sync=True)

    def __init__(self, picture: Picture, **more: Any) -> None:
        super().__init__(picture=picture.html, text=picture.text, **more)
        self.view_id = self.model_id

    def show(self, picture: Picture, **more: Any) -> None:
        """Change the picture, and whatever else changes with it, in one message."""
        with self.hold_sync():
            for name, value in {"picture": picture.html, "text": picture.text, **more}.items():
                setattr(self, name, value)

    def bundle(self) -> dict[str, Any]:
        """The MIME bundle that shows it; its picture is for whoever shows no widgets."""
        made = self._repr_mimebundle_()
        data = made[0] if isinstance(made, tuple) else made
        return {**(data or {}), "text/html": self.picture, "text/plain": self.text}

    def end(self) -> None:
        """Leave no model behind."""
        self.layout.close()  # ipywidgets leaves it open
        self.close()
