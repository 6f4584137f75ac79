"""What notebooks show can be read by everyone, and on pages that take styles away."""

import os

import pytest
from matplotlib import pyplot as plt

from notebooks import show


@pytest.fixture
def shown(monkeypatch):
    """What was displayed: the object, and how."""
    found = []
    monkeypatch.setattr(show, "display", lambda what, **how: found.append((what, how)))
    return found


def test_numbers_are_set_to_the_right_and_texts_may_be_broken(shown):
    """A unit, or nothing, makes a number no text; a text that begins with a digit is one."""
    show.table(
        ["phase", "time", "ratio", "right"],
        [["1 reading (cold)", "1.5 ms", "2%", "1 of 2 [0%, 3%]"], ["2", "", "-3.5e-05", "0"]],
    )
    ((bundle, _),) = shown
    assert 6 == bundle["text/html"].count("text-align:right")
    assert 6 == bundle["text/html"].count("white-space:normal;text-align:left")
    assert bundle["text/plain"].splitlines()[0].startswith("phase")


def test_a_plot_is_shown_once_with_its_text(shown):
    """Where a picture cannot be seen, its text stands for it."""
    figure, _ = plt.subplots()
    show.plot(figure, "two lines that rise")
    assert [(figure, {"metadata": {"image/png": {"alt": "two lines that rise"}}})] == shown
    assert not plt.fignum_exists(figure.number)


def test_times_are_shown_with_the_machine_and_its_load(capsys):
    """They say little without."""
    show.machine()
    said = capsys.readouterr().out
    assert f"{os.cpu_count()} cores, load average" in said
