"""Finds our cell magic where IPython would not: below comments, or with a tab after its name."""

from __future__ import annotations

import re

MAGIC = re.compile(r"(%%agents?)[ \t]+")


def lift_magic(lines: list[str]) -> list[str]:
    """A cell that begins with comments and then has our magic, as one that begins with the magic.

    An input transformer of IPython's: cells of any other kind come back as they are.
    """
    for number, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("#"):
            found = MAGIC.match(line)
            return lines if found is None else [f"{found[1]} {line[found.end() :]}", *lines[number + 1 :]]
    return lines
