"""A server on loopback, on a tiny random model: real sockets, real engine, small sizes."""

import httpx
import pytest

pytest.importorskip("starlette", reason="the serve extra is not installed")

from amem import Engine
from amem.serve import Keys, Limits, Server
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


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


LONG = "a list of many words " * 20
