"""Iteration by iteration: admit what has arrived, a slice of prefill, one decode step for all that decode."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from amem.errors import AmemError, Cancelled
from amem.kv.codec import GROUP
from amem.kv.sequence import Checkpoint
from amem.results import Event
from amem.run.pace import Gaps, PrefillRate
from amem.run.request import Request
from amem.run.runner import PrefillChunk, Runner


@dataclass(eq=False)
class _Later:
    """A job of no request that waits for an I/O thread."""

    reading: Future[None]
    job: Callable[[], None]
    done: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # whoever waits may stop waiting; the job is the engine's


@dataclass
class _Slice:
    """The chunk that is being computed."""

    request: Request
    start: int
    stop: int
    chunk: PrefillChunk


class Scheduler:
    """Moves requests through waiting, reading, prefill, decode and commit. It belongs to the owner thread.

    Parameters
    ----------
    prefill_chunk
        Tokens of a prompt that go through the model at once: rounded down to whole groups.
    max_batch
        The most requests that are admitted at once.
    step_s
        Seconds that a reply waits at most for its next token because of others' prompts, and a cancelled request for
        its end; a layer of one chunk, or a decode step, may take longer than that.
    rate
        Is told what each chunk took.
    """

    def __init__(
        self, runner: Runner, *, prefill_chunk: int, max_batch: int, step_s: float, rate: PrefillRate | None = None
    ) -> None:
        self.gaps = Gaps()
        self.rate = rate or PrefillRate()
        self._runner = runner
        self._chunk = max(GROUP, prefill_chunk // GROUP * GROUP)
        self._max_batch = max_batch
        self._step_s = step_s
        self._decode_s = 0.0  # of the last decode step
        self._slice: _Slice | None = None
        self._waiting: deque[Request] = deque()
        self._matched: deque[Request] = deque()  # they wait for room
        self._reading: list[Request] = []
        self._prefilling: deque[Request] = deque()
        self._decoding: list[Request] = []
        self._closing: list[Request] = []  # replies whose last kept token is still to be fed
        self._later: list[_Later] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._active or self._later)

    @property
    def crowded(self) -> bool:
        """Whether requests wait for their turn or for room."""
        return bool(self._waiting or self._matched)

    @property
    def _active(self) -> list[Request]:
        return [*self._matched, *self._reading, *self._prefilling, *self._decoding, *self._closing]

    def is_running(self, group: object) -> bool:
        """Whether a request of this group (an agent) works on its state; one that still reads can do without."""
        return self.running(group) is not None

    def running(self, group: object) -> Request | None:
        """That request."""
        found = (request for request in self._active if request.group is group and request.sequence is not None)
        return next(found, None)

    def is_asked(self, group: object) -> bool:
        """Whether a request of this group waits or runs."""
        return any(request.group is group for request in [*self._waiting, *self._active])

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def after(self, reading: Future[None], job: Callable[[], None]) -> Future[None]:
        """Run a job between two steps, when some bytes are in; its end is the future's."""
        self._later.append(_Later(reading, job))
        return self._later[-1].done

    def fail_all(self, error: BaseException) -> None:
        """End every request with an error."""
        for later in self._later:
            later.done.set_exception(error)
        self._later.clear()
        for request in [*self._waiting, *self._active]:
            with contextlib.suppress(Exception):  # the others are to be told all the same
                self._end(request, error)

    def step(self) -> None:
        """One iteration. An error of one request ends that request alone."""
        for request in [*self._waiting, *self._active]:
            if request.cancelled:
                self._end(request, Cancelled("the request was cancelled; its agent is as it was before."))
        self._admit()
        self._reserve()
        self._collect()
        self._prefill()
        self._decode()
        self._run_later()
        if self.busy and not (self._prefilling or self._decoding or self._closing):
            time.sleep(0.0005)  # only I/O threads have work: do not spin

    # -- stages --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        groups = {id(request.group) for request in self._active}
        for request in list(self._waiting):
            if len(self._active) >= self._max_batch:
                return
            if id(request.group) in groups:
                continue
            groups.add(id(request.group))
            self._waiting.remove(request)
            request.marks.admitted = time.perf_counter()
            self._matched.append(request)
            self._guard(request, partial(self._match, request))

    def _match(self, request: Request) -> None:
        request.work.match(request)
        if request.recorded is not None:
            self._forget(request)
            request.events.put(Event(text=request.recorded.text))
            request.events.put(Event(reply=request.recorded))
            return
        request.marks.matched = time.perf_counter()

    def _reserve(self) -> None:
        """Give requests their room in the order of admission: what does not fit holds others back, so none starves."""
        while self._matched:
            request = self._matched[0]
            self._guard(request, partial(self._take_room, request))
            if request in self._matched:
                return

    def _take_room(self, request: Request) -> None:
        now = time.perf_counter()
        if request.work.reserve(request):
            self._matched.remove(request)
            self._reading.append(request)
            request.waited_s = now - request.marks.matched
            if request.reading is not None:
                request.reading.add_done_callback(partial(_note_time, request))
            if request.reading is not None:
                request.events.put(Event(stage="restore", total=request.n_reused))
        elif len(self._matched) == len(self._active):
            raise request.work.no_room(request)

    def _collect(self) -> None:
        """Move requests whose bytes are in to prefill."""
        for request in list(self._reading):
            if request.reading is None or request.reading.done():
                self._guard(request, partial(self._load, request))

    def _load(self, request: Request) -> None:
        if request.bytes_in:
            request.waited_s += time.perf_counter() - request.bytes_in
        request.work.load(request)
        self._reading.remove(request)
        request.marks.restored = time.perf_counter()
        self._prefilling.append(request)

    def _prefill(self) -> None:
        """Compute a part of one chunk: as much as those that decode can wait for."""
        if not self._prefilling:
            return
        request = self._slice.request if self._slice is not None else self._prefilling[0]
        self._guard(request, partial(self._prefill_slice, request))

    def _prefill_slice(self, request: Request) -> None:
        if self._slice is None:
            self._slice = self._next_chunk(request)
        if self._slice is not None:
            seconds = self._step_s
            if self._decoding or self._closing:
                seconds = max(seconds - self._decode_s, seconds / 4)  # slow decoding must not stop all prefill
            if not self._slice.chunk.advance(seconds):
                return
            self._end_chunk(request, self._slice)
        sequence = request.sequence
        assert sequence is not None
        if sequence.n_tokens == request.n_turn - 1:
            self._prefilling.remove(request)
            if request.finish_reason:
                self._closing.append(request)
            else:
                request.marks.prefilled = time.perf_counter()
                self._decoding.append(request)

    def _next_chunk(self, request: Request) -> _Slice | None:
        sequence = request.sequence
        assert sequence is not None
        # the last token is always fed alone: as a decode step, or as the turn's closing step
        ids = [*request.prompt_ids, *request.kept_ids]
        start, end = sequence.n_tokens, len(ids) - 1
        if start >= end:
            return None
        # the last, partial group is a step of its own: computed again from a stored boundary it has the same bits
        whole = end // GROUP * GROUP
        stop = min(whole, (start + self._chunk) // GROUP * GROUP) if start < whole else end
        return _Slice(request, start, stop, self._runner.prefill(sequence, ids[start:stop]))

    def _end_chunk(self, request: Request, done: _Slice) -> None:
        self._slice = None
        self.rate.record(done.start, done.stop - done.start, done.chunk.seconds)
        request.work.progress(request)
        total = request.n_turn - 1 - request.n_reused
        request.events.put(Event(stage="prefill", done=done.stop - request.n_reused, total=total))

    def _decode(self) -> None:
        """One token for each request that decodes, and the last kept one for each that closes, in one batch."""
        batch = [*self._decoding, *self._closing]
        if not batch:
            return
        started = time.perf_counter()
        points = [request.sequence.checkpoint() for request in batch if request.sequence is not None]
        try:
            logits = self._feed(batch)
        except Exception as error:  # noqa: BLE001  # one of them has it
            if len(batch) == 1:
                self._end(batch[0], error)
            else:
                self._decode_alone(batch, points, error)
            return
        self._decode_s = time.perf_counter() - started
        self._advance(batch, logits)

    def _feed(self, batch: Sequence[Request]) -> mx.array:
        sequences = [request.sequence for request in batch if request.sequence is not None]
        return self._runner.decode(sequences, [(request.kept_ids or request.prompt_ids)[-1] for request in batch])

    def _decode_alone(self, batch: Sequence[Request], points: Sequence[Checkpoint], error: Exception) -> None:
        """After a batch failed: the same step one by one, so that only who cannot do it ends."""
        alone: list[Request] = []
        for request, point in zip(batch, points, strict=True):
            if request.sequence is not None and request.sequence.rollback(point):
                alone.append(request)
            else:
                self._end(request, error)
        for request in alone:
            try:
                logits = self._feed([request])
            except Exception as own:  # noqa: BLE001  # its caller gets whatever it was
                self._end(request, own)
            else:
                self._advance([request], logits)

    def _advance(self, batch: Sequence[Request], logits: mx.array) -> None:
        """What follows a step: the next token, or the commit."""
        for row, request in enumerate(batch):
            if request in self._closing:
                self._guard(request, partial(self._commit, request))
            else:
                self._guard(request, partial(self._sample, request, logits[row]))

    def _sample(self, request: Request, logits: mx.array) -> None:
        request.work.progress(request)
        before = request.marks.last_token
        request.take(int(request.sample(logits).tolist()))  # type: ignore[arg-type]  # a scalar
        if before:
            self.gaps.record(request.marks.last_token - before)
        else:
            request.work.answering(request)
        if not request.finish_reason:
            return
        self._decoding.remove(request)
        sequence = request.sequence
        assert sequence is not None
        n_kept = len(request.prompt_ids) + request.n_kept
        if n_kept > sequence.n_tokens:  # the last token was sampled, not fed
            self._closing.append(request)
        elif sequence.cut(n_kept):
            if request.tail_ids:  # the stop string began inside a token: what it said before that is fed anew
                self._prefilling.append(request)
            else:
                self._commit(request)
        else:
            # recurrent layers cannot be cut back: compute the kept part again from where the request began
            if request.checkpoint is None or not sequence.rollback(request.checkpoint):
                raise AmemError("the reply could not be cut at its stop string; ask again without --stop.")
            self._prefilling.append(request)

    def _commit(self, request: Request) -> None:
        reply = request.work.commit(request)
        self._forget(request)
        request.sequence = request.checkpoint = None  # whoever keeps the request keeps no state in memory
        request.events.put(Event(reply=reply))

    def _run_later(self) -> None:
        ready = [later for later in self._later if later.reading.done()]
        self._later = [later for later in self._later if later not in ready]
        for later in ready:
            try:
                later.job()
                later.done.set_result(None)
            except Exception as error:  # noqa: BLE001  # whoever waits gets whatever it was
                later.done.set_exception(error)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _guard(self, request: Request, stage: Callable[[], None]) -> None:
        try:
            stage()
        except Exception as error:  # noqa: BLE001  # the caller gets whatever it was
            self._end(request, error)

    def _end(self, request: Request, error: BaseException) -> None:
        self._forget(request)
        if self._slice is not None and self._slice.request is request:
            self._slice = None
            request.checkpoint = None  # in the middle of a chunk nothing can be rolled back
        try:
            request.work.abort(request)
        finally:
            request.sequence = request.checkpoint = None
            request.events.put(error)  # whatever fails: somebody waits for this

    def _forget(self, request: Request) -> None:
        for stage in (self._waiting, self._matched, self._reading, self._prefilling, self._decoding, self._closing):
            if request in stage:
                stage.remove(request)


def _note_time(request: Request, _reading: Future[None]) -> None:
    request.bytes_in = time.perf_counter()
