"""Tab completion, as a table and in IPython's completer."""

from __future__ import annotations

import pytest

from amem_jupyter.completion import complete

NAMES = {"agent": ["planner", "plain", "critic"], "model": ["smollm2-135m"], "setting": ["max_tokens"]}

CASES = [
    ("%amem st", ["status"]),
    ("%amem re", ["release", "restore", "rewind"]),
    ("%amem map pl", ["plain", "planner"]),
    ("%amem evict planner pl", ["plain"]),
    ("%amem map planner ", []),
    ("%amem fork planner ", []),
    ("%amem fork planner x --", ["--at", "--keep-last", "--replace"]),
    ("%amem load sm", ["smollm2-135m"]),
    ("%amem load --co", ["--codec"]),
    ("%amem config m", ["max_tokens"]),
    ("%amem help fo", ["fork"]),
    ("%amem zzz p", []),
    ("%%agent pl", ["plain", "planner"]),
    ("%%agent planner --max", ["--max-tokens"]),
    ("%%agent planner --max-tokens ", []),
    ("%%agent planner --format ", ["code", "md", "text"]),
    ("%%agent --max-tokens 5 pl", ["plain", "planner"]),
    ("%%agent planner --raw --ra", []),
    ("%%agent planner --stop x --sto", ["--stop"]),
    ("%%agents planner c", ["critic"]),
    ("%agent c", ["critic"]),
    ("x = %agent c", ["critic"]),
    ("%amemx ", None),
    ("%agen", None),
    ("print(", None),
    ("", None),
]


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_what_a_line_can_become(line, expected):
    """None where the line is not ours."""
    assert complete(line, lambda kind: NAMES.get(kind, [])) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("%amem sta", "status"),
        ("%%agent pla", "planner"),
        ("%%agent planner --max-t", "--max-tokens"),
        ("%amem map pla", "planner"),
    ],
)
def test_the_completer_of_the_shell_completes_our_lines(notebook, source, expected):
    """What is offered, put in place of what it replaces, is the whole word; and nothing else is offered."""
    notebook.run("%agent planner Hi")
    completer = notebook.shell.Completer
    found = completer.completions(source, len(source))
    from IPython.core.completer import provisionalcompleter

    with provisionalcompleter():
        lines = {source[: one.start] + one.text + source[one.end :] for one in found}
    assert lines == {source.rsplit(" ", 1)[0] + " " + expected}


def test_completing_loads_no_engine(notebook, script):
    """A key press must not cost a model."""
    from IPython.core.completer import provisionalcompleter

    with provisionalcompleter():
        list(notebook.shell.Completer.completions("%%agent pl", 10))
    assert script.opened == []
