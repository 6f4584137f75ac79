"""Many kills, and a result file that says how many were survived: see `benchmarks.kills`."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from benchmarks import kills
from benchmarks.machine import machine
from tests.tiny import write_tiny_model

RESULT = Path(__file__).parent / "results" / "soak.json"


def main() -> None:
    """Kill, and write the result file after each conversation, so that a run may be ended at any time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    started = time.monotonic()

    def write(report: kills.Report) -> None:
        result = {
            "machine": machine(),
            "what": " ".join((kills.__doc__ or "").split()),
            "seed": options.seed,
            "seconds": round(time.monotonic() - started),
            "kills": report.n_kills,
            "survived": report.survived,
            "kills_at": dict(sorted(report.kills.items())),
            "conversations": report.conversations,
            "turns_cut_off": report.turns_cut_off,
            "failures": report.failures,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(
            f"{report.survived} of {report.n_kills} kills survived, {round(time.monotonic() - started)} s", flush=True
        )

    with tempfile.TemporaryDirectory(dir=place) as folder:
        scratch = Path(folder)
        soak = kills.Soak(write_tiny_model(scratch / "tiny-llama"), scratch, options.seed)
        report = soak.run(options.kills, write)
    print(f"written: {RESULT}")
    if report.failures:
        parser.exit(1, "\n".join(report.failures) + "\n")


if __name__ == "__main__":
    main()
