import tempfile
from pathlib import Path

import pytest

from amem.store import Store
from tests.store.samples import SCRATCH, SPACE


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        yield Path(folder) / "store"


@pytest.fixture
def store(root):
    with Store(root) as store:
        yield store


@pytest.fixture
def agent(store):
    return store.open("planner", SPACE)
