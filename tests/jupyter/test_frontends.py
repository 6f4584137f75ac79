"""Front ends of every kind, on the real engine: with cell ids, with ids of another kind, with none."""

from __future__ import annotations

import os

import nbformat
import pytest
from nbclient import NotebookClient

from amem import Engine
from tests.jupyter.kernels import ROOT, kernel

CELLS = {
    "load": "%load_ext amem_jupyter",
    "one": "%%agent planner --max-tokens 6 --system 'Be brief.'\n" + "Plan a launch of many words. " * 12,
    "two": "%%agent planner --max-tokens 6\nAnd then?",
    "three": "%%agent critic --max-tokens 6 --from planner\nJudge it.",
}


@pytest.fixture
def environment(tiny_model_path, tmp_path, monkeypatch):
    """What kernels of this test find: a tiny model, and a store of its own."""
    found = {"AMEM_STORE": str(tmp_path / "store"), "AMEM_MODEL": str(tiny_model_path), "AMEM_MEMORY": "200MB"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "engine"), str(ROOT)]))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    return found


def turns_of(environment, name="planner"):
    """An agent's turns, on the head's path and in all."""
    with Engine(environment["AMEM_MODEL"], environment["AMEM_STORE"], memory="200MB") as engine:
        agent = engine.agent(name)
        return agent.turns, agent.tree()


def run_all(live, ids, **changed):
    """The metrics of a notebook's cells, run from top to bottom."""
    metrics = []
    for name, source in (CELLS | changed).items():
        ran = live.run(source, ids.format(name) if ids else None)
        assert ran.status == "ok", ran.text
        metrics += ran.metrics
    return metrics


@pytest.mark.parametrize("ids", ["{}", "vscode-notebook-cell:/home/me/plan.ipynb#{}"])
def test_restart_and_run_all_walks_through_the_turns_that_are_there(environment, ids):
    """With JupyterLab's ids and VS Code's: the same turns, hardly anything computed, nothing written twice."""
    with kernel(**environment) as live:
        first = run_all(live, ids)
    with kernel(**environment) as live:
        again = run_all(live, ids)
        assert {found["match"] for found in again} <= {"EXACT", "EXTEND"}
        assert all(found["computed_tokens"] <= 64 for found in again)
        assert [found["turn"] for found in first] == [found["turn"] for found in again]
        edited = run_all(live, ids, one=CELLS["one"].replace("launch", "party"))
        assert "left on another branch" in " ".join(edited[0]["notes"])
        assert edited[0]["why"]["cause"] == "The cell of turn 1 was edited."
        assert "only grew" in live.run("%amem why planner").text
    turns, tree = turns_of(environment)
    assert [True, False] == ["party" in turn.prompt for turn in turns]
    assert 4 == len(tree)


def test_another_system_text_outside_the_first_cell_stops_the_notebook(environment):
    """In one line; the agent is as it was."""
    with kernel(**environment) as live:
        run_all(live, "{}")
        ran = live.run("%%agent planner --system 'Be long.'\nMore.", "new")
        assert ran.status == "error"
        assert "another system text" in ran.error
    turns, tree = turns_of(environment)
    assert 2 == len(turns) == len(tree)


def notebook_file(path):
    """The notebook as a file."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    kernelspec = {"name": "python3", "language": "python", "display_name": "Python 3"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), path)
    return path


def with_nbclient(source, target):
    notebook = nbformat.read(source, 4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    nbformat.write(notebook, target)


def with_papermill(source, target):
    import papermill

    papermill.execute_notebook(source, target, kernel_name="python3", cwd=str(ROOT), progress_bar=False)


@pytest.mark.parametrize("execute", [with_nbclient, with_papermill])
def test_without_cell_ids_a_second_run_adds_turns_and_says_so_once(environment, tmp_path, execute):
    """Nothing is replaced where nobody says which cell is running; what is there is reused all the same."""
    source = notebook_file(tmp_path / "notebook.ipynb")
    for _ in range(2):
        execute(source, tmp_path / "done.ipynb")
        done = nbformat.read(tmp_path / "done.ipynb", 4)
        outputs = [output for cell in done.cells for output in cell.get("outputs", []) if "data" in output]
        said = [output for output in outputs if "no cell ids" in output["data"].get("text/plain", "")]
        assert 1 == len(said)
        assert "--cached" not in said[0]["data"]["text/plain"]
    metrics = [output["metadata"]["amem"] for output in outputs if "amem" in output["metadata"]]
    assert ["EXTEND", "EXTEND", "EXTEND"] == [found["match"] for found in metrics]
    turns, tree = turns_of(environment)
    assert 4 == len(turns) == len(tree)
    assert turns[0].prompt == turns[2].prompt
