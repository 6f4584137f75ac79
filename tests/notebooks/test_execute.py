"""Notebooks are run with the parameters that are given, and only with those that they have."""

import nbformat
import pytest

from notebooks.execute import execute
from tests.notebooks.reading import shown


def notebook_file(path, *sources, tagged=True):
    """A notebook whose first cell sets its parameters."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if tagged:
        cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_parameters_take_the_place_of_the_defaults(tmp_path):
    """The file stays as it was, and the agents' store is none that was there before."""
    path = notebook_file(
        tmp_path / "a.ipynb", "a = 1  # one\nb = 2", "import os\nprint(a, b, os.environ['AMEM_STORE'])"
    )
    before = path.read_bytes()
    notebook = execute(path, {"b": "two"})
    a, b, store = notebook.cells[-1].outputs[0].text.split()
    assert ("1", "two") == (a, b)
    assert "amem-notebook-" in store
    assert before == path.read_bytes()


@pytest.mark.parametrize("tagged", [True, False])
def test_a_parameter_that_the_notebook_has_not_is_an_error(tmp_path, tagged):
    """Before anything runs: a misspelt size would make a test as large as the lesson."""
    path = notebook_file(tmp_path / "a.ipynb", "a = 1", tagged=tagged)
    with pytest.raises(KeyError, match="no parameters"):
        execute(path, {"c": 3})


def test_a_map_is_kept_as_a_picture(environment, tmp_path):
    """It is alive to the end, and nothing of that is left in what is saved."""
    sources = ("from tests.jupyter import scripted\nscripted.install()", "%load_ext amem_jupyter")
    path = notebook_file(
        tmp_path / "a.ipynb", *sources, "%agent planner Hi", "%amem map planner", "%agent planner Again"
    )
    notebook = execute(path)
    assert 5 == len(notebook.cells)
    assert [] == [kind for output in shown(notebook) for kind in output.data if "widget" in kind]
    assert [True] == ["layers" in output.data["text/plain"] for output in notebook.cells[3].outputs]
