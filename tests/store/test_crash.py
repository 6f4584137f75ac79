"""Processes that are killed in the middle of their work."""

import random
import signal
import time

import numpy as np
import pytest

from amem.errors import StoreFull
from amem.store import Store, faults, verify
from tests.store.child import history, received, run, save_turns
from tests.store.samples import REALM, SPACE, check, say


def survives(root, told, name="planner"):
    """After a kill: verify is clean, every turn that was told is there, and the agent goes on."""
    with Store(root) as store:
        report = verify(store)
        assert report.problems == []
        agent = store.open(name, SPACE)
        turns = agent.turns()
        assert told <= len(turns) <= told + 1
        assert list(range(1, len(turns) + 1)) == agent.path(agent.head) if turns else agent.head is None
        for number, turn in turns.items():
            assert (f"question {number}", f"answer {number}") == (turn.prompt, turn.reply)
        ids = np.concatenate([np.empty(0, np.int32), *(history(number) for number in turns)])
        if turns:
            assert np.array_equal(ids, agent.path_tokens(agent.head, REALM))
        assert len(ids) == check(agent, ids)
        names = {path.stem for path in agent.root.glob("*.safetensors")}
        assert names == agent._database.tree.names()
        assert list(agent.root.glob("*.tmp")) == []
        say(agent, agent.head, history(len(turns) + 1))
        assert store.reports == []
        return len(turns)


@pytest.mark.parametrize("point", faults.POINTS)
def test_killed_at_a_step(root, point):
    """A kill at each step of the second turn leaves the first, and never half of the second.

    Once its text is written, all of it is, and it is taken over.
    """
    with Store(root) as store:
        say(store.open("planner", SPACE), None, history(1), prompt="question 1", reply="answer 1")
    child, pipe = run(save_turns, root, "planner", 3, point, 1)
    told = len(list(received(pipe)))
    child.join()
    assert child.exitcode == -signal.SIGKILL
    written = faults.POINTS.index(point) >= faults.POINTS.index("commit.transcript")
    assert 1 + told + written == survives(root, 1 + told)


def kill_at_random(root, seed):
    pause = random.Random(seed)
    told = 0
    child, pipe = run(save_turns, root, "planner", 1000, None, 0)
    for turn in received(pipe):
        told = turn
        if told == 1:
            time.sleep(pause.uniform(0, 0.15))
            child.kill()
    child.join()
    survives(root, told)


@pytest.mark.parametrize("seed", range(20))
def test_killed_at_any_instant(root, seed):
    """A kill under load leaves the last turn that was told, or one more."""
    kill_at_random(root, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 600))
def test_killed_at_any_instant_many_times(root, seed):
    """As above, many more times."""
    kill_at_random(root, seed)


def test_a_failing_disk_changes_nothing(root, monkeypatch):
    """An error at each step of a commit leaves the agent as it was, and the next try succeeds."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        say(agent, None, history(1))
        before = agent.turns()
        for point in faults.POINTS[: faults.POINTS.index("commit.committed")]:

            def fail(reached, point=point):
                if reached == point:
                    raise OSError(28, "No space left on device")

            monkeypatch.setattr(faults, "hook", fail)
            with pytest.raises(StoreFull, match="no space left"):
                say(agent, 1, history(2))
            assert agent.turns() == before
        monkeypatch.setattr(faults, "hook", None)
        second = say(agent, 1, history(2))
        assert agent.realization(second.id, REALM).n_tokens == 802
    with Store(root) as store:
        assert verify(store).problems == []
        assert check(store.open("planner", SPACE), np.concatenate([history(1), history(2)])) == 802
        assert store.reports == []
