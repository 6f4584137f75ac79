"""One request on its way through the engine: what it wants, where it is, and when it got there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from amem.errors import MemoryBudgetError
from amem.kv.sequence import Checkpoint, SequenceState
from amem.results import Event, Reply, TokenLogprob
from amem.run.events import Events


class TextSink(Protocol):
    """Turns generated ids into text, and finds stop strings in it; `amem.model.reply.ReplyText` is one."""

    text: str

    @property
    def stopped(self) -> bool: ...

    @property
    def stop(self) -> str | None: ...

    @property
    def n_kept(self) -> int: ...

    @property
    def tail_ids(self) -> Sequence[int]: ...

    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Work(Protocol):
    """The part of a request that knows its agent: matching, restoring, committing."""

    def match(self, request: Request) -> None:
        """Set the request's ids, and find what is stored of them, or its recorded reply."""
        ...

    def reserve(self, request: Request) -> bool:
        """Take the room for all it can need, and begin to read. False: wait until others have finished."""
        ...

    def no_room(self, request: Request) -> MemoryBudgetError:
        """Why `reserve` said no although no other request is running."""
        ...

    def load(self, request: Request) -> None:
        """Set the request's sequence, when its bytes are in."""
        ...

    def answering(self, request: Request) -> None:
        """Called with its first token: what is best done while it decodes."""
        ...

    def progress(self, request: Request) -> None:
        """Called after each step; streams full blocks to disk."""
        ...

    def commit(self, request: Request) -> Reply:
        """Make the turn durable."""
        ...

    def abort(self, request: Request) -> None:
        """Leave the agent as it was before the request."""
        ...


@dataclass
class Marks:
    """Seconds (monotonic) at which a request passed each stage; 0.0 until it did."""

    submitted: float = 0.0
    admitted: float = 0.0
    matched: float = 0.0
    restored: float = 0.0
    prefilled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def now(self, seconds: float) -> None:
        """Pass all stages at once, as a request does that finds its reply recorded."""
        self.matched = self.restored = self.prefilled = self.first_token = self.last_token = seconds


@dataclass(eq=False)
class Request:
    """A prompt to be continued. Everything but ``events`` and ``cancel`` belongs to the owner thread."""

    work: Work
    sample: Callable[[mx.array], mx.array]  #: logits [V] -> token id, a scalar
    text: TextSink
    max_tokens: int
    eos_token_ids: frozenset[int]
    group: object  #: requests of one group (an agent) run one after the other
    events: Events = field(default_factory=Events)
    marks: Marks = field(default_factory=Marks)
    sequence: SequenceState | None = None
    checkpoint: Checkpoint | None = None
    prompt_ids: list[int] = field(default_factory=list)  #: the whole history, this prompt included
    n_reused: int = 0
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  #: of the generated tokens, if ``sample`` notes them
    n_kept: int = 0  #: generated tokens that the turn keeps
    tail_ids: Sequence[int] = ()  #: tokens that the turn has after these, where a stop string began inside a token
    finish_reason: str = ""
    reading: Future[None] | None = None
    bytes_in: float = 0.0  #: when ``reading`` was done
    waited_s: float = 0.0  #: seconds in which nothing but others' work kept it between its match and its prefill
    recorded: Reply | None = None  #: if its reply was given before, and that will do
    _n_told: int = 0  #: tokens whose logprobs went out with an event
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Ask that it ends at the next step. Any thread may call this."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def kept_ids(self) -> Sequence[int]:
        """The reply's tokens in the turn."""
        return [*self.generated[: self.n_kept], *self.tail_ids]

    @property
    def n_turn(self) -> int:
        """Tokens at the turn's end: the prompt's and the kept ones."""
        return len(self.prompt_ids) + self.n_kept + len(self.tail_ids)

    @property
    def kept_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Those of the kept tokens, without the end-of-turn token."""
        return tuple(entry for entry in self.logprobs[: self.n_kept] if entry.token_id not in self.eos_token_ids)

    @property
    def n_computed(self) -> int:
        """Prompt tokens that were run through the model."""
        return len(self.prompt_ids) - self.n_reused

    def take(self, token_id: int) -> None:
        """Add a generated token, and decide whether the reply ends with it."""
        now = time.perf_counter()
        if not self.generated:
            self.marks.first_token = now
        self.marks.last_token = now
        self.generated.append(token_id)
        shown = self.text.add(token_id)
        if token_id in self.eos_token_ids:
            self.finish_reason = "stop"
        elif len(self.generated) >= self.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason:
            shown += self.text.finish()
        if self.text.stopped:
            self.finish_reason = "stop"
        self.n_kept, self.tail_ids = self.text.n_kept, self.text.tail_ids
        if shown:
            told, self._n_told = self.kept_logprobs[self._n_told :], len(self.logprobs)
            self.events.put(Event(text=shown, logprobs=told))
