"""%amem serve: cells and clients of the server share one engine."""

import socket

import httpx
import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from amem_jupyter.errors import Refused
from amem_jupyter.extension import attach, detach
from amem_jupyter.session import session_of
from tests.serve.conftest import LONG, user


@pytest.fixture
def shell(tiny_model_path, tmp_path, monkeypatch):
    """A shell with the magics, on the tiny model."""
    monkeypatch.setenv("AMEM_MODEL", str(tiny_model_path))
    monkeypatch.setenv("AMEM_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("AMEM_MEMORY", "200MB")
    config = Config()
    config.HistoryManager.enabled = False
    made = InteractiveShell(config=config, ipython_dir=str(tmp_path))
    InteractiveShell._instance = made
    attach(made)
    yield made
    session_of(made).close()
    detach(made)
    InteractiveShell._instance = None


def test_cells_and_clients_share_their_agents(shell, capsys):
    """A client goes on from what a cell said, and a cell from what a client said."""
    shell.run_line_magic("amem", "serve --port 0 --into address")
    url = session_of(shell).serving.url
    assert f"{url}/v1" in capsys.readouterr().out
    assert f"{url}/v1" == shell.user_ns["address"]
    shell.run_cell_magic("agent", "planner --max-tokens 4", LONG)
    engine = session_of(shell).engine
    turn, held = engine.agent("planner").turns[0], engine.agent("planner").status.n_tokens
    messages = [user(turn.prompt), {"role": "assistant", "content": turn.reply}, user("Go on.")]
    reply = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": messages, "agent": "planner", "max_tokens": 3}
    ).json()
    assert held == reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    shell.run_cell_magic("agent", "planner --max-tokens 2", "And then?")
    assert ["Go on.", "And then?"] == [turn.prompt for turn in engine.agent("planner").turns[1:]]


def test_a_server_is_stopped_by_hand_and_with_its_engine(shell, capsys):
    """And only one at a time is started."""
    shell.run_line_magic("amem", "serve --port 0")
    first = session_of(shell).serving.url
    with pytest.raises(Refused, match="serves already"):
        shell.run_line_magic("amem", "serve --port 0")
    shell.run_line_magic("amem", "serve --stop")
    assert session_of(shell).serving.url is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{first}/health")
    shell.run_line_magic("amem", "serve --port 0 --api-key sk-own")
    second = session_of(shell).serving.url
    assert 401 == httpx.get(f"{second}/v1/models").status_code
    assert 200 == httpx.get(f"{second}/v1/models", headers={"x-api-key": "sk-own"}).status_code
    shell.run_line_magic("amem", "release")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{second}/health")
    capsys.readouterr()
    shell.run_line_magic("amem", "serve --stop")
    assert "nothing was served" in capsys.readouterr().out


def test_a_host_without_a_key_is_refused_in_one_line(shell):
    """As every other usage error."""
    with pytest.raises(Refused, match="API key"):
        shell.run_line_magic("amem", "serve --host 0.0.0.0")
    assert session_of(shell).serving.url is None
    assert session_of(shell).engine is None


def test_a_port_in_use_is_refused_before_the_model_is_loaded(shell):
    """It may take a while to load."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Refused, match="cannot be taken"):
            shell.run_line_magic("amem", f"serve --port {taken.getsockname()[1]}")
    assert session_of(shell).serving.url is None
    assert session_of(shell).engine is None
