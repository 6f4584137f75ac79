"""Background work that outlives the interpreter's own shutdown of thread pools."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """A pool of threads. Work is done at once, in the caller's thread, without any, and when the pool has been shut.

    Python shuts every pool as soon as the main thread ends, before any exit handler: a turn that is running then still
    has to be cleaned up.
    """

    def __init__(self, n_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(max(1, n_threads), name)  # which starts them at the first use
        if not n_threads:
            self._pool.shutdown()

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue work; its result or error is the future's."""
        try:
            return self._pool.submit(work, *args, **kwargs)
        except RuntimeError:
            future: Future[T] = Future()
            try:
                future.set_result(work(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # whoever asks for the result gets it
                future.set_exception(error)
            return future

    def shutdown(self) -> None:
        """Finish what is queued, and end the threads."""
        self._pool.shutdown()
