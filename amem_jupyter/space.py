"""A notebook's space of agents: by default its path, so that two notebooks' planners do not meet."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amem_jupyter.errors import is_refusal
from amem_jupyter.protocol import EngineLike

DEFAULT = "default"
MAX_LENGTH = 4096  #: of a space's name
SUFFIX = ".ipynb"


def notebook_path(user_ns: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> str:
    """The path of the notebook that this kernel serves; "" where the front end does not tell it.

    jupyter-server tells it in JPY_SESSION_NAME, VS Code in a variable of the user's namespace.
    """
    return str(user_ns.get("__vsc_ipynb_file__") or environ.get("JPY_SESSION_NAME") or "")


def default_space(user_ns: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> str:
    """The space of the notebook that this kernel serves; "default" where nobody knows its path."""
    path = notebook_path(user_ns, environ)
    return shortened(path) if path else DEFAULT


def shortened(path: str) -> str:
    """A path that fits a space's name: a long one keeps its end, and a digest of the whole."""
    if len(path) <= MAX_LENGTH:
        return path
    digest = hashlib.sha256(path.encode()).hexdigest()[:12]
    return f"{digest}...{path[-(MAX_LENGTH - len(digest) - 3) :]}"


def cell_ids(notebook: str) -> frozenset[str]:
    """The ids of a saved notebook's cells; none if it cannot be read."""
    try:
        cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
        return frozenset(cell["id"] for cell in cells if "id" in cell)
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


def adopt(engine: EngineLike, notebook: str) -> str:
    """Take over the agents of a notebook that was renamed or moved to this path; gives their old space, or "".

    It is the same notebook if its cells made those agents' turns, and nothing is at its old path any more: a copy,
    whose original is still there, starts with agents of its own. Only a space that is empty adopts.
    """
    if not notebook.endswith(SUFFIX) or engine.agents():
        return ""
    mine, found = cell_ids(notebook), {}
    for space in engine.spaces() if mine else ():
        if space != notebook and space.endswith(SUFFIX) and Path(space).is_absolute() and not Path(space).exists():
            found[space] = len(mine.intersection(_cell_ids_of(engine, space)))
    old = max(found, key=lambda space: found[space], default="")
    if not old or not found[old]:
        return ""
    engine.adopt(old)
    return old


def _cell_ids_of(engine: EngineLike, space: str) -> frozenset[str]:
    """The cells that made a space's turns; none if its agents are in use, and so not left behind."""
    try:
        return frozenset(engine.cell_ids(space))
    except Exception as error:
        if is_refusal(error):
            return frozenset()
        raise
