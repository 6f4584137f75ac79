"""amem serve as a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from amem.cli import main
from tests.serve.conftest import LONG, events_of, text_of, user


@pytest.fixture
def serve(tiny_model_path, tmp_path):
    """Starts servers; gives the process and its address."""
    running = []

    def start(*options, **environment):
        command = [sys.executable, "-m", "amem.cli", "serve", "--json", "--port", "0", "--model", str(tiny_model_path),
                   "--store", str(tmp_path / "store"), "--memory", "200MB", *options]  # fmt: skip
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
        )
        running.append(process)
        return process, json.loads("".join(process.stdout.readline() for _ in range(3)))["url"]

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_and_what_was_said_is_found_again(serve, kind):
    """The next process goes on with the same session."""
    process, url = serve()
    first = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": [user(LONG)], "max_tokens": 4}, timeout=60
    ).json()
    process.send_signal(kind)
    assert 0 == process.wait(60)
    written = process.stderr.read()  # how the loading went, and nothing of its end
    assert not [word for word in ("Traceback", "Exception", "ERROR", "interrupted") if word in written], written
    messages = [user(LONG), first["choices"][0]["message"], user("Go on.")]
    _, url = serve()
    second = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 4}, timeout=60).json()
    assert first["usage"]["total_tokens"] == second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["amem"]["agent"] == second["amem"]["agent"]


def test_the_key_may_come_from_the_environment(serve):
    """Where no list of processes shows it."""
    _, url = serve(AMEM_API_KEY="sk-own")
    assert 401 == httpx.get(f"{url}/v1/models").status_code
    assert 200 == httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer sk-own"}).status_code


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "0.0.0.0"], "API key"),
        (["--host", "::"], "API key"),
        (["--host", ""], "API key"),
        (["--host", "192.0.2.1"], "API key"),
        (["--host", "192.0.2.1", "--api-key", "k"], "cannot be taken"),
        (["--host", "no such host", "--api-key", "k"], "not possible"),
        (["--host", "x" * 70, "--api-key", "k"], "not possible"),
        (["--host", "a..b", "--api-key", "k"], "not possible"),
        (["--port", "70000"], "65535"),
        (["--port", "-1"], "65535"),
        (["--api-key", "a", "--api-key", "b"], "no name"),
        (["--api-key", "http:k"], "sessions"),
        (["--timeout", "0"], "--timeout must be above zero, not 0.0."),
        (["--grace", "nan"], "--grace must be above zero, not nan."),
        (["--max-requests", "-3"], "--max-requests must be above zero, not -3."),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(options, says, capsys, monkeypatch):
    """In one line."""
    monkeypatch.delenv("AMEM_API_KEY", raising=False)
    assert 1 == main(["serve", "--model", "no/such-model", *options])
    written = capsys.readouterr().err
    assert says in written
    assert 1 == written.count("\n")


def test_a_port_in_use_is_refused_before_a_model_is_loaded(capsys, monkeypatch):
    """And says how to take another."""
    monkeypatch.delenv("AMEM_API_KEY", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert 1 == main(["serve", "--model", "no/such-model", "--port", str(taken.getsockname()[1])])
    written = capsys.readouterr().err
    assert "try --port" in written
    assert 1 == written.count("\n")


def test_an_address_is_given_back_when_no_model_can_be_loaded(capsys, tmp_path):
    """The next try finds it free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = str(tmp_path / "store")
    for _ in range(2):
        assert 1 == main(["serve", "--model", str(tmp_path / "nothing"), "--store", store, "--port", str(port)])
        assert "cannot be taken" not in capsys.readouterr().err


def test_a_reply_that_streams_when_the_signal_comes_is_finished_and_kept(serve):
    """And what the process wrote, in the event loop's debug mode too, holds nothing of what was said."""
    process, url = serve(PYTHONASYNCIODEBUG="1", PYTHONDEVMODE="1")
    canary = "Kanarienvogel"
    body = {"messages": [user(f"{canary} {LONG}")], "max_tokens": 300, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions?{canary}", json=body, timeout=120) as response:
        lines = response.iter_lines()
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert "data: [DONE]" == rest[-1]
    assert 0 == process.wait(120)
    assert canary not in process.stdout.read() + process.stderr.read()
    messages = [*body["messages"], {"role": "assistant", "content": text_of(events_of([first, *rest]))}, user("Go on.")]
    _, url = serve()
    again = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 4}, timeout=120).json()
    assert "EXTEND" == again["amem"]["match"]
