"""A Jupyter kernel that has the notebook layer loaded: a tile in the launcher is all that a student needs."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from amem.errors import InputError

EXTENSION = "amem_jupyter"
NAME = "amem"
DISPLAY_NAME = "amem (agents)"

_NAME = re.compile(r"[a-z0-9._-]{1,64}", re.IGNORECASE)


def install(*, name: str = NAME, display_name: str = DISPLAY_NAME, prefix: Path | None = None) -> Path:
    """Register this Python as a kernel with the extension loaded; gives the folder of its kernelspec.

    Without ``prefix`` every Jupyter of this user sees it, else those that look under that prefix.

    Raises
    ------
        InputError: the name is no kernel's, ipykernel is missing, or the folder cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name of a kernel: use letters, digits, dots, dashes and underscores.")
    try:
        from ipykernel.kernelspec import write_kernel_spec
        from jupyter_client.kernelspec import KernelSpecManager
    except ImportError as error:
        raise InputError(f"this Python has no ipykernel ({sys.executable} -m pip install ipykernel).") from error
    with tempfile.TemporaryDirectory() as scratch:
        source = write_kernel_spec(
            Path(scratch) / name,
            overrides={"display_name": display_name},
            extra_arguments=[f"--IPKernelApp.extra_extensions={EXTENSION}"],
        )
        try:
            found: str = KernelSpecManager().install_kernel_spec(
                source, kernel_name=name, user=prefix is None, prefix=str(prefix) if prefix is not None else None
            )
        except OSError as error:
            raise InputError(f"the kernel cannot be written: {error}.") from error
    return Path(found)
