"""A real IPython shell with the scripted engine behind the extension."""

from __future__ import annotations

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import amem_jupyter
from amem_jupyter import session
from tests.jupyter import scripted


class Notebook:
    """A shell, what its cells displayed, and what they wrote to the error stream."""

    def __init__(self, shell, publisher, capsys):
        self.shell = shell
        self.publisher = publisher
        self._capsys = capsys

    def run(self, source, cell_id=None):
        """Run a cell as a front end does, and return its result."""
        self.publisher.outputs.clear()
        self._capsys.readouterr()
        return self.shell.run_cell(source, store_history=True, cell_id=cell_id)

    def fails(self, source, cell_id=None):
        """Run a cell that must fail, and return what the person sees of it."""
        result = self.run(source, cell_id)
        assert not result.success, "the cell did not fail"
        captured = self._capsys.readouterr()
        return captured.err + captured.out

    @property
    def shown(self):
        """The last form of each output, in order."""
        outputs = {}
        for number, message in enumerate(self.publisher.outputs):
            outputs[message.get("transient", {}).get("display_id") or number] = message
        return list(outputs.values())

    @property
    def text(self):
        """All outputs as plain text."""
        return "\n".join(message["data"].get("text/plain", "") for message in self.shown)

    @property
    def engine(self):
        return session.session_of(self.shell).engine


@pytest.fixture
def script(monkeypatch):
    """The script of this test's engines."""
    fresh = scripted.Script()
    monkeypatch.setattr(scripted, "script", fresh)
    monkeypatch.setattr(session, "open_engine", scripted.ScriptedEngine)
    for name in ("AMEM_MODEL", "AMEM_STORE", "AMEM_MEMORY", "JPY_SESSION_NAME"):
        monkeypatch.delenv(name, raising=False)
    return fresh


@pytest.fixture
def shell(tmp_path):
    """A shell of its own, with no history and no kernel."""
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config, ipython_dir=str(tmp_path))
    shell.colors = "nocolor"
    InteractiveShell._instance = shell
    yield shell
    InteractiveShell._instance = None


@pytest.fixture
def notebook(script, shell, capsys):
    """A shell with the extension, whose outputs go to a page."""
    publisher = CapturingDisplayPublisher(shell=shell)
    shell.display_pub = publisher
    shell.kernel = object()
    amem_jupyter.load_ipython_extension(shell)
    yield Notebook(shell, publisher, capsys)
    amem_jupyter.unload_ipython_extension(shell)
