"""Requests that run behind the cells: each streams into the card of the cell that made it, from a thread of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Collection
from typing import Any

from amem_jupyter.cells import Cells
from amem_jupyter.errors import is_cancelled, reason
from amem_jupyter.protocol import EventStream
from amem_jupyter.reply import Answer, Bundle, CellReplies, CellReply, CellValue


class PendingReply(Answer):
    """A reply that is on its way.

    Whatever needs it (`text`, `metrics`, `str()`, `{{name}}` in a later message) waits for it.

    Args:
        agent: who was asked.
        cells: which cell is running.
        stream: its events; cancelling it ends the request.
        follow: takes the events to their end, and gives the reply. Runs in a thread, in the context of the caller, so
            that what it shows and prints goes to the cell that asked.
        show_again: shows the card as it is, from the cell that is running.
    """

    def __init__(
        self,
        agent: str,
        cells: Cells,
        stream: EventStream,
        follow: Callable[[], CellReply],
        show_again: Callable[[], None],
    ) -> None:
        super().__init__(cells)
        self.agent = agent
        self._stream = stream
        self._follow = follow
        self._show_again = show_again
        self._done = threading.Event()
        self._reply: CellReply | None = None
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run,), name=f"amem-cell-{agent}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._reply = self._follow()
        except BaseException as error:  # noqa: BLE001  # whoever waits gets it; the card has said it already
            self._error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._done.is_set()

    @property
    def failure(self) -> str:
        """Why there is no reply, in a few words; "" while it is on its way, if it is there, or if it was cancelled."""
        error = self._error
        return "" if error is None or is_cancelled(error) else reason(error, self.agent)

    @property
    def answered(self) -> bool:
        """Whether the reply is there."""
        return self._reply is not None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended, or so long; whether it has.

        The card is then shown again by the cell that waited: nbclient and papermill drop what a cell shows after its
        end, but take a change of its outputs that comes from the cell that is running.
        """
        if not self._done.wait(timeout_s):
            return False
        if not self.in_its_cell:
            self._show_again()
        return True

    def cancel(self) -> None:
        """Ask that it ends; the agent is then as it was before. `wait` waits for that."""
        self._stream.cancel()

    @property
    def reply(self) -> CellReply:
        """The reply, once it is there.

        Raises
        ------
            AmemError: it was cancelled, or has failed.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply

    def __repr__(self) -> str:
        if not self.done:
            return f"<{self.agent} is answering>"
        return repr(self._reply) if self._reply is not None else f"<no reply of {self.agent}: {self._error}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        if self._reply is None:
            return {"text/plain": repr(self)}, {}
        return self._reply._repr_mimebundle_(include, exclude)


class PendingReplies(CellValue, dict[str, PendingReply]):
    """The replies of several agents, by name, that are on their way."""

    def __init__(self, pending: dict[str, PendingReply], cells: Cells) -> None:
        dict.__init__(self, pending)
        CellValue.__init__(self, cells)

    @property
    def done(self) -> bool:
        """Whether all have ended, in whatever way."""
        return all(one.done for one in self.values())

    def wait(self) -> None:
        """Wait until all have ended."""
        for one in self.values():
            one.wait()

    def cancel(self) -> None:
        """Ask that all end; `wait` waits for that."""
        for one in self.values():
            one.cancel()

    @property
    def replies(self) -> CellReplies:
        """All of them, once they are there.

        Raises
        ------
            AmemError: one was cancelled, or has failed; the others have ended by then.
        """
        self.wait()
        return CellReplies({name: one.reply for name, one in self.items()}, self._cells, self._execution)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        if not all(one.answered for one in self.values()):
            return {"text/plain": repr(self)}, {}
        return self.replies._repr_mimebundle_(include, exclude)


class Background:
    """All requests behind the cells of one notebook that nobody has waited for yet."""

    def __init__(self) -> None:
        self._pending: list[PendingReply] = []

    def add(self, pending: PendingReply) -> None:
        """Keep one; those that went well are forgotten, those that failed are told at the next wait."""
        self._pending = [other for other in self._pending if not other.done or other.failure] + [pending]

    def has(self, name: str) -> bool:
        """Whether one of this agent is kept."""
        return any(pending.agent == name for pending in self._pending)

    def take(self, names: Collection[str]) -> list[PendingReply]:
        """Those of some agents, or of all, which are kept no longer."""
        taken = [pending for pending in self._pending if not names or pending.agent in names]
        self._pending = [pending for pending in self._pending if pending not in taken]
        return taken

    def put_back(self, pending: Collection[PendingReply]) -> None:
        """Keep again what was taken."""
        self._pending = [*pending, *self._pending]

    def running(self, names: Collection[str] = ()) -> list[PendingReply]:
        """Those that have not ended."""
        return [pending for pending in self._pending if not pending.done and (not names or pending.agent in names)]
