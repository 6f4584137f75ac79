"""[tool.amem] in a project's pyproject.toml."""

from __future__ import annotations

import pytest
from traitlets.config import Config

import amem_jupyter
from tests.jupyter.conftest import Notebook


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project, in a folder of which the notebook lies."""
    inner = tmp_path / "notebooks"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[project]\nname = 'no table of ours'\n")
    monkeypatch.chdir(inner)
    return tmp_path / "pyproject.toml"


def load(shell, capsys):
    shell.run_cell("%load_ext amem_jupyter")
    return Notebook(shell, shell.display_pub, capsys)


@pytest.fixture
def terminal(script, shell, capsys):
    """A shell that loads the extension when the project is written."""
    yield lambda: load(shell, capsys)
    amem_jupyter.unload_ipython_extension(shell)


def test_the_projects_settings_are_the_defaults(terminal, project, script):
    """The nearest table at or above the notebook's folder."""
    project.write_text("[tool.amem]\nmodel = 'team/model'\nmax_tokens = 9\ntemperature = 0.5\nmemory = '1GB'\n")
    notebook = terminal()
    notebook.shell.run_cell("%agent planner Hi")
    assert (notebook.engine.settings.model, notebook.engine.settings.memory) == ("team/model", "1GB")
    assert (script.asked[0]["max_tokens"], script.asked[0]["temperature"]) == (9, 0.5)


def test_the_persons_own_configuration_wins(terminal, shell, project):
    """And what the project does not say stays."""
    project.write_text("[tool.amem]\nmodel = 'team/model'\nmax_tokens = 9\n")
    shell.config.AmemMagics = Config(max_tokens=11)
    options = terminal().shell.magics_manager.registry["AmemMagics"].options()
    assert (options["model"], options["max_tokens"], options["format"]) == ("team/model", 11, "md")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tool.amem]\nmodle = 'x'", "has no setting 'modle'; did you mean model?"),
        ("[tool.amem]\nmax_tokens = 0", "max_tokens cannot be '0'"),
        ("[tool.amem]\ntop_p = nan", "it must be a number"),
        ("[tool.amem\n", "cannot be read"),
    ],
)
def test_a_wrong_table_is_one_line_that_names_the_file(terminal, project, capsys, text, says):
    """Nothing is loaded before it is right."""
    project.write_text(text)
    notebook = terminal()
    captured = capsys.readouterr()
    seen = (captured.out + captured.err).strip()
    assert seen.startswith("UsageError: ")
    assert says in seen
    assert str(project) in seen
    assert notebook.shell.find_line_magic("amem") is None
