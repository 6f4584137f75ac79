"""Cells whose magic is not quite where IPython looks for it."""

from __future__ import annotations

import pytest

from amem_jupyter.firstline import lift_magic

CASES = [
    ("%%agent planner\nHi\n", "%%agent planner\nHi\n"),
    ("%%agent\tplanner\nHi\n", "%%agent planner\nHi\n"),
    ("# ask\n\n%%agent planner\n# Hi\n", "%%agent planner\n# Hi\n"),
    ("#%% ask\n  # twice\n%%agents a b\nHi", "%%agents a b\nHi"),
    ("# ask\nx = 1\n%%agent planner\n", None),
    ("# ask\n%%time\nx\n", None),
    ("%%agent\nHi\n", None),
    ("# only a comment\n", None),
    ("%%agenta planner\nHi\n", None),
    ("", None),
]


@pytest.mark.parametrize(("cell", "expected"), CASES)
def test_what_a_cell_becomes(cell, expected):
    """Other cells come back as they are; doing it twice changes nothing more."""
    lines = cell.splitlines(keepends=True)
    assert "".join(lift_magic(lines)) == (cell if expected is None else expected)
    assert lift_magic(lift_magic(lines)) == lift_magic(lines)


def test_a_comment_above_the_magic_is_no_error(notebook, script):
    """And is not sent."""
    assert notebook.run("# ask the planner\n%%agent planner\nHi").success
    assert script.asked[0]["message"] == "Hi"
