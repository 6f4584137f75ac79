"""A server on a port: in the main thread until a signal, or in a thread of its own beside a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import signal
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import uvicorn

from amem.errors import AmemError, InputError
from amem.serve.app import App
from amem.serve.connection import connections
from amem.serve.desk import Desk
from amem.serve.keys import Keys
from amem.serve.limits import Limits

if TYPE_CHECKING:
    from amem.engine import Engine

_ENDING_S = 10.0  # that requests get to end, once they were told to
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000


def check_address(host: str, port: int, keys: Keys) -> None:
    """Refuse an address that is not possible, or that others can reach without a key.

    Raises
    ------
    InputError
        It says which.
    """
    if not 0 <= port <= 65535:
        raise InputError(f"a port is a number from 0 to 65535, not {port}.")
    if not keys and not is_loopback(host):
        raise InputError(
            f"others can reach {host or 'an empty host'}: give API keys (--api-key, or AMEM_API_KEY), or stay on "
            f"{DEFAULT_HOST}."
        )


def take_address(host: str, port: int, keys: Keys) -> socket.socket:
    """A socket that is bound to an address, and answers nobody yet. A model takes seconds to load: do this before.

    Raises
    ------
    InputError
        As `check_address`; or the host is not this machine's, or the port is in use.
    """
    check_address(host, port, keys)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InputError(f"the host {host!r} is not possible: {getattr(error, 'strerror', '') or error}.") from error
    with _or_close(taken, host, port):
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    return taken


@contextlib.contextmanager
def _or_close(taken: socket.socket, host: str, port: int) -> Iterator[None]:
    """Close a socket if the address is somebody else's."""
    try:
        yield
    except OSError as error:
        taken.close()
        raise InputError(f"port {port} on {host} cannot be taken: {error.strerror or error}; try --port.") from error


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: App, grace_s: float) -> None:
        super().__init__(config)
        self._app = app
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end within the grace time, then end them: uvicorn would only cut them off."""
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._app.close)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            self._app.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let a signal end the serving, and nothing more: uvicorn would raise it again, before the engine is closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {kind: signal.signal(kind, self.handle_exit) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)


class Server:
    """Serves one engine's agents. The engine stays its owner's, who closes it after the server.

    Parameters
    ----------
    engine
        Whose agents, and whose model.
    host, port
        Where; port 0 takes a free one.
    keys
        API keys; needed where others can reach the host.
    limits
        What it takes on at most.
    taken
        A socket of `take_address` for this host and port, which is the server's from now on; none: it is made now.

    Raises
    ------
    InputError
        The address is not possible, is in use, or can be reached by others without a key.
    """

    def __init__(
        self,
        engine: Engine,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        *,
        keys: Keys | None = None,
        limits: Limits | None = None,
        taken: socket.socket | None = None,
    ) -> None:
        keys, limits = keys or Keys(), limits or Limits()
        self._socket = taken if taken is not None else take_address(host, port, keys)
        with _or_close(self._socket, host, port):
            self._socket.listen(256)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        hosts = None if keys else frozenset({"localhost", "127.0.0.1", "[::1]", _in_url(host).lower()})
        try:
            app = App(Desk(engine, limits), keys, hosts)
        except BaseException:
            self._socket.close()
            raise
        config = uvicorn.Config(
            app,
            http=connections(limits),
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(limits.grace_s + _ENDING_S),
        )
        self._server = _Uvicorn(config, app, limits.grace_s)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where clients find it; those of OpenAI add ``/v1``."""
        return f"http://{_in_url(self.host)}:{self.port}"

    def run(self) -> None:
        """Serve in this thread until an interrupt or a termination: running requests may end, then it returns."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def start(self) -> Self:
        """Serve in a thread of its own; returns when it answers.

        Raises
        ------
        AmemError
            It ended before it began.
        """
        self._thread = threading.Thread(target=self.run, name="amem-serve", daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
            if not self._thread.is_alive():
                raise AmemError("the server ended before it began; its log says why.")
        return self

    def stop(self) -> None:
        """Take no more requests, let running ones end (at most the grace time), and return when all is done."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._socket.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
