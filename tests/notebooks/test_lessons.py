"""Each lesson runs on the bundled model, smaller than its saved form, and what is saved can be read by everyone."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from notebooks.execute import execute

LESSONS = sorted((Path(__file__).parents[2] / "notebooks" / "lessons").glob("*.ipynb"))

#: Parameters with which a lesson takes little time.
SMALL = {
    "1-kv-cache": {
        "lengths": [16, 64],
        "attention_lengths": [64, 128],
        "step_sizes": [1, 8, 64],
        "repeats": 1,
    },
    "2-bytes": {"n_tokens": 300, "memory": "25MB", "context": 100},
    "3-attention": {"slots": [0, 15], "n_long": 96, "windows": [16, 32]},
    "4-quantization": {"n_tokens": 128, "n_texts": 2, "text_tokens": 128, "codecs": ["q4", "q2"]},
    "5-blocks": {"page_chars": 1400},
    "6-restart": {"prompt_tokens": [64, 128, 256], "n_agents": 3, "rounds": 2, "repeats": 2},
}


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def check_readable(notebook):
    """No error, nothing that needs a kernel to be seen, a text for each picture."""
    found = outputs(notebook)
    assert not [output for output in found if output.output_type == "error"]
    data = [output for output in found if output.output_type in {"display_data", "execute_result"}]
    assert data
    for output in data:
        assert "application/vnd.jupyter.widget-view+json" not in output.data
        if "image/png" in output.data:
            assert len(output.metadata["image/png"]["alt"]) > 40


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs(path, bundled_model_path):
    """Every cell, in a kernel and a store of its own; a lesson's own assertions are tested too."""
    check_readable(execute(path, SMALL[path.stem]))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_saved_lesson_is_whole_and_small(path):
    """As it is seen on GitHub: outputs of one run from the top, below 400 kB, with what a class needs."""
    assert path.stat().st_size < 400_000
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    check_readable(notebook)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for part in ("**Goal.**", "## An experiment to change", "## Questions", "<details><summary>"):
        assert part in text
    assert text.count("<details>") == text.count("</details>") >= 4
