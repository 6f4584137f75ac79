"""Named points that a commit passes, so that a test can kill the process at each of them. Inert by default."""

from __future__ import annotations

from collections.abc import Callable

#: Every point, in the order in which one turn with blocks passes them.
POINTS = (
    "block.created",
    "block.written",
    "block.synced",
    "block.renamed",
    "block.durable",
    "snapshot.created",
    "snapshot.written",
    "snapshot.synced",
    "snapshot.renamed",
    "snapshot.durable",
    "commit.begun",
    "commit.blocks",
    "commit.rows",
    "commit.transcript",
    "commit.committed",
    "commit.indexed",
)

#: Called with the name of each point as it is passed; None: nothing is called.
hook: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Tell the hook, if there is one, that ``point`` is passed now."""
    if hook is not None:
        hook(point)
