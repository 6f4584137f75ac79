"""amem in notebooks: `%load_ext amem_jupyter`, then `%%agent NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.interactiveshell import InteractiveShell

if TYPE_CHECKING:
    from amem import Engine

__all__ = ["engine", "load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Give the shell our magics, once."""
    from amem_jupyter.extension import attach

    attach(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take them away. The engine stays for the next load; `%amem release` or the kernel's end closes it."""
    from amem_jupyter.extension import detach

    detach(shell)


def engine() -> Engine:
    """The engine behind this notebook's magics, for loops over agents: opened with the notebook's settings if need be.

    Ask for it where it is used: `%amem load` and `%amem space` put another in its place.

    Raises
    ------
        UsageError: the magics are not loaded here.
    """
    from amem_jupyter.extension import running_engine

    return running_engine()  # type: ignore[return-value]  # outside of tests it is a real one
