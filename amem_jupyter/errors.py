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


class _OneLine(BaseException):
    """An error that IPython shows in one line instead of our frames."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class Interrupted(_OneLine, KeyboardInterrupt):
    """A keyboard interrupt."""


Interrupted.__name__ = KeyboardInterrupt.__name__  # what front ends show, and clients look for


class Refused(_OneLine, Exception):
    """What was refused.

    IPython only prints a UsageError; this one is also an error output, so that a notebook that was saved or run by a
    pipeline tells why it stopped.
    """


class SettingRefused(_OneLine):
    """A setting that cannot be.

    %config logs whatever is an Exception and lets its cell go on; this one is none, and so ends the cell.
    """


Refused.__name__ = SettingRefused.__name__ = UsageError.__name__


@contextmanager
def in_one_line() -> Iterator[None]:
    """Show wrong usage, and what the engine refuses, without a traceback."""
    try:
        yield
    except UsageError as error:
        raise Refused(str(error)) from error
    except Exception as error:
        if is_refusal(error):
            raise Refused(f"{error}{_choice(error)}") from error
        raise


def _choice(error: BaseException) -> str:
    """What else a person can do where another kernel, perhaps of the same notebook, has the agent."""
    locked = any(base.__name__ == "AgentLocked" for base in type(error).__mro__)
    return ". Or give this kernel agents of its own: %amem space NAME" if locked else ""
