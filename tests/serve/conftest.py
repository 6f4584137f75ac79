"""A server on loopback, on a tiny random model: real sockets, real engine, small sizes."""

import json
import time

import httpx
import pytest

pytest.importorskip("starlette", reason="the serve extra is not installed")

from amem import Engine
from amem.serve import Keys, Limits, Server
from tests.serve.held import Held
from tests.tiny import write_tiny_model, write_tiny_tokenizer


class Place:
    """One store; engines and servers on it that come and go."""

    def __init__(self, model, store):
        self.model, self.store = model, store
        self.engine = self.server = self.http = None

    def open(self, *, keys=(), limits=None, **options):
        """A new engine and its server; what was open before is closed first."""
        self.close()
        self.engine = Engine(self.model, self.store, **{"memory": "200MB", **options})
        limits = limits or {}
        self.server = Server(
            self.engine, port=0, keys=Keys.parse(keys), limits=Limits(**{"max_tokens": 4, "grace_s": 5, **limits})
        ).start()
        self.http = httpx.Client(base_url=self.server.url, timeout=60)
        return self

    def close(self):
        if self.http is not None:
            self.http.close()
            self.server.stop()
            self.engine.close()
            self.http = None

    def chat(self, *messages, **fields):
        """The body of a reply that was served."""
        headers = fields.pop("headers", {})
        response = self.http.post("/v1/chat/completions", json={"messages": messages, **fields}, headers=headers)
        assert 200 == response.status_code, response.text
        return response.json()

    @property
    def sessions(self):
        """The names of the owner's sessions without a name."""
        return self.engine.in_space("default/http").agents()


@pytest.fixture
def place(tiny_model_path, tmp_path):
    """Not yet open."""
    made = Place(tiny_model_path, tmp_path / "store")
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(tiny_model_path, tmp_path_factory):
    """One open server for all tests of a file that only ask."""
    made = Place(tiny_model_path, tmp_path_factory.mktemp("serve") / "store").open()
    yield made
    made.close()


@pytest.fixture
def held(monkeypatch):
    """Holds requests of whatever engine is opened."""
    from amem.run.sampler import Sampler

    made = Held(Sampler)
    monkeypatch.setattr("amem.asked.Sampler", made.sampler)
    yield made
    made.let_go()


@pytest.fixture
def with_template(tmp_path):
    """Makes places whose model has a given chat template."""
    made = []

    def make(template):
        folder = write_tiny_model(tmp_path / f"model {len(made)}")
        write_tiny_tokenizer(folder, template)
        made.append(Place(folder, tmp_path / f"store {len(made)}"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def eventually(holds, seconds=120):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.01)


def in_flight(place):
    """Requests that the server has taken in."""
    return place.server._server.config.app._desk._n_taken


def began(place, *messages, **fields):
    """A stream that has begun, on a connection of its own: its prompt is being computed, or more."""
    client = httpx.Client(base_url=place.server.url, timeout=120)
    body = {"messages": messages, "stream": True, "max_tokens": 3000, **fields}
    response = client.send(client.build_request("POST", "/v1/chat/completions", json=body), stream=True)
    assert 200 == response.status_code
    lines = response.iter_lines()
    next(lines)
    return client, lines


def raw_request(body, path="/v1/chat/completions"):
    """The bytes of a request."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def events_of(lines):
    """The data of the events in a stream's lines, without its end."""
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def text_of(events):
    """The text in a chat's events."""
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


LONG = "a list of many words " * 20
