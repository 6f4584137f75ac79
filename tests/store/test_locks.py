"""One writer per agent, in this process and among several."""

import os
import re
import socket
import time

import numpy as np
import pytest

from amem.errors import AgentLocked, StoreError
from amem.store import Store, verify
from tests.store.child import history, received, run, save_turns
from tests.store.samples import SPACE, check, say

IDS = np.arange(900)


def test_one_writer_within_a_process(root):
    """Two stores in one process conflict too, and closing lets the next one in."""
    with Store(root) as first, Store(root) as second:
        agent = first.open("planner", SPACE)
        for store in (first, second):
            with pytest.raises(AgentLocked, match=rf"'planner' is in use by this process {os.getpid()} on .* since 20"):
                store.open("planner", SPACE)
        with pytest.raises(AgentLocked):
            second.delete("planner", SPACE)
        assert [entry.name for entry in second.agents()] == ["planner"]
        agent.release()
        second.open("planner", SPACE)
        with pytest.raises(StoreError, match="was closed"):
            agent.turns()


def hold(told, root, name):
    with Store(root) as store:
        store.open(name, SPACE)
        told.send(os.getpid())
        time.sleep(60)


def test_a_lock_between_processes_ends_with_its_holder(root):
    """Another process's agent is refused with its pid; after its death the lock is taken over."""
    child, pipe = run(hold, root, "planner")
    pid = pipe.recv()
    with Store(root) as store:
        who = rf"'planner' is in use by process {pid} on {re.escape(socket.gethostname())} since \d{{4}}-\d\d-\d\dT\d"
        with pytest.raises(AgentLocked, match=who):
            store.open("planner", SPACE)
        assert [f"process {pid}" in text for text in verify(store).skipped] == [True]
        with pytest.raises(AgentLocked, match=f"process {pid} on "):
            store.check_free("planner", SPACE)
        for free in ("critic", "x" * 200, ""):
            store.check_free(free, SPACE)
        assert [entry.name for entry in store.agents()] == ["planner"]
        store.open("critic", SPACE)
        store.check_free("critic", SPACE)
        child.kill()
        child.join()
        say(store.open("planner", SPACE), None, IDS)


def test_a_brief_holder_is_waited_for(root):
    """Eviction and verify hold an agent for a moment: opening it then waits instead of failing."""
    import threading

    with Store(root) as store, Store(root) as other:
        store.open("planner", SPACE).close()
        (key,) = store.keys_by_use()
        with store.borrow(key):
            waiting = threading.Thread(target=lambda: other.open("planner", SPACE))
            waiting.start()
            waiting.join(0.1)
            assert waiting.is_alive()
        waiting.join(10)
        assert {key} == other.open_keys()


def create(told, root, name):
    with Store(root) as store:
        try:
            agent = store.open(name, SPACE)
        except AgentLocked:
            told.send(None)
            return
        told.send(agent.key)
        while not (root / "all have tried").exists():
            time.sleep(0.01)


def test_a_name_is_given_once(root):
    """Processes that create the same agent at the same time make one agent, and one of them writes it."""
    children = [run(create, root, "planner") for _ in range(4)]
    keys = [key for _, pipe in children if (key := pipe.recv()) is not None]
    (root / "all have tried").touch()
    for child, _ in children:
        child.join()
    with Store(root) as store:
        assert keys == [entry.key for entry in store.agents()]


def test_eight_processes_of_fifty_turns_leave_a_clean_store(root):
    """Different agents of one store are written by several processes at once, and every bit is there afterwards."""
    children = [run(save_turns, root, f"agent {number}", 50, None, 0) for number in range(8)]
    for child, pipe in children:
        assert 50 == len(list(received(pipe)))
        child.join()
        assert child.exitcode == 0
    with Store(root) as store:
        report = verify(store)
        assert ([], 8) == (report.problems, report.agents)
        assert {50} == {entry.n_turns for entry in store.agents()}
        ids = np.concatenate([history(number) for number in range(1, 51)])
        for number in range(8):
            assert len(ids) == check(store.open(f"agent {number}", SPACE), ids)
