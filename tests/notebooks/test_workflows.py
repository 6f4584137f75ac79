"""The workflow notebooks run from top to bottom, and are kept with outputs that read well anywhere."""

import os

import nbformat
import pytest

from notebooks.execute import execute
from tests.jupyter.kernels import ROOT

WORKFLOWS = sorted((ROOT / "notebooks" / "workflows").glob("*.ipynb"))
#: of what each measures, small enough for continuous integration
SIZES = {
    "five_phases": {"reply_tokens": 3},
    "framework": {"reply_tokens": 4, "n_rounds": 2},
    "planner_critic": {"reply_tokens": 8},
    "prompt_exploration": {"reply_tokens": 4},
    "quality": {"n_reports": 2},
    "ten_experts": {"text_characters": 500, "reply_tokens": 3, "n_questions": 3},
}
LARGEST = 400_000  #: bytes of a file that pages still show


@pytest.fixture
def environment(monkeypatch):
    """What a kernel inherits: this checkout, the bundled model, plots as pictures."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "engine"), str(ROOT)]))
    for name in ("AMEM_MODEL", "AMEM_MEMORY", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)


def shown(notebook):
    """All outputs with data."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output for output in outputs if "data" in output]


def must_read_well(notebook):
    """Every output has a form for every page: no live widget, a text beside HTML, an alternative beside a picture."""
    for output in shown(notebook):
        assert not [kind for kind in output.data if "widget" in kind]
        assert "text/plain" in output.data
        if "image/png" in output.data:
            assert len(output.metadata["image/png"]["alt"]) > 40


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_it_runs(environment, bundled_model_path, path):
    """Each cell, in a kernel of its own, on an empty store; a failing one raises."""
    notebook = execute(path, SIZES[path.stem])
    must_read_well(notebook)
    assert any("text/html" in output.data for output in shown(notebook))
    assert not [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "stderr" == output.get("name")
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_it_is_kept_with_its_outputs(path):
    """Of one run from top to bottom."""
    assert path.stat().st_size < LARGEST
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    must_read_well(notebook)
    counts = [cell.execution_count for cell in notebook.cells if "code" == cell.cell_type]
    assert list(range(1, len(counts) + 1)) == counts
    assert "widgets" not in notebook.metadata
