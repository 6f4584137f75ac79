"""Replies as the notebook's values: each shows its card, and not twice in the cell that made it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from amem_jupyter.cells import Cells
from amem_jupyter.markup import Picture
from amem_jupyter.render import reply_card, side_by_side

if TYPE_CHECKING:
    from amem.results import Reply, ReplyMetrics

Bundle = tuple[dict[str, str], dict[str, Any]]


def output_metadata(reply: Reply) -> dict[str, Any]:
    """An output's metadata: the reply's metrics, under ``amem``. The blocks are in the picture."""
    return {"amem": _figures(reply)}


def row_metadata(replies: list[Reply]) -> dict[str, Any]:
    """The metadata of an output with several replies."""
    return {"amem": {"agents": [_figures(reply) for reply in replies]}}


def _figures(reply: Reply) -> dict[str, Any]:
    metrics = reply.metrics.to_dict()
    del metrics["blocks"]
    return {**metrics, "turn": reply.turn, "finish_reason": reply.finish_reason}


class CellValue:
    """What a cell that asks evaluates to (``_``, ``Out``, ``--into``)."""

    def __init__(self, cells: Cells, execution: str | None = None) -> None:
        self._cells = cells
        self._execution = execution or cells.execution

    @property
    def in_its_cell(self) -> bool:
        """Whether the execution that made it still runs."""
        return self._cells.execution == self._execution

    def _ipython_display_(self) -> None:
        """Show nothing in the execution that made it, whose card is there already; else leave it to the bundle."""
        if not self.in_its_cell:
            raise NotImplementedError


class Answer(CellValue, ABC):
    """The value of a cell that asks one agent."""

    @property
    @abstractmethod
    def reply(self) -> Reply | CellReply:
        """The reply."""
        ...

    @property
    def text(self) -> str:
        """What the agent said."""
        return self.reply.text

    @property
    def metrics(self) -> ReplyMetrics:
        """What it cost."""
        return self.reply.metrics

    def __str__(self) -> str:
        return self.text


class CellReply(Answer):
    """A reply that is there."""

    def __init__(self, reply: Reply, cells: Cells, how: str = "md", execution: str | None = None) -> None:
        super().__init__(cells, execution)
        self._reply = reply
        self.how = how  #: how its card shows the text

    @property
    def reply(self) -> Reply:
        """The engine's reply."""
        return self._reply

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens as they were generated."""
        return self._reply.token_ids

    @property
    def finish_reason(self) -> str:
        """Why it ended: "stop" or "length"."""
        return self._reply.finish_reason

    @property
    def turn(self) -> int:
        """The id of its turn."""
        return self._reply.turn

    def to_dict(self) -> dict[str, Any]:
        """The reply as plain values."""
        return self._reply.to_dict()

    def __repr__(self) -> str:
        return f"<reply of {self.metrics.agent}: {self.text!r}>"

    @property
    def card(self) -> Picture:
        """Its card."""
        return reply_card(self._reply, self.how)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        del include, exclude
        return self.card.bundle(), output_metadata(self._reply)


class CellReplies(CellValue, dict[str, CellReply]):
    """The replies of several agents, by name."""

    def __init__(self, replies: dict[str, CellReply], cells: Cells, execution: str | None = None) -> None:
        dict.__init__(self, replies)
        CellValue.__init__(self, cells, execution)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        del include, exclude
        cards = side_by_side([reply.card for reply in self.values()])
        return cards.bundle(), row_metadata([reply.reply for reply in self.values()])
