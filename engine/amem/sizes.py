"""Sizes in bytes, read from and written for people, and counts of things."""

from __future__ import annotations

import re

from amem.errors import InputError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(size: str | int) -> int:
    """Bytes of ``"2GB"``, ``"10.2GiB"`` or a number.

    Raises
    ------
        InputError: it is not a size, or not positive.
    """
    found = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", str(size))
    if not found or found[2].upper() not in _UNITS or not (n := int(float(found[1]) * _UNITS[found[2].upper()])):
        raise InputError(f"{size!r} is not a size: write it like 500MB, 2GB or 10.2GiB.")
    return n


def format_size(nbytes: int) -> str:
    """``1.2 MB``; decimal units."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def count(n: int, one: str, many: str = "") -> str:
    """A number with its noun: ``1 agent``, ``2 agents``."""
    return f"{n} {one if n == 1 else many or one + 's'}"
