"""Turns that could not be saved: remembered as long as their agent is open, and saved with whatever is saved next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from amem.store import facts
from amem.store.commit import add_realization, history_of
from amem.store.database import Database
from amem.store.records import NewTurn, Realization, Realm, Tokens
from amem.store.transcript import Row


@dataclass
class HeldTurn:
    """A turn without blocks of its own; ``last_block`` is the last sealed one of its history that is stored."""

    turn: NewTurn
    realm: Realm
    token_ids: Tokens
    n_tokens: int
    last_block: str | None
    created: float
    number: int | None = None  #: set when it is inserted first, and kept


class HeldTurns:
    """In the order in which they were made."""

    def __init__(self) -> None:
        self.turns: list[HeldTurn] = []
        self._aside = 0

    @contextlib.contextmanager
    def aside(self, database: Callable[[], Database]) -> Iterator[None]:
        """They make way for other transactions; those that were not saved meanwhile come back. May be nested.

        ``database`` gives the one that is open then.
        """
        if not self._aside:
            database().drop_held()
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1
            if not self._aside:
                self._show(database())

    def _show(self, database: Database) -> None:
        """Let every reader of an open database see them, without a byte on the disk."""
        if self.turns:
            database.hold(lambda: self.add_to(database))

    def add(self, held: HeldTurn, database: Database) -> int:
        """Hold one more, while they are aside; its number. What is refused is not held."""
        self.turns.append(held)
        try:
            self._show(database)
        except BaseException:
            self.turns.remove(held)
            raise
        database.drop_held()
        assert held.number is not None
        return held.number

    def add_to(self, database: Database) -> list[Row]:
        """Add them to a database within a transaction, and move the head to the last; their rows for the transcript."""
        rows: list[Row] = []
        for held in self.turns:
            history = history_of(database, held.turn.parent, held.realm, held.token_ids, held.n_tokens)
            saved = database.add_turn(held.turn, held.created, held.number)
            last = held.last_block if database.tree.block(held.last_block or "") else None  # a quota may have taken it
            value = Realization(saved.id, held.realm, held.token_ids, held.n_tokens, last, None, None)
            add_realization(database, value, history, (), None)
            database.set_state("head", str(saved.id))
            held.number = saved.id
            rows += [facts.turn_row(saved), facts.realization_row(value)]
        return rows
