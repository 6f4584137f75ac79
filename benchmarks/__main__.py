"""Every benchmark, one after the other, with its default options; each writes a file under `results`."""

import subprocess
import sys

NAMES = (
    "first_session",
    "next_turn",
    "phases",
    "restore",
    "attention",
    "batch",
    "overlap",
    "eviction",
    "memory",
    "peers",
)
ON_LINUX = {"restore", "memory"}  #: they drop files from its page cache, or read how much of a process is in memory

for name in NAMES:
    if name in ON_LINUX and sys.platform != "linux":
        print(f"{name} is left out: it needs Linux.", flush=True)
    else:
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
