"""`amem kernel install`: a kernel that has the extension loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from amem import cli
from tests.jupyter.kernels import kernel


@pytest.fixture
def install(capsys):
    def run(*arguments):
        code = cli.main(["kernel", "install", "--json", *arguments])
        captured = capsys.readouterr()
        return code, json.loads(captured.out) if captured.out else captured.err

    return run


def test_its_cells_ask_agents_without_loading_anything(install, tmp_path):
    """As a student's first cell does; the prefix is any Jupyter's."""
    code, said = install("--prefix", str(tmp_path))
    assert code == 0
    folder = Path(said["folder"])
    assert folder == tmp_path / "share" / "jupyter" / "kernels" / "amem"
    assert json.loads((folder / "kernel.json").read_text())["display_name"] == "amem (agents)"
    with kernel(spec=folder) as live:
        live.run("from tests.jupyter import scripted\nscripted.install()")
        ran = live.run("%%agent planner\nHi", "c1")
    assert ran.status == "ok"
    assert "You said: Hi" in ran.text


def test_it_is_the_users_unless_told_otherwise(install, tmp_path, monkeypatch):
    """Under a name and a title of one's own; installed again it is replaced."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    for title in ("Class 1", "Class 2"):
        code, said = install("--name", "class", "--display-name", title)
        assert (code, said["folder"]) == (0, str(tmp_path / "kernels" / "class"))
    assert json.loads((tmp_path / "kernels" / "class" / "kernel.json").read_text())["display_name"] == "Class 2"


@pytest.mark.parametrize("arguments", [["--name", "no/name"], ["--prefix", "/proc/nowhere"]])
def test_what_cannot_be_installed_is_one_line(install, arguments):
    """And nothing is written."""
    code, said = install(*arguments)
    assert code == 1
    assert len(said.strip().splitlines()) == 1
