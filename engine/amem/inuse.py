"""Whether agents are in use elsewhere: told before a model is loaded, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from amem.engine import store_folder
from amem.store import Store


def refuse_if_in_use(names: Iterable[str], store: str | Path | None = None, space: str = "default") -> None:
    """Look for agents that another process is writing to; ``store`` as for `Engine`. Nothing is made or kept.

    Raises
    ------
        AgentLocked: it is writing to one of them. Whoever comes later finds out when the agent is asked.
    """
    root = store_folder(store)
    if not root.is_dir():
        return
    with Store(root) as opened:
        for name in names:
            opened.check_free(name, space)
