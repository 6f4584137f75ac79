"""amem serve as a process of its own."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest

from amem.cli import main
from tests.serve.conftest import LONG, user


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
        (["--port", "70000"], "65535"),
        (["--api-key", "a", "--api-key", "b"], "no name"),
        (["--timeout", "0"], "above zero"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(options, says, capsys, monkeypatch):
    """In one line."""
    monkeypatch.delenv("AMEM_API_KEY", raising=False)
    assert 1 == main(["serve", "--model", "no/such-model", *options])
    written = capsys.readouterr().err
    assert says in written
    assert 1 == written.count("\n")
