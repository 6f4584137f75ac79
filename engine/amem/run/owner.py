"""The one thread that does all MLX work: jobs that others queue, and between them the scheduler's steps."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from amem.errors import EngineClosed

T = TypeVar("T")


class Stepper(Protocol):
    """What the thread drives between jobs."""

    @property
    def busy(self) -> bool: ...

    def step(self) -> None: ...

    def fail_all(self, error: BaseException) -> None: ...


class _Job:
    """A call that somebody may wait for."""

    def __init__(self, call: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        self.call = call
        self.fail = fail


class OwnerThread:
    """Runs queued jobs in order, and one scheduler step at a time while the scheduler has work.

    If a step dies of an error that no request can be blamed for, every waiting caller gets it at once, and the thread
    goes on with the next job. If the thread itself dies, all who wait get an error at once, too, and the next call
    starts a new one, in which ``recover`` runs first.
    """

    def __init__(self, name: str = "amem-owner") -> None:
        self._name = name
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stepper: Stepper | None = None
        self._recover: Callable[[], None] | None = None
        self._closed = False
        self._lock = threading.RLock()  # held to queue a job, and by a dying thread: nothing is left behind
        self._alive = False
        self._thread = threading.Thread(target=lambda: None)
        with self._lock:
            self._start()

    def _start(self) -> None:
        self._alive = True
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def drive(self, stepper: Stepper, recover: Callable[[], None] | None = None) -> None:
        """The scheduler whose steps run between jobs; ``recover`` drops what a dead thread left unusable."""
        self._stepper = stepper
        self._recover = recover

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job.

        Raises
        ------
            EngineClosed: the engine was closed, or belongs to the process that this one was forked from.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:  # noqa: BLE001  # the caller gets whatever it was
                    future.set_exception(error)

        def fail(error: BaseException) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        if os.getpid() != self._pid:
            raise EngineClosed("the engine belongs to the process that this one was forked from: make a new one here.")
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine is closed: make a new one with Engine(...).")
            if not self._alive:
                self._start()
                if self._recover is not None:
                    self._jobs.put(_Job(self._recover, lambda _error: None))
            self._jobs.put(_Job(run, fail))
        return future

    def call(self, job: Callable[[], T]) -> T:
        """Run a job in the thread and wait for its result."""
        if self.is_current:
            return job()
        return self.submit(job).result()

    def close(self, *, wait: bool = True) -> None:
        """Finish the jobs that are queued, then end; without ``wait`` the caller does not see the end."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        if wait and not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  # whatever kills the thread is told to all who wait for it
            self._die(error)

    def _serve(self) -> None:
        while True:
            busy = self._stepper is not None and self._stepper.busy
            try:
                job = self._jobs.get(block=not busy)
            except queue.Empty:
                self._step()
                continue
            if job is None:
                break
            job.call()
            del job  # it holds its caller, such as an engine that would otherwise never be dropped
        if self._stepper is not None:
            self._stepper.fail_all(EngineClosed("the engine was closed while this request was running."))

    def _step(self) -> None:
        assert self._stepper is not None
        try:
            self._stepper.step()
        except Exception as error:  # noqa: BLE001  # no request can be blamed: all get it, and the thread lives
            self._stepper.fail_all(error)

    def _die(self, error: BaseException) -> None:
        """Tell everyone, and let the next call start another thread."""
        death = EngineClosed(f"the engine's thread died ({error!r}); agents are as they were saved: ask again.")
        death.__cause__ = error
        with self._lock:
            self._alive = False
            while True:
                try:
                    job = self._jobs.get(block=False)
                except queue.Empty:
                    break
                if job is not None:
                    job.fail(death)
            if self._stepper is not None:
                self._stepper.fail_all(death)
