"""The grammar, as tables of lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError

from amem_jupyter.commands import BY_NAME, CELL_AGENT, CELL_AGENTS, LINE_AGENT
from amem_jupyter.parse import next_word, parse, parse_amem

GOOD = [
    ("planner", {"NAME": "planner"}),
    ("  planner  ", {"NAME": "planner"}),
    ("planner\t", {"NAME": "planner"}),
    ("planner;", {"NAME": "planner"}),
    ("planner ;", {"NAME": "planner"}),
    ("planner # the first one's cell", {"NAME": "planner"}),
    ('"my planner"', {"NAME": "my planner"}),
    ("'my \"planner\"'", {"NAME": 'my "planner"'}),
    ('"my \\"planner\\""', {"NAME": 'my "planner"'}),
    ("plännér", {"NAME": "plännér"}),
    ("{100}", {"NAME": "{100}"}),
    ("$HOME", {"NAME": "$HOME"}),
    ("planner --max-tokens 5", {"NAME": "planner", "max_tokens": 5}),
    ("planner --max-tokens=5", {"NAME": "planner", "max_tokens": 5}),
    ("--max-tokens 5 planner", {"NAME": "planner", "max_tokens": 5}),
    ("planner --temperature 0.7 --top-p 0.9", {"NAME": "planner", "temperature": 0.7, "top_p": 0.9}),
    ("planner --temperature 0", {"NAME": "planner", "temperature": 0.0}),
    ("planner --seed -1", {"NAME": "planner", "seed": -1}),
    ("planner --seed random", {"NAME": "planner", "seed": "random"}),
    ("planner --stop END --stop '\\n'", {"NAME": "planner", "stop": ("END", "\n")}),
    ("planner --stop=--", {"NAME": "planner", "stop": ("--",)}),
    ('planner --stop ";"', {"NAME": "planner", "stop": (";",)}),
    ("planner --stop '--raw'", {"NAME": "planner", "stop": ("--raw",)}),
    ("planner --system \"You are 'terse'.\"", {"NAME": "planner", "system": "You are 'terse'."}),
    ('planner --system ""', {"NAME": "planner", "system": ""}),
    (r"planner --system @C:\texts\plan.txt", {"NAME": "planner", "system": r"@C:\texts\plan.txt"}),
    (r'planner --system "@C:\my texts\plan.txt"', {"NAME": "planner", "system": r"@C:\my texts\plan.txt"}),
    ("planner --into answer --raw --append", {"NAME": "planner", "into": "answer", "raw": True, "append": True}),
    ("planner --format code --dry-run", {"NAME": "planner", "format": "code", "dry_run": True}),
]


@pytest.mark.parametrize(("line", "values"), GOOD)
def test_first_lines_that_are_understood(line, values):
    """What a first line of %%agent gives."""
    assert dict(parse(CELL_AGENT, line).values) == values


BAD = [
    ("", "no NAME"),
    ("--raw", "no NAME"),
    ('""', "an empty name"),
    ("planner critic", "'critic' is one word too many for %%agent; the message goes into the lines below"),
    ("planner What's", "no closing ' for the one before 's'"),
    ('planner --system "never ends', "no closing \" for the one before 'never ends'"),
    ("planner --max-token 5", "has no option --max-token; did you mean --max-tokens?"),
    ("planner --max 5", "has no option --max"),
    ("planner --temprature 1", "did you mean --temperature?"),
    ("planner —max-tokens 5", "did you mean --max-tokens?"),
    ("planner -max-tokens 5", "did you mean --max-tokens?"),
    ("planner --zzz", "it has --max-tokens, --temperature"),
    ("planner --max-tokens", "--max-tokens needs a value: --max-tokens N"),
    ("planner --into --raw", "--into needs a value: --into VAR"),
    ("planner --raw=yes", "--raw takes no value"),
    ("planner --raw --raw", "--raw was given twice"),
    ("planner --max-tokens 5 --max-tokens 6", "--max-tokens was given twice"),
    ("planner --max-tokens 0", "--max-tokens must be a whole number of at least 1, not '0'"),
    ("planner --max-tokens -3", "must be a whole number of at least 1, not '-3'"),
    ("planner --max-tokens 5.5", "must be a whole number"),
    ("planner --max-tokens five", "must be a whole number"),
    ("planner --temperature -1", "--temperature must be a number from 0, not '-1'"),
    ("planner --temperature nan", "must be a number"),
    ("planner --temperature inf", "must be a number"),
    ("planner --top-p 0", "--top-p must be a number above 0 up to 1, not '0'"),
    ("planner --top-p 1.1", "must be a number above 0 up to 1"),
    ("planner --seed soon", 'must be a whole number or "random"'),
    ("planner --stop ''", "--stop must be a text of at least one character"),
    ("planner --into 2x", "--into must be the name of a Python variable, not '2x'"),
    ("planner --into class", "the name of a Python variable"),
    ("planner --append --cached", "%%agent takes --append or --cached, not both"),
    ("planner --cached --append", "%%agent takes --append or --cached, not both"),
    ("planner --format markdwn", "--format must be one of md, text, code"),
    ("planner --format tex", "did you mean text?"),
]


@pytest.mark.parametrize(("line", "says"), BAD)
def test_first_lines_that_are_refused(line, says):
    """What is wrong is said in one line."""
    with pytest.raises(UsageError) as refused:
        parse(CELL_AGENT, line)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


LINES = [
    ("planner Hello there", {}, "Hello there"),
    ("planner   Hello   there  ", {}, "Hello   there"),
    ('planner Don\'t stop; "this" is $5 # really', {}, 'Don\'t stop; "this" is $5 # really'),
    ("planner --max-tokens 5 Hello", {"max_tokens": 5}, "Hello"),
    ("--max-tokens 5 planner Hello", {"max_tokens": 5}, "Hello"),
    ("planner -- --raw is an option", {}, "--raw is an option"),
    ("planner - one\t- two", {}, "- one\t- two"),
    ("planner --- a rule", {}, "--- a rule"),
    ("planner {100} {{x}}", {}, "{100} {{x}}"),
    ("planner", {}, ""),
]


@pytest.mark.parametrize(("line", "values", "rest"), LINES)
def test_the_rest_of_a_line_is_the_text_as_it_stands(line, values, rest):
    """%agent NAME TEXT: no quote, backslash or semicolon of the text means anything to us."""
    found = parse(LINE_AGENT, line)
    assert dict(found.values) == {"NAME": "planner", **values}
    assert found.rest == rest


def test_an_option_after_the_text_is_refused():
    """It would go to the agent as words, which nobody wants."""
    with pytest.raises(UsageError, match="--max-tokens goes before the text"):
        parse(LINE_AGENT, "planner Hello --max-tokens 5")


@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1))
def test_any_text_without_spaces_reaches_the_agent_whole(text):
    """Whatever the marks in it: only a leading dash needs the --."""
    assert parse(LINE_AGENT, f"planner -- {text}").rest == text


@given(st.text(st.characters(exclude_characters='"\\', exclude_categories=["C"]), min_size=1))
def test_a_quoted_word_comes_back_whole(text):
    """Quotes group, and nothing in them is changed."""
    word = next_word(f'"{text}"', 0)
    assert word is not None
    assert word.text == text


def test_several_agents_are_named_once_each():
    """The same name twice is one agent."""
    assert parse(CELL_AGENTS, "a b a c").get("NAME") == ("a", "b", "c")
    with pytest.raises(UsageError, match="no NAME"):
        parse(CELL_AGENTS, "--raw")


AMEM = [
    ("", "status", {}),
    ("status", "status", {}),
    ("status;", "status", {}),
    ("status # now", "status", {}),
    ("load", "load", {}),
    ("load org/model-4bit --codec q8", "load", {"MODEL": "org/model-4bit", "codec": "q8"}),
    (r"load C:\models\x --memory 2GB", "load", {"MODEL": r"C:\models\x", "memory": "2GB"}),
    ("fork planner variant --at 3", "fork", {"NAME": "planner", "NEW": "variant", "at": 3}),
    ("rewind planner", "rewind", {"NAME": "planner"}),
    ("rewind planner 2", "rewind", {"NAME": "planner", "TURNS": 2}),
    ("checkout planner 7", "checkout", {"NAME": "planner", "TURN": 7}),
    ("checkout planner 'before that'", "checkout", {"NAME": "planner", "TURN": "before that"}),
    ("rewind planner --to start", "rewind", {"NAME": "planner", "to": "start"}),
    ("fork planner variant --keep-last 2", "fork", {"NAME": "planner", "NEW": "variant", "keep_last": 2}),
    ("snapshot planner start --at 3", "snapshot", {"NAME": "planner", "SNAPSHOT": "start", "at": 3}),
    ("evict planner critic", "evict", {"NAME": ("planner", "critic")}),
    ("delete planner --yes", "delete", {"NAME": "planner", "yes": True}),
    ("config max_tokens 64", "config", {"OPTION": "max_tokens", "VALUE": "64"}),
]


@pytest.mark.parametrize(("line", "name", "values"), AMEM)
def test_lines_of_amem_that_are_understood(line, name, values):
    """What a line of %amem gives."""
    found = parse_amem(line)
    assert found.command is BY_NAME[name]
    assert dict(found.values) == values


AMEM_BAD = [
    ("forkk planner x", "%amem has no command 'forkk'; did you mean fork?"),
    ("frobnicate", "%amem help lists them"),
    ("fork planner", "no NEW. Usage: %amem fork NAME NEW [--at TURN]"),
    ("map", "no NAME. Usage: %amem map NAME"),
    ("map a b", "'b' is one word too many for %amem map"),
    ("fork planner variant --keep-last 0", "--keep-last must be a whole number of at least 1"),
    ("checkout planner", "no TURN. Usage: %amem checkout NAME TURN"),
    ("rewind planner 0", "TURNS must be a whole number of at least 1"),
    ("load x --codek q4", "did you mean --codec?"),
    ("status --liv", "%amem status has no option --liv"),
    ("rewind planner 1 --to start", "%amem rewind takes --to or TURNS, not both"),
    ("snapshot planner start --forget --at 3", "%amem snapshot takes --forget or --at, not both"),
    ("serve --stop --port 8001", "%amem serve takes --stop or --port, not both"),
    ("serve --stop --api-key k", "%amem serve takes --stop or --api-key, not both"),
]


@pytest.mark.parametrize(("line", "says"), AMEM_BAD)
def test_lines_of_amem_that_are_refused(line, says):
    """With the nearest name where there is one."""
    with pytest.raises(UsageError) as refused:
        parse_amem(line)
    assert says in str(refused.value)
