"""Runs the quickstart in two kernels on one store, and says what the restart saved.

The first half runs in one kernel, which ends; the second half runs in a new one on the same store. A third kernel
runs the second half on a copy of the store without its K/V files, so that "the same turn, cold" is measured too.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from amem.model import bundled
from notebooks.execute import run

HERE = Path(__file__).parent
QUICKSTART = HERE / "quickstart.ipynb"
OUT = HERE.parent / "out" / "quickstart.ipynb"


def half(notebook: NotebookNode, tag: str) -> NotebookNode:
    """A copy of the notebook with only the cells that have the tag."""
    part = nbformat.from_dict(notebook)
    part.cells = [cell for cell in part.cells if tag in cell.metadata.get("tags", [])]
    return part


def turns(part: NotebookNode) -> list[dict[str, Any]]:
    """The metrics of each agent's turn, from the outputs' metadata."""
    outputs = [output for cell in part.cells for output in cell.get("outputs", [])]
    return [output.metadata["amem"] for output in outputs if "amem" in output.get("metadata", {})]


def without_state(store: Path, copy: Path) -> Path:
    """A copy of a store in which only the conversations are left, not their K and V."""
    shutil.copytree(store, copy)
    for file in copy.rglob("*.safetensors"):
        file.unlink()
    return copy


def report(first: list[dict[str, Any]], resumed: list[dict[str, Any]], cold: list[dict[str, Any]]) -> str:
    """The table: what each turn found, what it cost, and what it would have cost without the stored state."""
    head = ("", "agent", "match", "reused", "computed", "TTFT ms", "cold ms", "in memory", "on disk")
    rows = [_row("first kernel", turn, None) for turn in first]
    rows += [_row("new kernel", turn, other) for turn, other in zip(resumed, cold, strict=True)]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _row(kernel: str, turn: dict[str, Any], cold: dict[str, Any] | None) -> tuple[str, ...]:
    without = turn if turn["match"] == "COLD" else cold
    return (
        kernel,
        turn["agent"],
        turn["match"],
        str(turn["reused_tokens"]),
        str(turn["computed_tokens"]),
        f"{turn['ttft_ms']:.0f}",
        f"{without['ttft_ms']:.0f}" if without else "-",
        f"{turn['hot_bytes'] / 1e6:.2f} MB",
        f"{turn['disk_bytes'] / 1e6:.2f} MB",
    )


@contextmanager
def _temporary_store() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="amem-demo-") as folder:
        yield Path(folder) / "store"


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, help="keep the agents in this folder instead of a temporary one")
    parser.add_argument("--out", type=Path, default=OUT, help="where the executed notebook goes")
    arguments = parser.parse_args()

    print(f"model: {bundled.path(print)}")
    notebook = nbformat.read(QUICKSTART, as_version=4)
    with nullcontext(arguments.store) if arguments.store else _temporary_store() as store, _temporary_store() as copy:
        print(f"store: {store}")
        print("first half, in one kernel ...")
        first = run(half(notebook, "first"), store, HERE)
        without_state(store, copy)
        print("second half, in a new kernel on the same store ...")
        resumed = run(half(notebook, "resume"), store, HERE)
        print("the same again without the stored state, for comparison ...")
        cold = run(half(notebook, "resume"), copy, HERE)
    executed = nbformat.from_dict({**notebook, "cells": first.cells + resumed.cells})
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(executed, arguments.out)
    print(f"\n{report(turns(first), turns(resumed), turns(cold))}\n\nexecuted notebook: {arguments.out}")


if __name__ == "__main__":
    main()
