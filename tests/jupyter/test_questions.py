"""A message may end in a question mark; IPython's help syntax stays what it is elsewhere."""

from __future__ import annotations

import pytest

import amem_jupyter

QUESTIONS = [
    ("%agent variant Other idea?", "Other idea?"),
    ("%agent variant Other idea??", "Other idea??"),
    ("  %agent variant Other idea?", "Other idea?"),
    ("x = 1\n%agent variant Other idea?", "Other idea?"),
    ("if True:\n    %agent variant Other idea?", "Other idea?"),
    ("%agent variant Isn't it?", "Isn't it?"),
    ("%agent --max-tokens 5 variant Other idea?", "Other idea?"),
    ("%agent variant Other\\\nidea?", "Other idea?"),
    ("answer = %agent variant Other idea?", "Other idea?"),
    ("if True:\n    answer = %agent variant Other idea?", "Other idea?"),
    ("%agent variant No question", "No question"),
]


@pytest.mark.parametrize(("cell", "message"), QUESTIONS)
def test_a_question_is_sent_as_it_stands(notebook, script, cell, message):
    """Once, and nothing is looked up."""
    assert notebook.run(cell).success
    assert [asked["message"] for asked in script.asked] == [message]


def test_every_question_of_a_cell_is_sent(notebook, script):
    """In their order."""
    notebook.run("%agent planner Which one?\n%agent critic Why that?")
    assert [(asked["agent"], asked["message"]) for asked in script.asked] == [
        ("planner", "Which one?"),
        ("critic", "Why that?"),
    ]


@pytest.mark.parametrize(
    "cell", ["%agent?", "%agent??", "?%agent", "%agent variant?", "len?", "%time?", "%agents a b?"]
)
def test_help_stays_help(shell, cell):
    """Without a message, or for anything else, a cell becomes what it becomes without us."""
    before = shell.transform_cell(cell)
    amem_jupyter.load_ipython_extension(shell)
    assert shell.transform_cell(cell) == before
    assert "pinfo" in before
    amem_jupyter.unload_ipython_extension(shell)


def test_a_text_that_looks_like_it_is_left_alone(notebook, script):
    """Inside a string, nothing is a magic."""
    cell = 'text = """\n%agent variant Other idea?\n"""\n'
    assert notebook.shell.transform_cell(cell) == cell
    assert script.asked == []


def test_unloaded_the_line_is_ipythons_again(shell):
    """Nothing of ours stays."""
    line = "%agent variant Other idea?"
    before = shell.transform_cell(line)
    amem_jupyter.load_ipython_extension(shell)
    assert shell.transform_cell(line) != before
    amem_jupyter.unload_ipython_extension(shell)
    assert shell.transform_cell(line) == before
