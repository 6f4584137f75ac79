"""The agents that are open in an engine: opened, forked, moved and let go of in one place."""

from __future__ import annotations

import contextlib
import secrets
from concurrent.futures import Future
from functools import partial

from amem.errors import AmemError, InputError
from amem.parts import EngineParts
from amem.prefetch import Prefetch
from amem.results import AgentStatus
from amem.session import AgentSession
from amem.shortening import shortened
from amem.store import AgentEntry, names


class Roster:
    """Sessions by space and name. It belongs to the owner thread.

    Args:
        parts: what agents share; they are told of the sessions here.
        prefetch: whether agents that usually come next are restored meanwhile.
    """

    def __init__(self, parts: EngineParts, *, prefetch: bool) -> None:
        self.sessions: dict[tuple[str, str], AgentSession] = {}
        self._parts = parts
        parts.sessions = self._residents
        parts.prefetch = Prefetch(parts, self.sessions) if prefetch else None

    def _residents(self) -> list[AgentSession]:
        """All who may hold memory."""
        prefetch = self._parts.prefetch
        return [*self.sessions.values(), *(prefetch.residents if prefetch is not None else ())]

    # -- opening

    def make(self, space: str, name: str) -> AgentSession:
        """An agent that is to be there from now on, whatever is asked of it."""
        session = self.for_request(space, name)
        session.unmake = None
        return session

    def for_request(self, space: str, name: str) -> AgentSession:
        """An agent that a request is about to be made to: without it there may be none afterwards."""
        is_new = _place(space, name) not in self.sessions and not self._parts.store.has(name, space)
        session = self._open(space, name, create=True)
        if is_new:
            session.unmake = partial(self._unmake, *_place(space, name))
        return session

    def known(self, space: str, name: str) -> AgentSession:
        """An agent that is there.

        Raises
        ------
            InputError: it is not.
        """
        return self._open(space, name, create=False)

    def idle(self, space: str, name: str) -> AgentSession:
        """An agent that is there, and not asked.

        Raises
        ------
            InputError: it is not there, or a request to it waits or runs.
        """
        session = self.known(space, name)
        if session.is_asked:
            raise InputError(f"agent {name!r} is answering: wait for it, or cancel its request, first.")
        return session

    def _open(self, space: str, name: str, *, create: bool) -> AgentSession:
        place, prefetch = _place(space, name), self._parts.prefetch
        session = self.sessions.get(place)
        if session is None and prefetch is not None:
            session = prefetch.claim(*place)
        if session is None:
            n_known = len(self._parts.store.reports)
            session = AgentSession(self._parts, self._parts.store.open(name, space, create=create))
            session.notes = self._parts.store.reports[n_known:]
            if prefetch is not None:
                prefetch.hand_over(session)
        self.sessions[place] = session
        return session

    def fork(
        self, space: str, name: str, new_name: str, at: int | str | None, keep_last: int | None, *, replace: bool
    ) -> None:
        """Make an agent that starts where another stands, or stood at a turn; see `Agent.fork`."""
        session, store = self.known(space, name), self._parts.store
        place = _place(space, new_name)
        taken = store.has(new_name, space)
        if taken and not replace:
            raise InputError(f"an agent {new_name!r} exists already: choose another name, or delete it first.")
        if place == _place(space, name):
            raise InputError(f"agent {name!r} cannot be replaced by its own fork: choose another name.")
        turn = session.tree.turn_of(at) if at is not None else session.store.head
        kept = shortened(session, turn, keep_last) if keep_last is not None else None
        made_as = f"being made: {secrets.token_hex(8)}" if taken else new_name  # nothing is deleted before it is there
        stored = store.open(made_as, space) if kept is not None else session.store.fork(made_as, space, turn)
        made = None
        try:
            if kept is not None:
                kept.write(stored)
            made = session.fork(stored, turn if kept is None else None)
            if taken:
                self.delete(space, new_name)
        except BaseException:
            if made is not None:
                made.evict()
            stored.delete()
            raise
        if taken:
            stored.move(space, new_name)
        self.sessions[place] = made

    def move(self, old_space: str, new_space: str) -> list[str]:
        """Move all agents of a space into another; gives their names. See `Engine.adopt`."""
        store = self._parts.store
        old_space, new_space = names.canonical(old_space), names.canonical(new_space)
        theirs = store.agents(old_space)
        both = {entry.name for entry in theirs} & {entry.name for entry in store.agents(new_space)}
        if both and old_space != new_space:
            raise InputError(f"both spaces have an agent {min(both)!r}: rename, export or delete one of them first.")
        for entry in theirs:
            with store.borrow(entry.key) as agent:
                agent.move(new_space)
            if (session := self.sessions.pop((entry.space, entry.name), None)) is not None:
                self.sessions[_place(new_space, entry.name)] = session
        return [entry.name for entry in theirs]

    # -- looking

    def status(self, entry: AgentEntry) -> AgentStatus:
        """An agent's status; one that is not open here is opened for this moment only, so that others may write to it.

        Raises
        ------
            AgentLocked: another engine or process is writing to it.
        """
        if (session := self.sessions.get((entry.space, entry.name))) is not None:
            return session.status()
        with self._parts.store.borrow(entry.key) as store:
            session = AgentSession(self._parts, store)
            if self._parts.prefetch is not None:
                self._parts.prefetch.show(session)
            return session.status()

    def restore(self, space: str, name: str) -> Future[None]:
        """Begin to bring an agent's stored state into memory; see `Engine.prefetch`."""
        session = self.idle(space, name)
        restore = session.begin_restore()
        if restore is None or restore.reading is None:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self._parts.scheduler.after(restore.reading, lambda: session.finish_restore(restore))

    # -- letting go

    def release(self, space: str, name: str) -> None:
        """Close an agent, if it is open, so that another process may write to it; see `Engine.release`."""
        if _place(space, name) in self.sessions:
            session = self.idle(space, name)
            self._let_go(space, name)
            session.store.close()

    def delete(self, space: str, name: str) -> None:
        """Delete an agent and all that is stored of it."""
        session = self.idle(space, name)
        self._let_go(space, name)
        session.store.delete()

    def _unmake(self, space: str, name: str) -> None:
        """Delete an agent that a request had made, if nothing came of it and nobody else wants it."""
        session = self.sessions.get((space, name))
        if session is None or session.is_asked or session.pinned or session.store.turns() or session.store.meta:
            return
        with contextlib.suppress(AmemError):  # an empty agent is left then, which harms nobody
            self.delete(space, name)

    def _let_go(self, space: str, name: str) -> None:
        session = self.sessions.pop(_place(space, name))
        session.evict()
        self.finish_writes()  # those under way must not outlive the agent's lock

    def finish_writes(self) -> None:
        """Wait until what was handed to the writer is written."""
        self._parts.writer.submit(lambda: None).result()

    def evict_all(self) -> None:
        """Take every state out of memory; what was saved is on disk."""
        for session in self._residents():
            session.evict()

    def close(self) -> None:
        """Let go of every agent, whatever fails with one of them."""
        for session in self._residents():
            with contextlib.suppress(Exception):  # the other agents' locks are to be freed all the same
                session.evict()
                session.store.close()
        self.sessions.clear()


def _place(space: str, name: str) -> tuple[str, str]:
    """Where an agent's session is, whichever way its name was typed. Raises InputError: no agent can have it."""
    label = names.label(name, space)
    return label.space, label.name
