"""Each lesson runs on the bundled model, smaller than its saved form, and has what a class needs."""

from __future__ import annotations

import pytest

from notebooks.execute import execute
from tests.jupyter.kernels import ROOT
from tests.notebooks.reading import must_be_kept_whole, must_read_well

LESSONS = sorted((ROOT / "notebooks" / "lessons").glob("*.ipynb"))

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


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs(environment, bundled_model_path, path):
    """Every cell, in a kernel and a store of its own; what a lesson itself asserts is tested too."""
    must_read_well(execute(path, SMALL[path.stem]))


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_saved_lesson_is_whole(path):
    """Outputs of one run, a goal, an experiment, questions with answers folded away, the way to the next lesson."""
    cells = must_be_kept_whole(path).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for part in ("**Goal.**", "## An experiment to change", "## Questions", "<details><summary>", ".ipynb)"):
        assert part in text
    assert text.count("<details>") == text.count("</details>") >= 4
    assert any("parameters" in cell.metadata.get("tags", []) for cell in cells)
