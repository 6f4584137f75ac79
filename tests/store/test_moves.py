"""Agents that are given to another space."""

import numpy as np
import pytest

from amem.errors import InputError
from amem.store import Store, names, verify
from tests.store.samples import REALM, SPACE, check, say

IDS = np.arange(600)


def test_a_moved_agent_is_whole_in_its_new_space(store):
    """With its turns and blocks; its old name is free for another."""
    agent = store.open("planner", SPACE)
    say(agent, None, IDS)
    agent.move("elsewhere")
    assert check(agent, IDS) == 600
    assert [(entry.name, entry.space) for entry in store.agents()] == [("planner", "elsewhere")]
    agent.close()
    with pytest.raises(InputError, match="no agent"):
        store.open("planner", SPACE, create=False)
    assert store.open("planner", "elsewhere", create=False).path_tokens(1, REALM).tolist() == IDS.tolist()
    assert store.open("planner", SPACE).turns() == {}
    assert verify(store).problems == []


def test_the_new_space_outlives_a_lost_label_and_a_lost_index(root):
    """The transcript tells it, too."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        say(agent, None, IDS)
        agent.move("elsewhere")
        (agent.root / names.LABEL).write_text("damaged")
    for file in root.glob("index.sqlite3*"):
        file.unlink()
    with Store(root) as store:
        assert [(entry.name, entry.space) for entry in store.agents()] == [("planner", "elsewhere")]
        assert check(store.open("planner", "elsewhere", create=False), IDS) == 600


def test_a_name_that_is_taken_there_is_refused(store):
    """And nothing has moved."""
    agent = store.open("planner", SPACE)
    say(agent, None, IDS)
    store.open("planner", "elsewhere").close()
    with pytest.raises(InputError, match="already"):
        agent.move("elsewhere")
    assert agent.space == SPACE
    assert store.open("planner", "elsewhere").turns() == {}
    assert verify(store).problems == []


def test_a_kill_in_the_middle_of_a_move_can_be_made_good(root, monkeypatch):
    """The index was told, the folder not yet: the agent is listed where it was, and moves at the second try."""

    def killed(*_args):
        raise KeyboardInterrupt

    with Store(root) as store:
        agent = store.open("planner", SPACE)
        say(agent, None, IDS)
        with monkeypatch.context() as patch:
            patch.setattr(names, "write_label", killed)
            with pytest.raises(KeyboardInterrupt):
                agent.move("elsewhere")
    with Store(root) as store:
        ((key, space),) = [(entry.key, entry.space) for entry in store.agents()]
        assert space == SPACE
        with store.borrow(key) as agent:
            agent.move("elsewhere")
            assert check(agent, IDS) == 600
        assert verify(store).problems == []
