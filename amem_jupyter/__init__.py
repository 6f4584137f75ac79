"""amem in notebooks: `%load_ext amem_jupyter`, then `%%agent NAME`."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Give the shell our magics, once."""
    from amem_jupyter.extension import attach

    attach(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take them away. The engine stays for the next load; `%amem release` or the kernel's end closes it."""
    from amem_jupyter.extension import detach

    detach(shell)
