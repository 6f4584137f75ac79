"""Braces in a message, its last line end, and instructions from a file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError

from amem_jupyter.message import body_text, expand, quoted, system_text

NAMES = {"topic": "cats", "n": 3, "d": {"k": {"a": "deep"}}, "tricky": "{{topic}}", "items": ["x", "y"]}

EXPANDED = [
    ("about {{topic}}", "about cats"),
    ("{{ topic }}{{n}}", "cats3"),
    ("{{d['k']['a']}}", "deep"),
    ("{{ {'a': {'b': n}} }}!", "{'a': {'b': 3}}!"),
    ("{{', '.join(i.upper() for i in items)}}", "X, Y"),
    ("{{tricky}}", "{{topic}}"),
    ("{topic} {100} $topic", "{topic} {100} $topic"),
    ("{{}} stays", "{{}} stays"),
    ("{{ opens only", "{{ opens only"),
    ("closes only }}", "closes only }}"),
    ("{{\n topic }}", "{{\n topic }}"),
    ("{{ {{topic}}", None),
    ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
]


@pytest.mark.parametrize(("text", "expected"), EXPANDED)
def test_braces(text, expected):
    """Only {{expression}} on one line is replaced, and its value is not looked at again."""
    if expected is None:
        with pytest.raises(UsageError, match="not a Python expression"):
            expand(text, NAMES)
    else:
        assert expand(text, NAMES) == expected


REFUSED = [
    ("{{topik}}", "you have no variable or agent topik; did you mean topic?"),
    ("{{nothing_like_it}}", "you have no variable or agent nothing_like_it (--raw"),
    ("{{#each x}}", "is not a Python expression (--raw"),
    ("{{n / 0}}", "ZeroDivisionError: division by zero"),
    ("{{d['z']}}", "KeyError: 'z'"),
]


@pytest.mark.parametrize(("text", "says"), REFUSED)
def test_braces_that_have_no_value_are_refused(text, says):
    """In one line, with the way out."""
    with pytest.raises(UsageError) as refused:
        expand(text, NAMES)
    assert says in str(refused.value)


SAID = {
    "planner": "Step one.\n\nStep two.",
    "my-planner": "Mine.",
    "a b": "Spaced.",
    "filter": "Filtered.",
    "topic": "No.",
}

ANCHORED = [
    ("Judge: {{planner}}", "Judge: Step one.\n\nStep two."),
    ("{{ my-planner }} {{a b}}", "Mine. Spaced."),
    ("{{filter}}", "Filtered."),
    ("{{topic}}", "cats"),
    ("{{n - 1}}", "2"),
]


@pytest.mark.parametrize(("text", "expected"), ANCHORED)
def test_a_name_that_is_no_variable_can_be_an_agent(text, expected):
    """Its value is what that agent said last; a variable of yours goes first, a name of Python's own does not."""
    assert expected == expand(text, NAMES, SAID.get)


def test_agents_are_asked_for_only_where_a_name_is_left():
    """Neither variables nor expressions of them look at the engine."""
    asked = []
    expand("{{topic}} {{n + 1}} {{', '.join(items)}} {{None}} {{{'a': 1}['a']}}", NAMES, asked.append)
    assert [] == asked


def test_a_reply_is_quoted_line_by_line():
    """With the name of who said it."""
    assert "planner said:\n\n> Step one.\n>\n> Step two." == quoted("planner", SAID.get)
    with pytest.raises(UsageError, match="--from nobody: there is no agent"):
        quoted("nobody", SAID.get)


@given(st.text().filter(lambda text: "{{" not in text))
def test_a_text_without_double_braces_is_never_touched(text):
    """Whatever it holds."""
    assert expand(text, NAMES) == text


@given(st.text())
def test_a_value_comes_in_as_it_is(value):
    """Even if it looks like another expression."""
    assert expand("<{{v}}>", {"v": value}) == f"<{value}>"


def test_only_the_line_end_that_ipython_adds_is_taken_off():
    """Spaces and empty lines at a message's end may be meant."""
    assert body_text("a\nb\n") == "a\nb"
    assert body_text("a\r\nb\r\n") == "a\r\nb"
    assert body_text("  a  \n\n") == "  a  \n"


def test_the_names_of_the_person_are_left_alone():
    """Looking at an expression puts nothing into the namespace."""
    names = {"x": 1}
    expand("{{x}}", names)
    assert names == {"x": 1}


def test_instructions_are_a_text_or_a_file(tmp_path):
    """--system TEXT or @FILE."""
    path = tmp_path / "my plan.txt"
    path.write_text("You plan.\n", encoding="utf-8")
    assert system_text("You plan.") == "You plan."
    assert system_text(f"@{path}") == "You plan."
    with pytest.raises(UsageError, match="No such file"):
        system_text("@nowhere.txt")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file"):
        system_text(f"@{path}")
