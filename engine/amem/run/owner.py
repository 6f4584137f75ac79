"""The one thread that does all MLX work: jobs that others queue, and between them the scheduler's steps."""

from __future__ import annotations

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


class OwnerThread:
    """Runs queued jobs in order, and one scheduler step at a time while the scheduler has work.

    If a step dies of an error that no request can be blamed for, every waiting caller gets it at once, and the thread
    goes on with the next job.
    """

    def __init__(self, name: str = "amem-owner") -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stepper: Stepper | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def drive(self, stepper: Stepper) -> None:
        """The scheduler whose steps run between jobs."""
        self._stepper = stepper

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
            EngineClosed: the thread has ended.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:  # noqa: BLE001  # the caller gets whatever it was
                    future.set_exception(error)

        if self._closed or not self._thread.is_alive():
            raise EngineClosed("the engine is closed: make a new one with Engine(...).")
        self._jobs.put(run)
        return future

    def call(self, job: Callable[[], T]) -> T:
        """Run a job in the thread and wait for its result."""
        if self.is_current:
            return job()
        return self.submit(job).result()

    def wake(self) -> None:
        """Let the thread look at its scheduler again."""
        if not self._closed:
            self._jobs.put(lambda: None)

    def close(self, *, wait: bool = True) -> None:
        """Finish the jobs that are queued, then end; without ``wait`` the caller does not see the end."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        if wait and not self.is_current:
            self._thread.join()

    def _run(self) -> None:
        while True:
            busy = self._stepper is not None and self._stepper.busy
            try:
                job = self._jobs.get(block=not busy)
            except queue.Empty:
                self._step()
                continue
            if job is None:
                break
            job()
            del job  # it holds its caller, such as an engine that would otherwise never be dropped
        if self._stepper is not None:
            self._stepper.fail_all(EngineClosed("the engine was closed while this request was running."))

    def _step(self) -> None:
        assert self._stepper is not None
        try:
            self._stepper.step()
        except BaseException as error:  # noqa: BLE001  # no request can be blamed: all get it, and the thread lives
            self._stepper.fail_all(error)
