import pytest

from amem.store import Store
from tests.store.samples import SPACE


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(root):
    with Store(root) as store:
        yield store


@pytest.fixture
def agent(store):
    return store.open("planner", SPACE)
