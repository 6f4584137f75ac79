"""The HTTP server beside a notebook: other programs and the cells share one engine, and its agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from IPython.core.error import UsageError

from amem_jupyter.protocol import EngineLike


class ServerLike(Protocol):
    """A server that runs."""

    @property
    def url(self) -> str:
        """Where clients find it."""
        ...

    def stop(self) -> None:
        """End it; what runs may end before."""
        ...


def open_server(engine: Callable[[], EngineLike], host: str, port: int, texts: Sequence[str]) -> ServerLike:
    """A real server, started in a thread of its own. Here, and only here, the web libraries come in.

    The address is taken before the engine is asked for: it may have to load its model first.
    """
    try:
        from amem.serve import Keys, Server
        from amem.serve.server import take_address
    except ImportError as error:
        raise UsageError(f"serving needs more packages ({error.name}): %pip install 'amem[serve]'") from error
    keys = Keys.parse(texts)
    taken = take_address(host, port, keys)
    try:
        return Server(engine(), host, port, keys=keys, taken=taken).start()  # type: ignore[arg-type]  # a real one here
    except BaseException:
        taken.close()
        raise


class Serving:
    """The one server of a kernel, or none."""

    def __init__(self) -> None:
        self._server: ServerLike | None = None

    @property
    def url(self) -> str | None:
        """Where it serves; None: it does not."""
        return self._server.url if self._server is not None else None

    def start(self, engine: Callable[[], EngineLike], host: str, port: int, keys: Sequence[str]) -> str:
        """Serve an engine, and tell where; refused while one is served already."""
        if self._server is not None:
            raise UsageError(f"this kernel serves already, on {self._server.url}; %amem serve --stop ends that")
        self._server = open_server(engine, host, port, keys)
        return self._server.url

    def stop(self) -> str | None:
        """End the serving, before its engine is closed; tells where it was, None if it was not."""
        server, self._server = self._server, None
        if server is None:
            return None
        url = server.url
        server.stop()
        return url
