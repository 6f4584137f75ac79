"""One message to N agents: as one batch (`ask_all`), and one agent after the other, in turns in the same run."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from amem import Engine, Reply
from benchmarks.machine import machine

RESULT = Path(__file__).parent / "results" / "batch.json"
MESSAGE = "The crew checks the valves and waits for the next tide. What do you, as {name}, do next? Answer at length."


def one_by_one(engine: Engine, messages: Mapping[str, str], max_tokens: int) -> dict[str, Reply]:
    """Each agent waits for the one before it."""
    return {name: engine.agent(name).ask(text, max_tokens=max_tokens) for name, text in messages.items()}


def at_once(engine: Engine, messages: Mapping[str, str], max_tokens: int) -> dict[str, Reply]:
    """All agents decode together."""
    return engine.ask_all(messages, max_tokens=max_tokens)


def measure(engine: Engine, n: int, max_tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds, tokens and times to first token of both ways; each time with agents that are new."""
    samples: dict[str, list[dict[str, Any]]] = {"one by one": [], "at once": []}
    for repeat in range(repeats):
        for way, ask in (("one by one", one_by_one), ("at once", at_once)):
            names = [f"{way} {n} {repeat} agent {i}" for i in range(n)]
            started = time.perf_counter()
            replies = ask(engine, {name: MESSAGE.format(name=name[-7:]) for name in names}, max_tokens)
            samples[way].append(
                {
                    "seconds": time.perf_counter() - started,
                    "generated_tokens": sum(reply.metrics.generated_tokens for reply in replies.values()),
                    "ttft_ms": [reply.metrics.ttft_ms for reply in replies.values()],
                }
            )
            for name in names:
                engine.agent(name).delete()
    medians = {way: median(sample["seconds"] for sample in of_way) for way, of_way in samples.items()}
    return {"agents": n, "median_seconds": medians, "samples": samples}


def main() -> None:
    """Measure, print a table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="default: the bundled one")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as store, Engine(options.model, store, prefetch=False) as engine:
        engine.agent("first").ask("Hello.", max_tokens=8)  # the first steps allocate
        for n in options.agents:
            rows.append(measure(engine, n, options.max_tokens, options.repeats))
            alone, together = rows[-1]["median_seconds"].values()
            print(
                f"{n:>3} agents: {alone:7.2f} s one by one, {together:7.2f} s at once ({alone / together:.2f} times)",
                flush=True,
            )
        status = engine.status()
    result = {"machine": machine(), "model": status.model, "max_tokens": options.max_tokens, "rows": rows}
    options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {options.result}")


if __name__ == "__main__":
    main()
