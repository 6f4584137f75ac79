"""What agents take in memory, in 4 and in 16 bits: by the engine's account, by MLX's, and by the growth of the process.

Agents are told a text of one length, one after the other. One more was told before and stays: what the first request
allocates for itself is in no figure. At the end all are evicted, which the process need not show, as what is freed may
stay with the allocator; and restored, which shows whether it is used again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from benchmarks.machine import machine
from benchmarks.next_turn import SENTENCE

if TYPE_CHECKING:
    from amem import Engine

RESULT = Path(__file__).parent / "results" / "memory.json"
CODECS = ("q4", "fp16")
ACCOUNTS = ("hot_bytes", "mlx_bytes", "resident_bytes")


def resident_nbytes() -> int:
    """Bytes of this process that are in memory (Linux)."""
    n_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return n_pages * os.sysconf("SC_PAGE_SIZE")


def fill(store: str, codec: str, n_agents: int, n_tokens: int) -> dict[str, Any]:
    """Tell a text to one agent after another; what is in memory after each, and once all left and came back."""
    import mlx.core as mx

    from amem import Engine

    with Engine(store=store, codec=codec, prefetch=False) as engine:
        rows = []
        for n in range(n_agents + 1):
            metrics = engine.agent(f"agent {n}").ask(SENTENCE * round(n_tokens / 20), max_tokens=2).metrics
            rows.append({"agents": n, "tokens": metrics.prompt_tokens + metrics.generated_tokens, **_now(engine, mx)})
        agents = [engine.agent(name) for name in engine.agents()]
        for agent in agents:
            agent.evict()
        evicted = _now(engine, mx)
        for agent in agents:
            agent.restore()
        return {"rows": rows, "evicted": evicted, "restored": _now(engine, mx)}


def _now(engine: Engine, mx: ModuleType) -> dict[str, int]:
    return {
        "hot_bytes": engine.status().hot_bytes,
        "mlx_bytes": mx.get_active_memory(),
        "resident_bytes": resident_nbytes(),
    }


def main() -> None:
    """Measure, print a table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        first, last = codecs[codec]["rows"][0], codecs[codec]["rows"][-1]
        grown = [f"{name[:-6]} {(last[name] - first[name]) / 1e6:.1f} MB" for name in ACCOUNTS]
        print(f"{codec:>5}: {last['agents']} agents more: {', '.join(grown)}", flush=True)
    options.result.write_text(json.dumps({"machine": machine(), "codecs": codecs}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {options.result}")


if __name__ == "__main__":
    main()
