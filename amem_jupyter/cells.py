"""Which cell is running. The engine decides what running it again means; here are only the two facts it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from IPython.core.interactiveshell import InteractiveShell


class Cells:
    """The running cell's id and a token for this execution of it.

    The id is the front end's: nbformat's in JupyterLab, a URI in VS Code, none under nbclient and papermill. Code
    that a cell runs in turn (``%run``, ``run_cell``) belongs to the same execution.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._depth = 0
        self._message = self._message_id()
        self.cell_id: str | None = _cell_id_of(self._parent())
        self.execution = uuid4().hex
        self.at_start: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Follow the shell's cells from now on."""
        self._shell.events.register("pre_run_cell", self._before)
        self._shell.events.register("post_run_cell", self._after)

    def detach(self) -> None:
        """Follow them no longer."""
        self._shell.events.unregister("pre_run_cell", self._before)
        self._shell.events.unregister("post_run_cell", self._after)

    def _before(self, info: Any) -> None:
        message = self._message_id()
        # A cell that was ended hard sends no post_run_cell: another request's id shows that this is a new cell.
        if self._depth == 0 or message != self._message:
            self._depth, self._message = 0, message
            self.cell_id = getattr(info, "cell_id", None)
            self.execution = uuid4().hex
            for hook in self.at_start:
                hook()
        self._depth += 1

    def _after(self, _result: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            for hook in self.at_end:
                hook()

    def _parent(self) -> dict[str, Any]:
        get_parent = getattr(self._shell, "get_parent", None)
        return get_parent() or {} if get_parent is not None else {}

    def _message_id(self) -> str | None:
        header = self._parent().get("header") or {}
        return header.get("msg_id")


def _cell_id_of(parent: dict[str, Any]) -> str | None:
    """The id in the request that is being served, for the cell that loads the extension."""
    metadata = parent.get("metadata") or {}
    cell_id = metadata.get("cellId")
    return cell_id if isinstance(cell_id, str) else None
