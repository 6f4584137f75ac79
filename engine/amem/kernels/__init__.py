"""Kernels for Linux's CPU, compiled by numba and kept beside their source.

Numba compiles a kernel again if its own file changed, but not if one changed whose functions were compiled into it. A
kernel of two versions could do anything, so what is kept is forgotten here when any of the files is another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_KEPT_OF = "kept-of.sha256"
T = TypeVar("T")


def forget_what_others_compiled(folder: Path) -> int:
    """Delete the compiled kernels of a folder's sources if those have changed since; how many files.

    Where the folder cannot be written numba keeps its kernels elsewhere, and only an installation changes the sources:
    all of them, and numba sees that.
    """
    kept = folder / "__pycache__"
    sources = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    digest = hashlib.sha256(sources).hexdigest()
    n = 0
    with contextlib.suppress(OSError):
        mark = kept / _KEPT_OF
        if mark.exists() and mark.read_text(encoding="ascii") == digest:
            return 0
        n = forget(folder)
        kept.mkdir(exist_ok=True)
        mark.write_text(digest, encoding="ascii")
    return n


def forget(folder: Path = Path(__file__).parent) -> int:
    """Delete all compiled kernels of a folder, which may be damaged; how many files."""
    n = 0
    with contextlib.suppress(OSError):
        for pattern in ("*.nbi", "*.nbc"):
            for file in (folder / "__pycache__").glob(pattern):
                file.unlink(missing_ok=True)
                n += 1
    return n


def read_or_compile(load: Callable[[], T]) -> T:
    """What ``load`` imports and compiles; once more without what was kept, if that cannot be read."""
    try:
        return load()
    except Exception:
        if not forget():
            raise
        return load()


def can_compile() -> bool:
    """Whether numba is there, and not told to leave everything to Python."""
    return importlib.util.find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") in {"", "0"}


forget_what_others_compiled(Path(__file__).parent)
