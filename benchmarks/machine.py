"""What every result file says of the machine it was measured on."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine(*peers: str) -> dict[str, Any]:
    """Processor, cores, memory, load, versions (of these packages too, where they are installed) and date."""
    cpu = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "platform": platform.platform(),
        "processor": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": versions("amem", "mlx", "mlx-lm", "numpy", *peers),
    }


def versions(*packages: str) -> dict[str, str]:
    """The versions of those of these packages that are installed."""
    return {name: found for name in packages if (found := _version(name))}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
