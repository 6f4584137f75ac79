"""What was found out about a model once, kept by its fingerprint: measured or checked again only where that may differ.

It is found out again for another version of MLX, mlx-lm or amem, and on another device.
"""

from __future__ import annotations

import contextlib
import json
import os
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from amem.model.bundled import cache_folder


def _state() -> list[str]:
    return [*(version(name) for name in ("mlx", "mlx-lm", "amem")), str(mx.default_device())]


def recall(kind: str, fingerprint: str) -> Any:
    """What `remember` was told, or None."""
    path = cache_folder().parent / kind / f"{fingerprint}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["state"] == _state():
            return known["found"]
    return None


def remember(kind: str, fingerprint: str, found: object) -> None:
    """Keep plain data for the next load; where nothing can be written it is found out again."""
    path = cache_folder().parent / kind / f"{fingerprint}.json"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"state": _state(), "found": found}), encoding="utf-8")
        temporary.replace(path)
