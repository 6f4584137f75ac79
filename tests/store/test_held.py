"""Turns that could not be saved."""

import numpy as np
import pytest

from amem.errors import InputError, StoreFull
from amem.store import NewTurn, Store, export_agent, faults, verify
from tests.store.samples import REALM, SPACE, check, prepare, say

IDS = np.arange(900)


def turn(parent, number):
    return NewTurn(parent, f"question {number}", f"answer {number}", "stop")


def hold(agent, parent, number, ids):
    known = agent.realization(parent, REALM) if parent else None
    n_tokens = (known.n_tokens if known else 0) + len(ids)
    return agent.hold(turn(parent, number), REALM, ids, n_tokens, last_block=known.last_block if known else None)


@pytest.fixture
def no_room(monkeypatch):
    """Commits fail, whatever they write, until it is called."""

    def fail(reached):
        if reached == "commit.rows":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(faults, "hook", fail)
    return lambda: monkeypatch.setattr(faults, "hook", None)


def test_a_held_turn_is_seen_by_all_and_written_by_none(root):
    """Head, path, text and tokens have it; the files do not, and after closing it never was."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        first = say(agent, None, IDS[:600])
        before = {path: path.read_bytes() for path in agent.root.iterdir()}
        second = hold(agent, first.id, 2, IDS[600:700])
        third = hold(agent, second.id, 3, IDS[700:])
        assert [1, 2, 3] == agent.path(agent.head) == list(agent.turns())
        assert "answer 2" == agent.turn(2).reply
        assert np.array_equal(IDS, agent.path_tokens(third.id, REALM))
        assert check(agent, IDS) == 600
        assert 2 == agent.unsaved_turns
        assert verify(store).problems == []
        assert [1, 2, 3] == agent.path(agent.head)
        assert before == {path: path.read_bytes() for path in agent.root.iterdir()}
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        assert ([1], 1, 0) == (list(agent.turns()), agent.head, agent.unsaved_turns)
        assert store.reports == []


def test_what_is_saved_next_saves_it_too(root, no_room):
    """While there is no room it stays remembered; with the first commit that succeeds all of it is on disk."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        hold(agent, None, 1, IDS[:600])
        for _ in range(2):
            with pytest.raises(StoreFull):
                say(agent, 1, IDS[600:])
            assert ([1], 1, 1) == (list(agent.turns()), agent.head, agent.unsaved_turns)
        no_room()
        blocks, last, tail, snapshot = prepare(agent, IDS)
        words = {"blocks": blocks, "tail": tail, "snapshot": snapshot, "last_block": last}
        saved = agent.commit(turn(1, 2), REALM, IDS[600:], 900, **words)
        assert (2, 0) == (saved.id, agent.unsaved_turns)
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        assert ["answer 1", "answer 2"] == [said.reply for said in agent.turns().values()]
        assert check(agent, IDS) == 900
        assert verify(store).problems == []
        assert store.reports == []


@pytest.mark.parametrize("act", ["head", "meta"])
def test_small_changes_save_it_as_well(root, act):
    """Whatever is written durably."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        hold(agent, None, 1, IDS[:100])
        if act == "head":
            agent.set_head(None)
        else:
            agent.set_meta("system", "You plan.")
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        assert [1] == list(agent.turns())
        assert (None if act == "head" else 1) == agent.head


def test_eviction_damage_and_export_leave_it_where_it_is(root, tmp_path):
    """They have transactions of their own; an export has only what is saved."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        say(agent, None, IDS)
        hold(agent, 1, 2, IDS[:50])
        export_agent(agent, tmp_path / "planner.zip")
        snapshots, blocks = agent.evictable()
        agent.evict([*snapshots, blocks[0]])
        agent.repair()
        assert ([1, 2], 1) == (agent.path(2), agent.unsaved_turns)
        assert check(agent, IDS) < 900
        agent.find(REALM, [])  # what was found last is spared
        agent.evict(agent.evictable()[1])
        assert agent.realization(2, REALM).last_block is None
        assert np.array_equal(np.concatenate([IDS, IDS[:50]]), agent.path_tokens(2, REALM))


def test_what_does_not_fit_together_is_not_held(agent):
    """A refused turn leaves those that are held as they were."""
    hold(agent, None, 1, IDS[:100])
    with pytest.raises(InputError):
        agent.hold(turn(1, 2), REALM, IDS[:10], 100, last_block=None)
    assert ([1], 1) == (list(agent.turns()), agent.unsaved_turns)
