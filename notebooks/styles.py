"""Lines, bars and maps that can be told apart without colour: each colour has a marker, a dash and a hatch of its own.

The colours have a contrast of at least 3 to 1 with white, and stay apart for people with red- or green-blindness
(most are those of Okabe and Ito).
"""

from __future__ import annotations

from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#000000", "#009e73", "#882255")
MARKERS = ("o", "s", "^", "D", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 2, 1, 2)), (0, (8, 2)))
HATCHES = ("", "///", "...", "xxx", "---")
MAP = "cividis"  #: a colour map for amounts, dark to light, that reads the same for everyone and in grey


def line(index: int) -> dict[str, Any]:
    """Options of `Axes.plot` for the series of this number."""
    return {"color": COLOURS[index], "marker": MARKERS[index], "linestyle": DASHES[index], "markersize": 6}


def bar(index: int) -> dict[str, Any]:
    """Options of `Axes.bar` and the like for the series of this number."""
    return {"color": COLOURS[index], "hatch": HATCHES[index], "edgecolor": "white", "linewidth": 0.8}
