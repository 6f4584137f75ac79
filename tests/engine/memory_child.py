"""Twelve agents with memory for three, a hundred turns, some of them at once; prints what it took as JSON."""

import json
import random
import sys
import threading
from pathlib import Path

from amem import Engine, Residency

LONG = "a list of many words " * 30
NAMES = [f"agent {i}" for i in range(12)]


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The process's largest resident size while it watches."""

    def __init__(self):
        self.nbytes = rss()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self):
        while not self._stop.wait(0.002):
            self.nbytes = max(self.nbytes, rss())

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def main(model, store):
    rng = random.Random(6)
    with Engine(model, store, memory="1GB") as engine:  # what an agent needs, measured
        engine.agent("probe").ask(LONG, max_tokens=4)
        budget = 3 * engine._parts.sequence_nbytes(engine.agent("probe").status.n_tokens + 150)
        engine.agent("probe").delete()
    with Engine(model, store, memory=budget) as engine:
        engine.agent("probe").ask("Hello.", max_tokens=2)
        engine.agent("probe").delete()
        before = rss()
        n_turns = n_restored = 0
        with Peak() as peak:
            while n_turns < 100:
                names = rng.sample(NAMES, min(rng.choice([1, 1, 2, 4]), 100 - n_turns))
                first = [name for name in names if name not in engine.agents()]
                messages = {name: LONG if name in first else "And then?" for name in names}
                replies = engine.ask_all(messages, max_tokens=4)
                n_turns += len(replies)
                n_restored += sum(r.metrics.residency is Residency.WARM for r in replies.values())
                assert all(reply.metrics.saved for reply in replies.values())
        status = engine.status()
        sys.stdout.write(
            json.dumps(
                {
                    "budget": budget,
                    "pool_peak": status.peak_hot_bytes,
                    "growth": peak.nbytes - before,
                    "turns": sum(agent.n_turns for agent in status.agents),
                    "restored": n_restored,
                    "prefetched": status.prefetch.restored,
                    "problems": len(engine.verify().problems),
                }
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
