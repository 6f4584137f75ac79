"""Sessions without a name: which of one key's agents a conversation goes on with, and when they are forgotten.

A client that names no agent sends its whole conversation each time. It goes on in the session that said most of it
already, if that one stands there and is free; else in a fork of it, which shares all that was stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amem.errors import AgentLocked, AmemError, UnknownTurn
from amem.serve.limits import Limits
from amem.serve.marks import PIECE, Mark, marks_of, marks_of_text
from amem.serve.threads import in_thread
from amem.wish import RAW, messages_of

if TYPE_CHECKING:
    from amem.engine import Engine
    from amem.store.records import TurnRecord

Marks = Sequence[Mark]


@dataclass(eq=False)
class Session:
    """One agent without a name."""

    name: str
    used: float  #: seconds since the epoch
    turn_of: dict[bytes, int] = field(default_factory=dict)  #: by a mark's digest: the first turn whose path says it
    end: bytes = b""  #: the mark at which it stands
    asked: bytes = b""  #: the mark of the last request, before its reply
    n_users: int = 0  #: a request, and forks that are being made of it
    is_new: bool = True  #: it has no turn of its own yet
    is_open: bool = False  #: it may hold files and memory


class Sessions:
    """The sessions of one trust domain. All of it belongs to one event loop; only the engine's work is in threads."""

    def __init__(self, engine: Engine, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self.engine = engine
        self._limits = limits
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._index: dict[bytes, dict[Session, None]] = {}
        self._loading = asyncio.Lock()
        self._loaded = False

    def __len__(self) -> int:
        return len(self._sessions)

    @contextlib.asynccontextmanager
    async def place(self, marks: Marks) -> AsyncIterator[Session]:
        """The session for a conversation with these marks; it is this caller's until the end.

        If `record` was not called by then, a session that was made for it is deleted again.

        Raises
        ------
            AmemError: a fork could not be made.
        """
        await self._load()
        session = self._free_one(marks)
        if session is None:
            session = await self._new_one(marks)
        try:
            yield session
        finally:
            session.n_users -= 1
            session.used = self._clock()
            if session.is_new:
                await self._delete(session)
            else:
                await self._close_idle()

    def record(self, session: Session, asked: Marks, whole: Marks, turn: int) -> None:
        """Note what was said in a session's turn: the marks of the request, and with its reply."""
        session.is_new = False
        session.asked, session.end = asked[-1].digest, whole[-1].digest
        self._say(session, turn, whole)

    async def expire(self) -> int:
        """Delete sessions that were idle for too long; how many."""
        await self._load()
        old = [one for one in self._idle() if one.used + self._limits.idle_s <= self._clock()]
        for session in old:
            await self._delete(session)
        return len(old)

    # -- the choice ------------------------------------------------------------------------------------------------

    def _free_one(self, marks: Marks) -> Session | None:
        """A free session that stands where the conversation goes on, or that was asked the same last."""
        found = self._deepest(marks)
        if found is None:
            return None
        mark, holders = found
        fitting = [
            session
            for session in holders
            if not session.n_users and (session.end == mark.digest or session.asked == marks[-1].digest)
        ]
        if not fitting:
            return None
        session = max(fitting, key=lambda one: (one.used, one.name))
        session.n_users += 1
        session.is_open = True
        return session

    async def _new_one(self, marks: Marks) -> Session:
        """A fork of the session that said most of it, or an empty one if none said enough to be reused."""
        await self._make_room()
        session = Session(f"session-{uuid.uuid4().hex}", self._clock(), n_users=1, is_open=True)
        found = self._deepest(marks)
        self._sessions[session.name] = session
        if found is None or found[0].n_chars < PIECE:
            return session
        mark, holders = found
        source = max(holders, key=lambda one: (one.used, one.name))
        turn = source.turn_of[mark.digest]
        source.n_users += 1
        source.is_open = True
        try:
            await in_thread(lambda: self.engine.fork(source.name, session.name, turn))
        except (AgentLocked, UnknownTurn):  # another server took it over, or it was changed: begin anew
            self.forget(source)
        except BaseException:
            await self._delete(session)
            raise
        else:
            self._say(session, turn, marks[: marks.index(mark) + 1])
        finally:
            source.n_users -= 1
        return session

    def _deepest(self, marks: Marks) -> tuple[Mark, dict[Session, None]] | None:
        """The last mark that some session has said, and who has."""
        found = None
        for mark in marks:
            holders = self._index.get(mark.digest)
            if not holders:
                break
            found = mark, holders
        return found

    # -- what is known ---------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Read what the sessions of an earlier server said, once."""
        async with self._loading:
            if self._loaded:
                return
            for entry in await in_thread(self.engine.entries):
                with contextlib.suppress(AgentLocked):  # another server's
                    turns = await in_thread(lambda entry=entry: self.engine.transcript(entry))  # type: ignore[misc]
                    self._sessions[entry.name] = self._read(entry.name, entry.last_used, turns)
            self._loaded = True

    def _read(self, name: str, used: float, turns: Mapping[int, TurnRecord]) -> Session:
        session = Session(name, used, is_new=False)
        for turn in turns.values():
            if turn.settings.get(RAW):
                asked, whole = marks_of_text(turn.prompt), marks_of_text(turn.prompt + turn.reply)
            else:
                path = _path(turns, turn)
                messages = [
                    message
                    for one in path
                    for message in (*messages_of(one), {"role": "assistant", "content": one.reply})
                ]
                tools = path[0].settings.get("tools", [])
                whole = marks_of(messages, tools, self.engine.said)
                asked = marks_of(messages[:-1], tools, self.engine.said)
            session.asked, session.end = asked[-1].digest, whole[-1].digest
            self._say(session, turn.id, whole)
        return session

    def _say(self, session: Session, turn: int, marks: Marks) -> None:
        """Note that the path of a turn has these marks."""
        for mark in marks:
            session.turn_of.setdefault(mark.digest, turn)
            self._index.setdefault(mark.digest, {})[session] = None

    # -- the end ---------------------------------------------------------------------------------------------------

    def _idle(self) -> list[Session]:
        """Sessions that nobody uses, the least recently used first."""
        return sorted((one for one in self._sessions.values() if not one.n_users), key=lambda one: one.used)

    async def _make_room(self) -> None:
        """Delete the least recently used sessions, so that one more may be made."""
        for session in self._idle()[: max(0, len(self._sessions) + 1 - self._limits.sessions)]:
            await self._delete(session)

    async def _close_idle(self) -> None:
        """Give back files and memory of the least recently used sessions."""
        n_open = sum(one.is_open for one in self._sessions.values())
        idle = [one for one in self._idle() if one.is_open]
        for session in idle[: max(0, n_open - self._limits.open_sessions)]:
            session.is_open = False
            with contextlib.suppress(AmemError):
                await in_thread(lambda name=session.name: self.engine.release(name))  # type: ignore[misc]

    async def _delete(self, session: Session) -> None:
        self.forget(session)
        with contextlib.suppress(AmemError):  # it was never made, or another process has it
            await in_thread(lambda: self.engine.delete(session.name))

    def forget(self, session: Session) -> None:
        """Know nothing of a session any more."""
        self._sessions.pop(session.name, None)
        for digest in session.turn_of:
            holders = self._index.get(digest, {})
            holders.pop(session, None)
            if not holders:
                self._index.pop(digest, None)


def _path(turns: Mapping[int, TurnRecord], turn: TurnRecord) -> list[TurnRecord]:
    """A turn and all before it, the first first."""
    path = [turn]
    while path[-1].parent is not None:
        path.append(turns[path[-1].parent])
    return path[::-1]
