"""What agents take in memory: the process and the engine's own account, agent after agent, in 4 and in 16 bits."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.next_turn import SENTENCE

RESULT = Path(__file__).parent / "results" / "memory.json"
CODECS = ("q4", "fp16")


def resident_nbytes() -> int:
    """Bytes of this process that are in memory (Linux)."""
    n_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return n_pages * os.sysconf("SC_PAGE_SIZE")


def fill(store: str, codec: str, n_agents: int, n_tokens: int) -> list[dict[str, Any]]:
    """Tell a text to one agent after another; what is in memory after each."""
    from amem import Engine

    rows = []
    with Engine(store=store, codec=codec, prefetch=False) as engine:
        engine.agent("warm-up").ask(SENTENCE, max_tokens=2)
        engine.agent("warm-up").evict()
        rows.append({"agents": 0, "hot_bytes": engine.status().hot_bytes, "resident_bytes": resident_nbytes()})
        for n in range(1, n_agents + 1):
            metrics = engine.agent(f"agent {n}").ask(SENTENCE * round(n_tokens / 20), max_tokens=2).metrics
            rows.append(
                {
                    "agents": n,
                    "tokens": metrics.prompt_tokens + metrics.generated_tokens,
                    "hot_bytes": engine.status().hot_bytes,
                    "resident_bytes": resident_nbytes(),
                }
            )
    return rows


def main() -> None:
    """Measure, print a table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000, help="of each agent")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--codec", choices=CODECS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.codec:
        with tempfile.TemporaryDirectory() as store:
            print(json.dumps(fill(store, options.codec, options.agents, options.tokens)))
        return
    codecs = {}
    for codec in CODECS:
        command = [sys.executable, "-m", "benchmarks.memory", "--codec", codec, "--agents", str(options.agents)]
        done = subprocess.run(
            [*command, "--tokens", str(options.tokens)], check=True, stdout=subprocess.PIPE, text=True
        )
        codecs[codec] = json.loads(done.stdout.splitlines()[-1])
        first, last = codecs[codec][0], codecs[codec][-1]
        grown = (last["resident_bytes"] - first["resident_bytes"]) / 1e6
        print(f"{codec:>5}: {last['agents']} agents, {last['hot_bytes'] / 1e6:.1f} MB hot, process + {grown:.1f} MB")
    options.result.write_text(json.dumps({"machine": machine(), "codecs": codecs}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {options.result}")


if __name__ == "__main__":
    main()
