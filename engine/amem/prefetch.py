"""Prefetch: the agents that usually come next are restored while the present one is answered."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from amem.errors import AmemError, StoreError
from amem.parts import EngineParts
from amem.restoring import Restore
from amem.results import PrefetchStatus, Residency
from amem.session import AgentSession

_MOST = 2  #: agents that are expected at a time


@dataclass(eq=False)
class _Guess:
    """The state of an agent that is not open here: its lock is held only while it is read."""

    session: AgentSession
    reading: bool = True
    realizes: object = None  #: identifies what the state in memory is, once it is there


class Prefetch:
    """Learns which agent follows which, and restores what it expects; belongs to the owner thread.

    It evicts agents that are idle and not expected themselves, never waits, and does nothing while requests wait.
    """

    def __init__(self, parts: EngineParts, sessions: Mapping[tuple[str, str], AgentSession]) -> None:
        self._parts = parts
        self._sessions = sessions
        self._guesses: dict[str, _Guess] = {}  # by the agent's key
        self._expected: set[str] = set()  # keys of agents that were restored and not asked since
        self._last: dict[str, str] = {}  # in each space, the key of the agent that was asked last
        self._n_restored = self._n_hits = self._n_misses = 0

    def status(self) -> PrefetchStatus:
        return PrefetchStatus(self._n_restored, self._n_hits, self._n_misses)

    @property
    def residents(self) -> list[AgentSession]:
        """Sessions that are not open and hold memory all the same."""
        return [guess.session for guess in self._guesses.values()]

    # -- around a request

    def asked(self, session: AgentSession) -> None:
        """A request to an agent begins."""
        key = session.store.key
        in_memory = session.incoming is not None or session.residency is Residency.HOT
        if key in self._expected and in_memory:
            self._n_hits += 1
        elif session.residency is Residency.WARM:
            self._n_misses += 1
        self._expected.discard(key)
        space = session.store.space
        if self._last.get(space, key) != key:
            with contextlib.suppress(StoreError):  # an index that cannot be written fails no request
                self._parts.store.record_transition(space, self._last[space], key)
        self._last[space] = key

    def expect(self, session: AgentSession) -> None:
        """Restore who usually comes next: an agent has begun to answer."""
        if self._parts.scheduler.crowded:
            return
        try:
            keys = self._parts.store.likely_next(session.store.space, session.store.key, _MOST)
        except StoreError:
            return
        self._guesses = {key: guess for key, guess in self._guesses.items() if guess.reading or guess.session.hot_bytes}
        spared = [guess.session for key, guess in self._guesses.items() if key in keys]
        spared += [other for other in self._sessions.values() if other.store.key in keys]
        for key in keys:
            with contextlib.suppress(AmemError, FileNotFoundError):  # in use, deleted, damaged or too large: not now
                self._bring(key, spared)

    def _bring(self, key: str, spared: list[AgentSession]) -> None:
        parts, label = self._parts, self._parts.store.label(key)
        session = self._sessions.get((label.space, label.name))
        if key in self._guesses or (session is not None and (session.is_asked or session.incoming is not None)):
            return
        guess = None
        if session is None:
            session = AgentSession(parts, parts.store.open_briefly(key))
            guess = self._guesses[key] = _Guess(session)
        restore = None
        try:
            restore = session.begin_restore(spared)
        finally:
            if restore is None and guess is not None:  # there is nothing to restore, or no room
                del self._guesses[key]
                session.store.close()
        if restore is None or restore.reading is None:
            return
        spared.append(session)
        self._n_restored += 1
        self._expected.add(key)
        parts.scheduler.after(restore.reading, partial(self._finish, session, restore, guess))

    def _finish(self, session: AgentSession, restore: Restore, guess: _Guess | None) -> None:
        claimed = guess is not None and self._guesses.get(session.store.key) is not guess
        try:
            session.finish_restore(restore)
            if guess is not None:
                guess.realizes = _identity(session)
        finally:
            if guess is not None and not claimed:
                guess.reading = False
                session.store.close()

    # -- an agent that was guessed is opened

    def claim(self, space: str, name: str) -> AgentSession | None:
        """The session of an agent that is being read on a guess. It stays open, and is the caller's from here on."""
        for key, guess in self._guesses.items():
            if guess.reading and (guess.session.store.space, guess.session.name) == (space, name):
                del self._guesses[key]
                guess.session.store.keep_open()
                return guess.session
        return None

    def hand_over(self, session: AgentSession) -> None:
        """Give a session the state that was restored on a guess, if that is still its head's."""
        self.show(session)
        guess = self._guesses.pop(session.store.key, None)
        if guess is None:
            return
        if session.hot is not None:
            session.last_used = guess.session.last_used
            guess.session.hot = None
        guess.session.evict()

    def show(self, session: AgentSession) -> None:
        """Let a session that is only looked at see that state."""
        guess = self._guesses.get(session.store.key)
        if guess is not None and guess.session.hot is not None and guess.realizes == _identity(session):
            session.hot, session.hot_turn = guess.session.hot, guess.session.hot_turn


def _identity(session: AgentSession) -> object:
    """Tells one realization of a head from any other: the ids of its blocks are random."""
    known = session.head_realization()
    return None if known is None else (known.turn, known.n_tokens, known.last_block, known.tail, known.snapshot)
