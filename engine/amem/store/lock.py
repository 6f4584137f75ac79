"""One writer per agent, across processes and within one: a lock that the system frees when its holder dies."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from amem.errors import AgentLocked

LOCK = "lock"


_BRIEF_S, _UNKNOWN_S, _PAUSE_S = 30.0, 1.0, 0.01


class AgentLock:
    """An exclusive lock on an agent's folder. Its file says who holds it; the lock itself is the system's (flock)."""

    def __init__(self, folder: Path, name: str, *, brief: bool = False) -> None:
        """Take the lock, or raise AgentLocked (who holds it, since when), or FileNotFoundError (no such folder).

        ``brief`` marks a holder that is done in a moment (eviction, verify): others wait for it instead of failing.
        """
        path = folder / LOCK
        started = time.monotonic()
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same(descriptor, path):
                    break
                os.close(descriptor)  # the folder was deleted, and perhaps made anew, since the file was opened
            except BlockingIOError:
                holder = _holder(descriptor)
                os.close(descriptor)
                patience = _UNKNOWN_S if holder is None else _BRIEF_S if holder.get("brief") else 0.0
                if time.monotonic() - started >= patience:
                    raise AgentLocked(_held(name, holder)) from None
                time.sleep(_PAUSE_S)
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor: int | None = descriptor
        self.note(brief=brief)

    def note(self, *, brief: bool) -> None:
        """Say in the lock's file who holds it, since now, and whether only for a moment."""
        if self._descriptor is None:
            return
        now = dt.datetime.now().astimezone().isoformat(timespec="seconds")
        note = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now, "brief": brief}).encode()
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, only its holder is not known
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, note, 0)

    def release(self) -> None:
        """Free the lock. May be called twice."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            # Unlocked, not only closed: a child that was forked meanwhile has a copy of the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> dict[str, Any] | None:
    """Who holds the lock; None while it is not known yet."""
    try:
        said = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _held(name: str, holder: dict[str, Any] | None) -> str:
    who = "another process"
    if holder is not None:
        same = holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname()
        who = f"{'this process' if same else 'process'} {holder.get('pid')} on {holder.get('host')}"
        who += f" since {holder.get('since')}"
    return f"agent {name!r} is in use by {who}; close it there first (%amem release, or end that kernel)"
