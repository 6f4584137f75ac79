"""Every benchmark, one after the other, with its default options; each writes a file under `results`."""

import subprocess
import sys

for name in ("first_session", "next_turn", "phases", "restore", "batch", "overlap", "eviction", "memory", "peers"):
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
