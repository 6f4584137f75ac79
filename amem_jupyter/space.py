"""A notebook's space of agents: by default its path, so that two notebooks' planners do not meet."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

DEFAULT = "default"
MAX_LENGTH = 128


def default_space(user_ns: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> str:
    """The space of the notebook that this kernel serves; "default" where the front end does not tell its path.

    jupyter-server tells it in JPY_SESSION_NAME, VS Code in a variable of the user's namespace.
    """
    path = user_ns.get("__vsc_ipynb_file__") or environ.get("JPY_SESSION_NAME") or ""
    return shortened(str(path)) if path else DEFAULT


def shortened(path: str) -> str:
    """A path that fits a space's name: a long one keeps its end, and a digest of the whole."""
    if len(path) <= MAX_LENGTH:
        return path
    digest = hashlib.sha256(path.encode()).hexdigest()[:12]
    return f"{digest}...{path[-(MAX_LENGTH - len(digest) - 3) :]}"
