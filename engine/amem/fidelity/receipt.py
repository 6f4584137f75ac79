"""A receipt for one agent: what its stored state says of its own last tokens, beside full precision."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from amem.errors import InputError, MemoryBudgetError
from amem.fidelity.compare import Apart, joined, steps
from amem.fidelity.figures import Receipt, ReplayCost
from amem.fidelity.replay import CHUNK, Replay, exact_layout
from amem.kv.codec import GROUP
from amem.kv.pool import Pool
from amem.kv.sequence import SequenceState
from amem.restoring import Restore
from amem.sizes import format_size
from amem.store.records import Found

if TYPE_CHECKING:
    from amem.session import AgentSession

_STEP_S = 0.25  #: of prefill between two looks at other requests
_SAMPLE_CHUNK = 16  #: tokens with logits between two looks: a prompt's chunk would let others wait for seconds


class AgentReplay:
    """Makes the receipt of one agent, in steps between which others are served.

    The stored state is read from disk into a sequence of its own; the agent's head, its state in memory and its store
    stay as they are. All but the reading belongs to the owner thread.

    Args:
        session: of the agent.
        n_tokens: about how many of the last tokens are the sample; up to 64 more, since stored state ends at groups.

    Raises
    ------
        InputError: there is no stored state that could be tested.
    """

    def __init__(self, session: AgentSession, n_tokens: int) -> None:
        if n_tokens < 1:
            raise InputError(f"the sample must have at least 1 token, not {n_tokens}.")
        self._session = session
        self._parts = session.parts
        self._n_tokens = n_tokens
        self._ids = [int(token) for token in session.head_tokens()]
        self._cut = max(GROUP, (len(self._ids) - 1 - n_tokens) // GROUP * GROUP)
        if len(self._ids) < GROUP + 2:
            raise InputError(
                f"agent {session.name!r} has {len(self._ids)} tokens in stored form for this model and codec: a group "
                f"of {GROUP} and two more are needed, since a token's own group is exact: ask it something more first."
            )
        self._restore = Restore(session, self._find(), self._find)
        if self._restore.found.n_tokens < GROUP:
            raise InputError(
                f"agent {session.name!r} has no stored state of its first {self._cut} tokens: it was not saved, or not "
                "in this form; ask it something first."
            )
        self._exact_layout = exact_layout(self._parts.layout.spec)
        self._sequences: list[SequenceState] = []
        self._steps: Iterator[Receipt | None] | None = None

    def _find(self) -> Found:
        return self._session.find(self._ids[: self._cut + 1], prefer=None)

    @property
    def _end(self) -> int:
        """Position after the sample: with recurrent layers stored state may end long before the last tokens."""
        return min(len(self._ids), self._restore.found.n_tokens + self._n_tokens + GROUP)

    @property
    def cost(self) -> ReplayCost:
        """What it will take."""
        start, rate = self._restore.found.n_tokens, self._parts.scheduler.rate
        history, sample = rate.seconds(0, start), rate.seconds(start, self._end)
        seconds = None if history is None or sample is None else history + 2 * sample
        nbytes = self._exact_nbytes() + self._restore.room_nbytes(self._end)
        return ReplayCost(self._session.name, start, self._end - start, nbytes, seconds)

    def _exact_nbytes(self) -> int:
        """The most that the exact sequence takes."""
        empty = SequenceState(self._exact_layout, Pool(1 << 60))
        return empty.nbytes + empty.missing_nbytes(self._end, CHUNK)

    def begin(self) -> Future[None]:
        """Take the memory for all of it, and begin to read the stored state.

        Raises
        ------
            MemoryBudgetError: there is no room. Nothing has changed but for agents that were evicted to make some.
        """
        exact_nbytes = self._exact_nbytes()
        nbytes = exact_nbytes + self._restore.room_nbytes(self._end)
        if not self._parts.make_room(nbytes, keep=self._session):
            raise MemoryBudgetError(
                f"a receipt of agent {self._session.name!r} needs {format_size(nbytes)} of K/V memory beside what runs "
                f"and is pinned, of a budget of {format_size(self._parts.pool.total)}: raise it with memory=, or unpin "
                "agents."
            )
        self._restore.start(self._end)
        exact = SequenceState(self._exact_layout, self._parts.pool)
        self._sequences.append(exact)
        exact.reserve(self._end, CHUNK)
        assert self._restore.reading is not None
        return self._restore.reading

    def step(self) -> Receipt | None:
        """Compute for some tenths of a second, once the reading is done; the receipt when it is complete.

        Raises
        ------
            InputError: the stored state was damaged, and nothing is left of it.
        """
        if self._steps is None:
            self._steps = self._run()
        return next(self._steps)

    def _run(self) -> Iterator[Receipt | None]:
        started = time.perf_counter()
        stored = self._restore.load()
        self._sequences.append(stored)
        self._session.notes += self._restore.notes
        start = stored.n_tokens
        if start < GROUP:
            raise InputError(
                f"agent {self._session.name!r}: its stored state is damaged; %amem verify names the files."
            )
        stored.reserve(self._end, CHUNK)
        exact, other = (Replay(self._parts.runner, sequence) for sequence in self._sequences)
        for at in range(0, start, CHUNK):
            history = self._parts.runner.prefill(self._sequences[0], self._ids[at : min(at + CHUNK, start)])
            while not history.advance(_STEP_S):
                yield None
        sample = self._ids[start : self._end]
        parts: list[Apart] = []
        for _, part in steps(sample, exact, {"stored": other}, _SAMPLE_CHUNK):
            parts.append(part)
            yield None
        summary = joined(parts).summary()
        codec, seconds = self._parts.realm.codec, time.perf_counter() - started
        yield Receipt(self._session.name, codec, start, len(sample), summary, seconds)

    def release(self) -> None:
        """Give all memory back."""
        self._steps = None  # a chunk that is half computed ends here, in the thread that it belongs to
        self._restore.abandon()
        for sequence in self._sequences:
            sequence.release()
        self._sequences = []
