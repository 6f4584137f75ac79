"""Where the space of a notebook comes from."""

from __future__ import annotations

import json

import pytest

from amem.errors import AgentLocked
from amem_jupyter.space import MAX_LENGTH, cell_ids, default_space
from tests.jupyter.scripted import ScriptedEngine


def test_vs_code_server_or_neither():
    """VS Code names the file in the namespace, jupyter-server in the environment."""
    server = {"JPY_SESSION_NAME": "/n/a.ipynb"}
    assert default_space({"__vsc_ipynb_file__": "/v/b.ipynb"}, server) == "/v/b.ipynb"
    assert default_space({}, server) == "/n/a.ipynb"
    assert default_space({}, {}) == "default"
    assert default_space({}, {"JPY_SESSION_NAME": ""}) == "default"


def test_long_paths_stay_apart():
    """Two that end alike are two spaces, and each fits."""
    long = [f"/{folder}/{'x' * 5000}/n.ipynb" for folder in "ab"]
    spaces = [default_space({}, {"JPY_SESSION_NAME": path}) for path in long]
    assert len(set(spaces)) == 2
    assert all(len(space) == MAX_LENGTH and space.endswith("n.ipynb") for space in spaces)


@pytest.fixture
def renamed(tmp_path, monkeypatch):
    """A notebook of cells a and b at its new path, and the path at which it was."""
    cells = [{"id": name, "cell_type": "code", "source": ""} for name in "ab"]
    new = tmp_path / "new.ipynb"
    new.write_text(json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 5}))
    monkeypatch.setenv("JPY_SESSION_NAME", str(new))
    return tmp_path / "old.ipynb"


def test_a_renamed_notebook_finds_its_agents(notebook, script, renamed):
    """Its cells made their turns, and its old path is gone."""
    script.spaces = {str(renamed): {"b", "x"}, "team": {"a"}, str(renamed.with_name("other.ipynb")): {"y"}}
    notebook.run("%amem agents")
    assert f"this notebook was at {renamed}; its agents came along: planner" in notebook.text
    assert set(script.spaces) == {"team", str(renamed.with_name("other.ipynb"))}


def test_a_copied_notebook_starts_its_own_agents(notebook, script, renamed):
    """The original is still there."""
    renamed.write_text("{}")
    script.spaces = {str(renamed): {"a", "b"}}
    notebook.run("%amem agents")
    assert "no agents yet" in notebook.text
    assert str(renamed) in script.spaces


def test_agents_of_cells_that_are_not_ours_stay(notebook, script, renamed):
    """Another notebook that is gone is not this one."""
    script.spaces = {str(renamed): {"c"}}
    notebook.run("%amem agents")
    assert str(renamed) in script.spaces


def test_a_space_by_choice_adopts_nothing(notebook, script, renamed):
    """Nor does one that the person named."""
    script.spaces = {str(renamed): {"a"}}
    notebook.run("%amem space team")
    notebook.run("%amem agents")
    assert str(renamed) in script.spaces


def test_agents_that_are_in_use_were_not_left_behind(notebook, script, renamed, monkeypatch):
    """Another kernel still goes by the old path."""

    def locked(_engine, _space):
        raise AgentLocked("agent 'planner' is in use by process 1")

    script.spaces = {str(renamed): {"a"}}
    monkeypatch.setattr(ScriptedEngine, "cell_ids", locked)
    notebook.run("%amem agents")
    assert "no agents yet" in notebook.text


def test_a_notebook_that_cannot_be_read_has_no_cells(tmp_path):
    """Not there, no JSON, no notebook, or cells without ids."""
    file = tmp_path / "n.ipynb"
    assert cell_ids(str(file)) == frozenset()
    for text in ("{", "[]", '{"cells": 3}', '{"cells": [{"source": ""}]}'):
        file.write_text(text)
        assert cell_ids(str(file)) == frozenset()


@pytest.mark.parametrize(
    "source",
    ["%agent planner Hi", "%%agent planner --background\nHi", "%%agents critic planner\nHi", "%amem map planner",
     "%amem evict critic planner", "%%agent critic --from planner\nHi"],
)  # fmt: skip
def test_another_kernels_agent_is_told_of_before_a_model_is_loaded(notebook, script, source):
    """A second kernel on the notebook loses no time; with a choice of its own it goes on."""
    script.locked = {"planner"}
    seen = notebook.fails(source).strip()
    assert seen.endswith("close it there first. Or give this kernel agents of its own: %amem space NAME")
    assert script.opened == []
    assert notebook.run("%agent critic Hi").success


def test_an_agent_that_another_kernel_holds_leaves_a_choice(notebook, script):
    """End that kernel, or take another space."""
    script.enqueue(error=AgentLocked("agent 'planner' is in use by process 1; close it there first"))
    seen = notebook.fails("%agent planner Hi").strip()
    assert seen.endswith("close it there first. Or give this kernel agents of its own: %amem space NAME")
    assert len(seen.splitlines()) == 1
