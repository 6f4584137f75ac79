"""The benchmarks that take minutes, one after the other, with their default options; each writes a result file.

`fidelity`, `needle` and `soak` take hours, and are run by name.
"""

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
#: They drop files from Linux's page cache, read how much of a process is in memory, or time the kernels for its CPU.
ON_LINUX = {"restore", "memory", "overlap", "attention"}

for name in NAMES:
    if name in ON_LINUX and sys.platform != "linux":
        print(f"{name} is left out: it needs Linux.", flush=True)
    else:
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
