"""The next turn of an agent with a long history: computed from nothing, and restored from disk in a new process.

Each measurement is a process of its own. The first one tells an agent a text of the wanted length (its time to first
token is what a cold start costs); the others, on the same store, send a short message to the agent that is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import machine

RESULT = Path(__file__).parent / "results" / "next_turn.json"
SENTENCE = "The crew checks the valves, writes the figures down and waits for the next tide before it goes on. "


def ask(store: str, n_tokens: int) -> dict[str, Any]:
    """In this process: one request, its metrics, and how long the model took to load."""
    import time

    from amem import Engine

    started = time.perf_counter()
    with Engine(store=store) as engine:
        loaded = time.perf_counter() - started
        agent = engine.agent("reader")
        message = SENTENCE * max(1, round(n_tokens / 20)) if n_tokens else SENTENCE + "What happens next?"
        metrics = agent.ask(message, max_tokens=32).metrics.to_dict()
    del metrics["blocks"], metrics["notes"]
    return metrics | {"load_ms": loaded * 1e3}


def in_new_process(store: str, n_tokens: int) -> dict[str, Any]:
    """`ask` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.next_turn", "--store", store, "--ask", str(n_tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure, print a table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3, help="of the restored turn")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask is not None:
        print(json.dumps(ask(options.store, options.ask)))
        return
    rows = []
    for n_tokens in options.lengths:
        with tempfile.TemporaryDirectory() as store:
            told = Path(store, "told")
            cold = in_new_process(str(told), n_tokens)
            warm = []
            for repeat in range(options.repeats):  # each on a copy, so that all have the same history
                copy = Path(store, str(repeat))
                shutil.copytree(told, copy)
                warm.append(in_new_process(str(copy), 0))
        rows.append({"cold": cold, "restored": warm})
        ttft = median(sample["ttft_ms"] for sample in warm)
        restore = median(sample["restore_ms"] for sample in warm)
        print(
            f"{warm[0]['reused_tokens']:>6} tokens: cold {cold['ttft_ms']:>8.0f} ms, restored {ttft:>6.0f} ms "
            f"(of it restore {restore:.1f} ms), prefill "
            f"{cold['computed_tokens'] / (cold['prefill_ms'] + cold['first_decode_ms']) * 1e3:.0f} tokens/s, decode "
            f"{cold['tokens_per_second']:.1f} tokens/s",
            flush=True,
        )
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
