"""Which agents to keep in memory: LRU, TTL and Belady's optimum, replayed on recorded traces.

A trace is what an engine really served: when an agent was asked, and how many bytes its state took afterwards. A replay
keeps what a policy keeps within a budget, and counts how often the agent that is asked was still there. LRU is what the
engine does; TTL forgets an agent some time after its last use, and goes by that order where it must; Belady's optimum
lets the one go whose next use is farthest (the optimum for states of equal size, a strong bound here). The engine's own
hits, counted while the trace was recorded, stand beside the replay of LRU: its budget also holds what running turns
reserve, so that it keeps a little less.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amem import Engine, Residency
from benchmarks.machine import machine

RESULT = Path(__file__).parent / "results" / "eviction.json"
SENTENCE = "The crew checks the valves, writes the figures down and waits for the next tide before it goes on. "
SHARES = (0.25, 0.5, 0.75)  #: budgets, as parts of what all agents would take at the end


@dataclass(frozen=True)
class Use:
    """One request of a trace."""

    agent: str
    seconds: float  #: when it was asked, from the trace's start
    nbytes: int  #: of the agent's state afterwards
    was_hot: bool = False  #: in the engine that recorded it


#: Gives the agent to evict: (those in memory with the time of their last use, the trace, the place in it) -> agent.
Policy = Callable[[Mapping[str, float], Sequence[Use], int], str]


def lru(held: Mapping[str, float], _trace: Sequence[Use], _at: int) -> str:
    """The least recently used."""
    return min(held, key=lambda agent: held[agent])


def belady(held: Mapping[str, float], trace: Sequence[Use], at: int) -> str:
    """The one whose next use is farthest, or never comes."""

    def next_use(agent: str) -> int:
        return next((i for i, use in enumerate(trace[at + 1 :]) if use.agent == agent), len(trace))

    return max(held, key=next_use)


def replay(trace: Sequence[Use], budget: int, policy: Policy, ttl_s: float | None = None) -> int:
    """Requests that found their agent in memory."""
    held: dict[str, float] = {}
    nbytes: dict[str, int] = {}
    hits = 0
    for at, use in enumerate(trace):
        if ttl_s is not None:
            held = {agent: used for agent, used in held.items() if use.seconds - used <= ttl_s}
        hits += use.agent in held
        held.pop(use.agent, None)
        nbytes[use.agent] = use.nbytes
        while held and use.nbytes + sum(nbytes[agent] for agent in held) > budget:
            del held[policy(held, trace, at)]
        held[use.agent] = use.seconds
    return hits


def workloads(n_agents: int, rounds: int) -> dict[str, list[str]]:
    """Whom notebooks ask, in order."""
    names = [f"agent {i}" for i in range(n_agents)]
    rng = random.Random(4)
    popular = [1 / (rank + 1) for rank in range(n_agents)]
    length = n_agents * rounds
    return {
        "run all, again and again": names * rounds,
        "a moderator between the others": [
            name for _ in range(rounds // 2 + 1) for other in names[1:] for name in (names[0], other)
        ][:length],
        "a few favourites": rng.choices(names, popular, k=length),
        "one cell edited many times": [
            name for start in range(n_agents) for name in names[start : start + 2] * (rounds // 2)
        ][:length],
    }


def record(model: str | None, asked: Iterable[str], budget: int | None) -> tuple[list[Use], int]:
    """Serve requests, without prefetch; their trace, and the engine's memory budget."""
    trace: list[Use] = []
    with tempfile.TemporaryDirectory() as store, Engine(model, store, memory=budget, prefetch=False) as engine:
        started = time.perf_counter()
        for name in asked:
            at = time.perf_counter() - started
            first = name not in engine.agents()
            reply = engine.agent(name).ask(SENTENCE * 8 if first else "What next?", max_tokens=4).metrics
            trace.append(Use(name, at, reply.hot_bytes, reply.residency is Residency.HOT))
        return trace, engine.status().memory_budget


def evaluate(trace: Sequence[Use]) -> list[dict[str, Any]]:
    """Hit rates of all policies at all budgets; a first use cannot be a hit, and is not counted."""
    last = {use.agent: use.nbytes for use in trace}
    n_again = len(trace) - len(last)
    duration = trace[-1].seconds
    rows = []
    for share in SHARES:
        budget = int(share * sum(last.values()))
        hits = {"LRU": replay(trace, budget, lru), "Belady": replay(trace, budget, belady)}
        for part in (0.05, 0.2):
            hits[f"TTL {part:.0%} of the trace"] = replay(trace, budget, lru, part * duration)
        rows.append({"budget_share": share, "budget": budget, "hit_rates": {k: v / n_again for k, v in hits.items()}})
    return rows


def main() -> None:
    """Record, replay, print a table, write the result file with the traces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--model", help="default: the bundled one")
    parser.add_argument("--replay", action="store_true", help="take the traces that the result file has")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.replay:
        result = json.loads(options.result.read_text(encoding="utf-8"))
        traces = {name: [Use(**use) for use in found["trace"]] for name, found in result["workloads"].items()}
    else:
        result = {"machine": machine(), "what": " ".join((__doc__ or "").split()), "workloads": {}}
        traces = {}
    for name, asked in workloads(options.agents, options.rounds).items():
        own: dict[str, Any] = result["workloads"].setdefault(name, {})
        if not options.replay:
            sizes, _ = record(options.model, sorted(set(asked)), None)
            half = int(SHARES[1] * sum(use.nbytes for use in sizes)) + 2 * max(use.nbytes for use in sizes)
            traces[name], own["engine_budget"] = record(options.model, asked, half)
            n_again = len(asked) - len(set(asked))
            own["engine_hit_rate"] = sum(use.was_hot for use in traces[name]) / n_again
            own["replayed_lru_at_engine_budget"] = replay(traces[name], own["engine_budget"], lru) / n_again
            own["trace"] = [asdict(use) for use in traces[name]]
        own["replays"] = evaluate(traces[name])
        print(f"{name} ({len(traces[name])} requests): the engine hit {own['engine_hit_rate']:.0%}", flush=True)
        for row in own["replays"]:
            rates = ", ".join(f"{policy} {rate:.0%}" for policy, rate in row["hit_rates"].items())
            print(f"   memory for {row['budget_share']:.0%} of them: {rates}", flush=True)
    options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {options.result}")


if __name__ == "__main__":
    main()
