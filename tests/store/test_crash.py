"""Processes that are killed in the middle of their work."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from amem.store import Store, faults
from amem.store.verify import verify
from tests.store.child import history
from tests.store.samples import REALM, SPACE, check, say


def start(root, name="planner", turns=3, point="-", nth=1):
    command = [sys.executable, "-m", "tests.store.child", str(root), name, str(turns), point, str(nth)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def survives(root, told, name="planner"):
    """After a kill: verify is clean, every turn that was told is there, and the agent goes on."""
    with Store(root) as store:
        report = verify(store)
        assert [] == report.problems
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
        assert [] == list(agent.root.glob("*.tmp"))
        say(agent, agent.head, history(len(turns) + 1))
        assert [] == store.reports


@pytest.mark.parametrize("point", faults.POINTS)
def test_killed_at_a_step(root, point):
    """A kill at each step of the second turn leaves the first, and never half of the second."""
    with Store(root) as store:
        say(store.open("planner", SPACE), None, history(1), prompt="question 1", reply="answer 1")
    child = start(root, point=point)
    told = len(child.communicate(timeout=60)[0].split())
    assert -signal.SIGKILL == child.returncode
    survives(root, 1 + told)


def kill_at_random(root, seed):
    pause = random.Random(seed)
    told = 0
    child = start(root, turns=1000)
    for line in child.stdout:
        told = int(line)
        if told == 1:
            time.sleep(pause.uniform(0, 0.15))
            child.kill()
    child.wait(timeout=60)
    child.stdout.close()
    survives(root, told)


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_instant(root, seed):
    """A kill under load leaves the last turn that was told, or one more."""
    kill_at_random(root, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 600))
def test_killed_at_any_instant_many_times(root, seed):
    """As above, many more times."""
    kill_at_random(root, seed)


@pytest.mark.parametrize("number", [1, 2])
def test_a_failing_disk_changes_nothing(root, number, monkeypatch):
    """An error at each step of a commit leaves the agent as it was, and the next try succeeds."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        say(agent, None, history(1))
        for point in faults.POINTS[:14]:
            passed = []

            def hook(reached, point=point, passed=passed):
                passed.append(reached)
                if reached == point and passed.count(point) == number:
                    raise OSError(28, "No space left on device")

            monkeypatch.setattr(faults, "hook", hook)
            before = agent.turns()
            try:
                say(agent, 1, history(2))
            except Exception as error:
                assert "no space left" in str(error)
                assert before == agent.turns()
            monkeypatch.setattr(faults, "hook", None)
        second = say(agent, 1, history(2))
        assert 802 == agent.realization(second.id, REALM).n_tokens
    with Store(root) as store:
        assert [] == verify(store).problems
        assert 802 == check(store.open("planner", SPACE), np.concatenate([history(1), history(2)]))
        assert [] == store.reports
