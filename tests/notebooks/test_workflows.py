"""The workflow notebooks run from top to bottom, and are kept with outputs that read well anywhere."""

import pytest

from notebooks.execute import execute
from tests.jupyter.kernels import ROOT
from tests.notebooks.reading import must_be_kept_whole, must_read_well

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


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_it_runs(environment, bundled_model_path, path):
    """Each cell, in a kernel of its own, on an empty store; a failing one raises."""
    must_read_well(execute(path, SIZES[path.stem]))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_it_is_kept_with_its_outputs(path):
    """Of one run from top to bottom."""
    must_be_kept_whole(path)
