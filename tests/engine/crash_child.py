"""A process with an engine that is killed at a point of its second turn's commit."""

import os
import signal
import sys

from amem import Engine
from amem.store import faults


def main(model, store, messages, point):
    with Engine(model, store, memory="200MB") as engine:
        agent = engine.agent("planner")
        agent.ask(messages[0], max_tokens=20)
        if point:
            faults.hook = lambda reached: os.kill(os.getpid(), signal.SIGKILL) if reached == point else None
        for message in messages[1:]:
            agent.ask(message, max_tokens=20)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[4:], sys.argv[3])
