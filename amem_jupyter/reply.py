"""A reply as the notebook's value: it shows its card, and not twice in the cell that made it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amem_jupyter.cells import Cells
from amem_jupyter.markup import Picture
from amem_jupyter.render import reply_card, side_by_side

if TYPE_CHECKING:
    from amem.results import Reply, ReplyMetrics


def output_metadata(reply: Reply) -> dict[str, Any]:
    """An output's metadata: the reply's metrics, under ``amem``. The blocks are in the picture."""
    return {"amem": _figures(reply)}


def _figures(reply: Reply) -> dict[str, Any]:
    metrics = reply.metrics.to_dict()
    del metrics["blocks"]
    return {**metrics, "turn": reply.turn, "finish_reason": reply.finish_reason}


class CellReply:
    """What a cell that asks an agent evaluates to (``_``, ``Out``, ``--into``)."""

    def __init__(self, reply: Reply, cells: Cells, how: str = "md", execution: str | None = None) -> None:
        self.reply = reply
        self._cells = cells
        self._execution = execution or cells.execution
        self.how = how  #: how its card shows the text

    @property
    def text(self) -> str:
        """What the agent said."""
        return self.reply.text

    @property
    def metrics(self) -> ReplyMetrics:
        """What it cost."""
        return self.reply.metrics

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens as they were generated."""
        return self.reply.token_ids

    @property
    def finish_reason(self) -> str:
        """Why it ended: "stop" or "length"."""
        return self.reply.finish_reason

    @property
    def turn(self) -> int:
        """The id of its turn."""
        return self.reply.turn

    def to_dict(self) -> dict[str, Any]:
        """The reply as plain values."""
        return self.reply.to_dict()

    def __str__(self) -> str:
        return self.reply.text

    def __repr__(self) -> str:
        return f"<reply of {self.metrics.agent}: {self.text!r}>"

    def _ipython_display_(self) -> None:
        """Show nothing in the execution that made it, whose card is there already; else leave it to the bundle."""
        if self._cells.execution != self._execution:
            raise NotImplementedError

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        del include, exclude
        return reply_card(self.reply, self.how).bundle(), output_metadata(self.reply)


class CellReplies(dict[str, CellReply]):
    """What a cell that asks several agents evaluates to: their replies by name."""

    def __init__(self, replies: dict[str, CellReply], cells: Cells) -> None:
        super().__init__(replies)
        self._cells = cells
        self._execution = cells.execution

    def shown(self) -> tuple[Picture, dict[str, Any]]:
        """The cards side by side, and their metrics by agent."""
        cards = [reply_card(reply.reply, reply.how) for reply in self.values()]
        return side_by_side(cards), {"amem": {"agents": [_figures(reply.reply) for reply in self.values()]}}

    def _ipython_display_(self) -> None:
        if self._cells.execution != self._execution:
            raise NotImplementedError

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        del include, exclude
        picture, metadata = self.shown()
        return picture.bundle(), metadata
