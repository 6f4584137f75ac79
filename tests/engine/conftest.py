"""An engine on a tiny random model: real parts, small sizes."""

import signal

import pytest

from amem import Engine
from tests.engine.scripted import Replies


@pytest.fixture
def open_engine(tiny_model_path, tmp_path):
    """Opens engines on one store, or another by its name; those still open are closed at the end."""
    engines = []

    def open_one(store="store", **options):
        engine = Engine(tiny_model_path, tmp_path / store, **{"memory": "200MB", **options})
        engines.append(engine)
        return engine

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(open_engine):
    return open_engine()


@pytest.fixture
def interruptible():
    """Ctrl-C works, even where the tests were started in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def replies(monkeypatch):
    """Replies to come."""
    script = Replies()
    monkeypatch.setattr("amem.asked.Sampler", script.sampler)
    return script
