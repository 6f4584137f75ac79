"""Agents that meet in five phases, with a restart before each: state that is carried from phase to phase, and not.

The course of things is that of the cross-phase experiment of arXiv 2603.04428 (one asks, two answer apart, meet, and
are asked together; then a verdict). Each phase has an engine of its own. *Persistent*: all of them on one store, so
that an agent goes on where it was. *Not persistent*: each on an empty store; at its first step in a phase an agent's
whole history is sent and computed, and within the phase its state is kept. Both make the same steps, one after the
other, in this one run; the time that engines take to open is told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amem import Agent, Engine, Reply
from benchmarks.machine import machine

RESULT = Path(__file__).parent / "results" / "phases.json"

_HARBOUR = (
    "The harbour lost a shipment of copper wire in the night of the storm. The gate was opened at two with a key that "
    "only the two crane drivers have, and the guard saw one lamp on the quay but no face. "
)
SYSTEMS = {
    "auditor": "You are an auditor. You ask short questions, remember who said what, and judge by it. " + _HARBOUR,
    "anna": "You are Anna, a crane driver of thirty years. You are proud of your work and weigh your words. "
    + _HARBOUR,
    "boris": "You are Boris, a crane driver in his first year. You talk fast and want to keep your post. " + _HARBOUR,
}
PRIVATE = {"anna": "the heron painted on her locker", "boris": "the debt at the Blue Anchor inn"}


@dataclass(frozen=True)
class Step:
    """One message: what somebody is told, after the last replies of those whom they hear."""

    agent: str
    text: str
    hears: tuple[str, ...] = ()


def _alone(name: str) -> tuple[Step, ...]:
    return (
        Step("auditor", f"You sit with {name.title()} alone. You know of {PRIVATE[name]}. Ask about that night."),
        Step(
            name,
            f"The auditor mentions {PRIVATE[name]}, and promises that this stays between you. Answer.",
            ("auditor",),
        ),
        Step("auditor", "Note what you believe of that answer, and what you do not.", (name,)),
    )


PHASES: dict[str, tuple[Step, ...]] = {
    "one: the auditor and Anna": _alone("anna"),
    "two: the auditor and Boris": _alone("boris"),
    "three: Anna and Boris at the pier": (
        Step("anna", "You meet Boris at the pier. Nobody listens. Say what you will tell the auditor tomorrow."),
        Step("boris", "Anna speaks to you at the pier. Answer her.", ("anna",)),
        Step("anna", "Tell Boris in one sentence whether you trust him.", ("boris",)),
    ),
    "four: all three": (
        Step("auditor", "Both are before you. Ask the one question whose answer settles it."),
        Step("anna", "Answer the auditor before Boris.", ("auditor",)),
        Step("boris", "Answer the auditor, now that Anna has answered.", ("auditor", "anna")),
    ),
    "five: the verdict": (Step("auditor", "Say who opened the gate, and why you think so.", ("anna", "boris")),),
}


def message(step: Step, replies: Mapping[str, str]) -> str:
    """The text of a step: what is heard, then what is told."""
    return "\n\n".join([*(f"{name.title()} says: {replies[name].strip()}" for name in step.hears), step.text])


Ask = Callable[[Engine, str, str], Reply]


@contextmanager
def _engine(open_engine: Callable[[Path], Engine], store: Path) -> Iterator[tuple[Engine, float]]:
    started = time.perf_counter()
    engine = open_engine(store)
    try:
        yield engine, (time.perf_counter() - started) * 1e3
    finally:
        engine.close()


def play(open_engine: Callable[[Path], Engine], stores: Callable[[str], Path], ask: Ask) -> list[dict[str, Any]]:
    """All steps of all phases, each phase in an engine of its own; what each cost."""
    replies: dict[str, str] = {}
    rows = []
    for phase, steps in PHASES.items():
        with _engine(open_engine, stores(phase)) as (engine, opened_ms):
            for number, step in enumerate(steps):
                started = time.perf_counter()
                reply = ask(engine, step.agent, message(step, replies))
                replies[step.agent] = reply.text
                metrics = reply.metrics.to_dict()
                rows.append(
                    {
                        "phase": phase,
                        "agent": step.agent,
                        "text": reply.text,
                        "open_ms": 0.0 if number else opened_ms,  # of the phase's engine
                        "total_ms": (time.perf_counter() - started) * 1e3,
                        **{name: metrics[name] for name in _FIGURES},
                    }
                )
    return rows


_FIGURES = (
    "match", "residency", "prompt_tokens", "reused_tokens", "computed_tokens", "generated_tokens", "ttft_ms",
    "restore_ms", "prefill_ms", "first_decode_ms", "decode_ms", "commit_ms",
)  # fmt: skip


def persistent(max_tokens: int, temperature: float = 0.0) -> Ask:
    """Each agent goes on where it was."""

    def ask(engine: Engine, name: str, text: str) -> Reply:
        agent: Agent = engine.agent(name)
        system = None if agent.turns else SYSTEMS[name]
        return agent.ask(text, max_tokens=max_tokens, temperature=temperature, system=system)

    return ask


def stateless(max_tokens: int, temperature: float = 0.0) -> Ask:
    """Each agent's whole history is sent with every step, to an engine that knows nothing of earlier phases."""
    histories = {name: [{"role": "system", "content": text}] for name, text in SYSTEMS.items()}

    def ask(engine: Engine, name: str, text: str) -> Reply:
        history = histories[name]
        history.append({"role": "user", "content": text})
        reply = engine.agent(name).chat(history, max_tokens=max_tokens, temperature=temperature)
        history.append({"role": "assistant", "content": reply.text})
        return reply

    return ask


def compare(
    open_engine: Callable[[Path], Engine], folder: Path, max_tokens: int, temperature: float = 0.0
) -> dict[str, list[dict[str, Any]]]:
    """Both ways, one after the other, on the same machine in the same run."""
    number = Counter[str]()

    def empty(_phase: str) -> Path:
        number["store"] += 1
        return folder / f"empty {number['store']}"

    return {
        "not persistent": play(open_engine, empty, stateless(max_tokens, temperature)),
        "persistent": play(open_engine, lambda _phase: folder / "kept", persistent(max_tokens, temperature)),
    }


def main() -> None:
    """Measure, print a table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--model", default=None, help="name, folder or hub id (default: the bundled model)")
    options = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        played = compare(lambda store: Engine(options.model, store), Path(folder), options.max_tokens)
    load_after = os.getloadavg()
    for phase in PHASES:
        ttft = {way: sum(row["ttft_ms"] for row in rows if row["phase"] == phase) for way, rows in played.items()}
        print(f"{phase:36}", *(f"{way} {ms / 1e3:6.2f} s" for way, ms in ttft.items()), "(time to first tokens)")
    for way, rows in played.items():
        seconds = sum(row["total_ms"] for row in rows) / 1e3
        computed = sum(row["computed_tokens"] for row in rows)
        print(f"{way}: {seconds:.1f} s in all, {computed} prompt tokens computed")
    print(f"load average: {load_before[0]:.1f} before, {load_after[0]:.1f} after")
    RESULT.parent.mkdir(exist_ok=True)
    result = {
        "machine": machine(),
        "load_average_before": load_before,
        "load_average_after": load_after,
        "max_tokens": options.max_tokens,
        "played": played,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
