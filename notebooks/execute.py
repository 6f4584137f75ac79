"""Runs notebooks as JupyterLab does, each in a kernel and a store of its own, and keeps their outputs in the files."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

#: Live maps and boards end with the extension. A kernel's end comes too late for the client to hear of their pictures.
_LAST = 'get_ipython().extension_manager.unload_extension("amem_jupyter")'


class CellClient(NotebookClient):
    """A client that tells the kernel which cell it runs, as JupyterLab does."""

    async def async_execute_cell(self, cell: NotebookNode, cell_index: int, **options: Any) -> NotebookNode:
        """Run one cell, with its id in the request."""
        self.kc.session.metadata = {"cellId": cell.id}
        return await super().async_execute_cell(cell, cell_index, **options)


def run(notebook: NotebookNode, store: Path, folder: Path) -> NotebookNode:
    """Run all cells in a kernel of their own, which has ended when this returns.

    Args:
        notebook: it receives the outputs.
        store: where its agents are kept.
        folder: the kernel's working folder.
    """
    environment = {name: value for name, value in os.environ.items() if name != "JPY_SESSION_NAME"}
    client = CellClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        extra_arguments=["--log-level=ERROR"],
    )
    notebook.cells.append(nbformat.v4.new_code_cell(_LAST))
    try:
        return client.execute(env={**environment, "AMEM_STORE": str(store)}, cwd=str(folder))
    finally:
        notebook.cells.pop()


def execute(path: Path, parameters: Mapping[str, Any] | None = None) -> NotebookNode:
    """A notebook with its outputs, run on an empty store.

    Args:
        path: the notebook's file; it is not changed.
        parameters: values for names that its cell with the tag "parameters" sets, as papermill takes them.

    Raises
    ------
        KeyError: there is no such cell, or it does not set one of the names.
    """
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        _set_parameters(notebook, parameters)
    with tempfile.TemporaryDirectory(prefix="amem-notebook-") as store:
        return run(notebook, Path(store), path.parent)


def _set_parameters(notebook: NotebookNode, parameters: Mapping[str, Any]) -> None:
    """Put a cell with the values after the one that has the defaults."""
    tagged = [place for place, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    defaults = notebook.cells[tagged[0]].source.splitlines() if tagged else []
    unknown = set(parameters) - {line.partition("=")[0].strip() for line in defaults}
    if unknown:
        raise KeyError(f"the notebook has no parameters {sorted(unknown)}")
    given = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    notebook.cells.insert(tagged[0] + 1, nbformat.v4.new_code_cell(given))


def main() -> None:
    """Run each, and write it back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="+", type=Path)
    for path in parser.parse_args().notebooks:
        print(path, flush=True)
        nbformat.write(execute(path.resolve()), path)


if __name__ == "__main__":
    main()
