"""README's first session: two cells, each in a kernel of its own on one store, and the cards as they came out."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from benchmarks.machine import machine

RESULT = Path(__file__).parent / "results" / "first_session.json"
CELLS = (
    (
        '%%agent planner --max-tokens 48 --system "You plan product launches. You answer in short sentences."\n'
        "We sell a small greenhouse kit for balconies. It folds, it costs 89 euros, and a sensor tells a phone when "
        "the soil is dry. Our customers live in cities and have little time. How should we tell them about it?"
    ),
    "%%agent planner --max-tokens 48\nWrite the first sentence of the announcement.",
)


def main() -> None:
    """Run both cells and write what they showed."""
    rows = []
    with tempfile.TemporaryDirectory() as store:
        os.environ["AMEM_STORE"] = store
        for source in CELLS:
            sources = ("%load_ext amem_jupyter", "%amem load", source)
            notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in sources])
            NotebookClient(notebook, timeout=300).execute()
            output = next(out for out in notebook.cells[-1].outputs if "amem" in out.get("metadata", {}))
            rows.append({"cell": source, "card": output["data"]["text/plain"], "metrics": output["metadata"]["amem"]})
            print(source, output["data"]["text/plain"], "", sep="\n\n", flush=True)
    RESULT.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
