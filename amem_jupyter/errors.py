"""Errors as the notebook shows them: one line for what was refused or interrupted, a traceback only for a defect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from IPython.core.error import UsageError


def is_refusal(error: BaseException) -> bool:
    """Whether an error is one that the engine raises on purpose.

    Told by name: after %autoreload a class is another one than that which an older object was made of.
    """
    return any(base.__name__ == "AmemError" for base in type(error).__mro__)


def is_cancelled(error: BaseException) -> bool:
    """Whether an error only says that a request was cancelled; told by name for the same reason."""
    return any(base.__name__ == "Cancelled" for base in type(error).__mro__)


def reason(error: BaseException, agent: str) -> str:
    """Why a reply ended early, in a few words."""
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted; {agent} is as it was before"
    if is_cancelled(error):
        return f"cancelled; {agent} is as it was before"
    if is_refusal(error):
        return str(error)
    return f"{type(error).__name__}: {error}"


class Interrupted(KeyboardInterrupt):
    """A keyboard interrupt that IPython shows in one line instead of our frames."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


Interrupted.__name__ = KeyboardInterrupt.__name__  # what front ends show, and clients look for


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turn the engine's refusals into IPython's UsageError, which is shown without a traceback."""
    try:
        yield
    except Exception as error:
        if is_refusal(error):
            raise UsageError(f"{error}{_choice(error)}") from error
        raise


def _choice(error: BaseException) -> str:
    """What else a person can do where another kernel, perhaps of the same notebook, has the agent."""
    locked = any(base.__name__ == "AgentLocked" for base in type(error).__mro__)
    return ". Or give this kernel agents of its own: %amem space NAME" if locked else ""
