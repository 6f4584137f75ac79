"""The maps, the trees and the dashboard of a notebook: alive from the cell that made them until it runs again.

They become pictures when the cell runs again, when the engine is closed, when the kernel ends, and when nothing has
happened to them for a while; where the front end tells no cell ids (as pipelines, in which nobody clicks), they are
pictures from the start.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from amem_jupyter.dashboard import board_picture
from amem_jupyter.errors import is_refusal
from amem_jupyter.markup import Picture
from amem_jupyter.panels import Panel
from amem_jupyter.protocol import AgentLike, EngineLike
from amem_jupyter.render import stage_words
from amem_jupyter.tables import map_picture, tree_picture

if TYPE_CHECKING:
    from amem.results import AgentStatus, Event, Reply, ReplyMetrics
    from amem_jupyter.widgets.panel import PanelWidget

IDLE_S = 900.0  #: after so long without a change or a click it becomes a picture
REFRESH_S = 1.0  #: between two pictures while a reply comes in
KEPT = 40  #: replies of an agent in its history

Look = Callable[[EngineLike], tuple[Picture, dict[str, Any]]]
Message = Mapping[str, Any]


class Board(Panel):
    """One of them, in the output of one cell.

    Args:
        kind: what it shows.
        agent: whose it is; "": everyone's.
        cell_id: the cell that it stands in, if that is known.
        look: what it shows now, and the traits of its widget besides.
        engine: where to look first.
        make: makes the widget of a picture and those traits.
        follows: whether what it shows changes while a reply comes in.
    """

    def __init__(self, kind: str, agent: str, cell_id: str | None, look: Look, engine: EngineLike,
                 make: Callable[[Picture, dict[str, Any]], PanelWidget], *, follows: bool) -> None:  # fmt: skip
        picture, more = look(engine)
        super().__init__(cell_id, picture, lambda now: make(now, more))
        self.kind = kind
        self.agent = agent
        self.look = look
        self.follows = follows
        self.looked_at = 0.0
        self.timer: threading.Timer | None = None

    def shows(self, agent: str) -> bool:
        """Whether an agent is on it."""
        return self.agent in ("", agent)

    def rest(self) -> None:
        """Become a picture."""
        if self.timer is not None:
            self.timer.cancel()
        super().rest()


class Boards:
    """All of them. Cells, requests behind the cells and clicks may call this from several threads.

    Args:
        engine: the engine at hand, if there is one.
    """

    def __init__(self, engine: Callable[[], EngineLike | None]) -> None:
        self._engine = engine
        self._boards: list[Board] = []
        self._in_cell = False
        self._stale = False
        self._history: dict[str, deque[ReplyMetrics]] = {}
        self._lock = threading.RLock()

    def open_status(self, engine: EngineLike, cell_id: str | None) -> None:
        """Put a dashboard into the running cell."""

        def make(picture: Picture, more: dict[str, Any]) -> PanelWidget:
            from amem_jupyter.widgets.status_board import StatusBoardWidget

            return StatusBoardWidget(picture, **more)

        def look(engine: EngineLike) -> tuple[Picture, dict[str, Any]]:
            status = engine.status()
            with self._lock:
                history = {name: tuple(replies) for name, replies in self._history.items()}
            acts = [{"name": agent.name, "acts": _acts(agent)} for agent in status.agents]
            return board_picture(status, history), {"agents": acts}

        self._open(Board("status", "", cell_id, look, engine, make, follows=True))

    def open_map(self, agent: AgentLike, cell_id: str | None) -> None:
        """Put a map of an agent's blocks into the running cell."""

        def make(picture: Picture, _more: dict[str, Any]) -> PanelWidget:
            from amem_jupyter.widgets.block_map import BlockMapWidget

            return BlockMapWidget(picture)

        def look(engine: EngineLike) -> tuple[Picture, dict[str, Any]]:
            return map_picture(engine.agent(agent.name).block_map()), {}

        self._open_of(agent, "map", cell_id, look, make, follows=True)

    def open_tree(self, agent: AgentLike, cell_id: str | None) -> None:
        """Put an agent's tree into the running cell."""

        def make(picture: Picture, _more: dict[str, Any]) -> PanelWidget:
            from amem_jupyter.widgets.turn_tree import TurnTreeWidget

            return TurnTreeWidget(picture)

        def look(engine: EngineLike) -> tuple[Picture, dict[str, Any]]:
            return tree_picture(agent.name, engine.agent(agent.name).tree()), {}

        self._open_of(agent, "tree", cell_id, look, make, follows=False)

    def _open_of(self, agent: AgentLike, kind: str, cell_id: str | None, look: Look,
                 make: Callable[[Picture, dict[str, Any]], PanelWidget], *, follows: bool) -> None:  # fmt: skip
        engine = self._engine()
        assert engine is not None, "an agent comes from an engine"
        self._open(Board(kind, agent.name, cell_id, look, engine, make, follows=follows))

    def _open(self, board: Board) -> None:
        """Show it; where no cell ids come, there is one of each kind for an agent, the newest."""
        with self._lock:
            if board.cell_id is None:
                self.forget(lambda other: (other.cell_id, other.kind, other.agent) == (None, board.kind, board.agent))
            else:
                board.wake().on_msg(lambda _widget, message, _buffers: self._clicked(board, message))
            self._boards.append(board)
            self._keep(board)

    # -- what happens ----------------------------------------------------------------------------------------------

    def began(self, agent: str) -> None:
        """A request to `agent` begins."""
        self._tell(agent, f"{agent}: starting")

    def event(self, agent: str, event: Event) -> None:
        """A step of a request to `agent`."""
        self._tell(agent, f"{agent}: {'writing' if event.text else stage_words(event)}")
        now = time.monotonic()
        with self._lock:
            due = [
                board
                for board in self._boards
                if board.follows and board.awake and board.shows(agent) and now - board.looked_at >= REFRESH_S
            ]
            for board in due:
                board.looked_at = now
        self._draw(due)

    def answered(self, reply: Reply) -> None:
        """Keep what a reply cost."""
        with self._lock:
            self._history.setdefault(reply.metrics.agent, deque(maxlen=KEPT)).append(reply.metrics)

    def changed(self, agent: str, *, over: bool = False) -> None:
        """An agent was changed: draw everything that shows it, and when the cell ends what shows others.

        They may have had to make room for it.
        """
        if over:
            self._tell(agent, "", now=True)
        with self._lock:
            self._stale = self._in_cell
            shown = [board for board in self._boards if board.shows(agent) or not self._in_cell]
        self._draw(shown)
        for board in shown:
            self._keep(board)

    def cell_began(self, cell_id: str | None) -> None:
        """A cell begins: what it showed when it ran before is gone from the page."""
        self._in_cell = True
        if cell_id is not None:
            self.forget(lambda board: board.cell_id == cell_id)

    def cell_ended(self) -> None:
        """A cell has ended: draw all, if it changed anything; agents may have made room for others."""
        with self._lock:
            self._in_cell, stale, self._stale = False, self._stale, False
            boards = list(self._boards) if stale else []
        self._draw(boards)

    def forget(self, which: Callable[[Board], bool] = lambda _board: True) -> None:
        """Leave them as they are, as pictures that no longer change."""
        with self._lock:
            for board in self._boards:
                if which(board):
                    board.rest()
            self._boards = [board for board in self._boards if not which(board)]

    def _keep(self, board: Board) -> None:
        """Begin to count anew until it is idle."""
        with self._lock:
            if board.timer is not None:
                board.timer.cancel()
            if board.awake:
                board.timer = threading.Timer(IDLE_S, self._idle, (board,))
                board.timer.daemon = True
                board.timer.start()

    def _idle(self, board: Board) -> None:
        with self._lock:
            board.rest()

    def _tell(self, agent: str, words: str, *, now: bool = False) -> None:
        with self._lock:
            for board in self._boards:
                if board.shows(agent):
                    board.tell(words, now=now)

    def _draw(self, boards: list[Board]) -> None:
        """Look again; the engine is asked without the lock, since it may take a while to answer."""
        engine = self._engine()
        for board in boards:
            try:
                if engine is None or (board.agent and board.agent not in engine.agents()):
                    continue
                picture, more = board.look(engine)
            except Exception as error:
                if is_refusal(error):  # in passing it must not fail a cell
                    continue
                raise
            with self._lock:
                board.draw(picture, **more)
                board.looked_at = time.monotonic()

    # -- clicks ----------------------------------------------------------------------------------------------------

    def _clicked(self, board: Board, message: Message) -> None:
        """Do what a button or a turn stands for, and say how it went."""
        engine, name = self._engine(), str(message.get("agent") or board.agent)
        self._keep(board)
        try:
            if engine is None or name not in engine.agents():
                words = f"{name} is not there any more"
            else:
                words = _act(engine, name, message)
        except Exception as error:
            if not is_refusal(error):
                raise
            words = str(error)
        self.changed(name)
        with self._lock:
            board.tell(words, now=True)


def _acts(agent: AgentStatus) -> list[str]:
    """What can be done with an agent as it is."""
    moves = {"hot": ["evict"], "warm": ["restore"]}.get(agent.residency, [])
    return [*moves, "unpin" if agent.pinned else "pin", *(["fork"] if agent.n_turns else [])]


def _act(engine: EngineLike, name: str, message: Message) -> str:
    """Do it; gives a sentence about it."""
    agent, act = engine.agent(name), message.get("act")
    if act == "checkout":
        agent.checkout(int(message["turn"]))
        return f"{name} stands at turn {message['turn']}"
    if act == "fork":
        new = next(free for n in range(1, 10_000) if (free := f"{name}-{n + 1}") not in engine.agents())
        agent.fork(new)
        return f"{new} starts with all of {name}'s state"
    done = {"evict": agent.evict, "restore": agent.restore, "pin": agent.pin, "unpin": agent.unpin}
    if act not in done:
        return f"there is nothing called {act!r} to do"
    done[act]()
    return {"evict": f"{name} is on disk only", "restore": f"{name} is in memory",
            "pin": f"{name} stays in memory", "unpin": f"{name} may be evicted"}[act]  # fmt: skip
