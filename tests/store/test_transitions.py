"""Which agent usually follows which."""

import pytest

from amem.store import Store
from tests.store.samples import SPACE


@pytest.fixture
def keys(store):
    """The keys of four agents."""
    return [store.open(name, SPACE).key for name in ("planner", "critic", "writer", "editor")]


def test_the_usual_successor_comes_first(store, keys):
    """Often goes before seldom; a space knows nothing of another; an agent is not its own successor."""
    planner, critic, writer, editor = keys
    for after in (critic, writer, critic, critic, editor, critic, planner):
        store.record_transition(SPACE, planner, after)
    assert [critic, editor, writer] == store.likely_next(SPACE, planner, 3)
    assert [critic] == store.likely_next(SPACE, planner, 1)
    assert [] == store.likely_next(SPACE, planner, 0)
    assert [] == store.likely_next("elsewhere", planner, 3)
    assert [] == store.likely_next(SPACE, critic, 3)


def test_a_new_habit_replaces_an_old_one(store, keys):
    """However long one agent followed, a few turns of another go first, and what never comes again is forgotten."""
    planner, critic, writer, _ = keys
    for _ in range(200):
        store.record_transition(SPACE, planner, critic)
    for _ in range(4):
        store.record_transition(SPACE, planner, writer)
    assert [writer, critic] == store.likely_next(SPACE, planner, 3)
    for _ in range(40):
        store.record_transition(SPACE, planner, writer)
    assert [writer] == store.likely_next(SPACE, planner, 3)


def test_habits_outlive_the_process_and_no_deleted_agent(root):
    """They are there after reopening; a deleted agent is no longer expected, nor recorded, nor in the file."""
    with Store(root) as store:
        planner, critic, writer = (store.open(name, SPACE).key for name in ("planner", "critic", "writer"))
        for after in (critic, writer):
            store.record_transition(SPACE, planner, after)
    with Store(root) as store:
        assert [writer, critic] == store.likely_next(SPACE, planner, 3)
        store.delete("writer", SPACE)
        assert [critic] == store.likely_next(SPACE, planner, 3)
        store.record_transition(SPACE, planner, writer)
        assert [critic] == store.likely_next(SPACE, planner, 3)
        assert not any(writer.encode() in path.read_bytes() for path in root.rglob("*") if path.is_file())


def test_a_rebuilt_index_begins_without_habits(root):
    """The folders do not know who followed whom."""
    with Store(root) as store:
        planner, critic = (store.open(name, SPACE).key for name in ("planner", "critic"))
        store.record_transition(SPACE, planner, critic)
    (root / "index.sqlite3").unlink()
    with Store(root) as store:
        assert [] == store.likely_next(SPACE, planner, 3)
        store.record_transition(SPACE, planner, critic)
        assert [critic] == store.likely_next(SPACE, planner, 3)
        assert SPACE.encode() not in (root / "index.sqlite3").read_bytes()
