"""What notebooks show of their measurements: tables that read without styles, plots with a text for who cannot see."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from IPython.display import display

from amem_jupyter.markup import table as _table
from benchmarks.machine import machine as _machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_NUMBER = re.compile(r"([-+]?[\d.,]+(e[-+]?\d+)?(%| \S+)?)?")  #: a number with its unit, or nothing


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Show rows of texts; columns of numbers, with or without a unit, are set to the right."""
    numeric = [column for column in range(len(head)) if all(_NUMBER.fullmatch(row[column]) for row in rows)]
    display(_table(head, rows, numeric, wrap=True).bundle(), raw=True)


def plot(figure: Figure, text: str) -> None:
    """Show a figure once, as a picture, with the text that stands for it where it cannot be seen."""
    from matplotlib import pyplot as plt

    display(figure, metadata={"image/png": {"alt": text}})
    plt.close(figure)


def machine() -> None:
    """Say what the times of this run were measured on, and how busy it was."""
    found = _machine()
    load = f"load average {found['load_average'][0]:.1f}"
    print(f"Measured on {found['processor']}, {found['cores']} cores, {load}, {found['date']}.")
