"""A process that saves turns until it is killed: at a fault point, or whenever."""

import os
import signal
import sys
from pathlib import Path

import numpy as np

from amem.store import Store, faults
from tests.store.samples import SPACE, say


def history(turn):
    """The ids of turn number ``turn`` (from 1): every one has blocks, a tail and a snapshot."""
    return np.random.default_rng(turn).integers(0, 50_000, 401)


def main(root, name, turns, point, nth):
    """Save turns; kill this process when ``point`` is passed the ``nth`` time."""
    passed = 0

    def hook(reached):
        nonlocal passed
        passed += reached == point
        if passed == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    with Store(Path(root)) as store:
        agent = store.open(name, SPACE)
        if point != "-":
            faults.hook = hook
        for _ in range(turns):
            turn = len(agent.turns()) + 1
            say(agent, agent.head, history(turn), prompt=f"question {turn}", reply=f"answer {turn}")
            sys.stdout.write(f"{turn}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
