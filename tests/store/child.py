"""A process that saves turns until it is killed: at a fault point, or whenever."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np

from amem.store import Store, faults
from tests.store.samples import SPACE, say

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.store.child"])


def history(turn):
    """The ids of turn number ``turn`` (from 1): every one has blocks, a tail and a snapshot."""
    return np.random.default_rng(turn).integers(0, 50_000, 401)


def save_turns(told, root, name, turns, point, nth):
    """Save turns and tell their numbers; kill this process when ``point`` is passed the ``nth`` time."""
    passed = 0

    def hook(reached):
        nonlocal passed
        passed += reached == point
        if passed == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    with Store(Path(root)) as store:
        agent = store.open(name, SPACE)
        if point is not None:
            faults.hook = hook
        for _ in range(turns):
            turn = len(agent.turns()) + 1
            say(agent, agent.head, history(turn), prompt=f"question {turn}", reply=f"answer {turn}")
            told.send(turn)


def run(target, *args):
    """Start a process; what it tells comes out of the pipe, which ends with it."""
    mine, its = processes.Pipe(duplex=False)
    process = processes.Process(target=target, args=(its, *args))
    process.start()
    its.close()
    return process, mine


def received(pipe):
    """Everything that a process still tells."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return
