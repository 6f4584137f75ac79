"""A reply's thought, text and calls, wherever the pieces' boundaries are."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem.model.said import Call, ReplyMarks, Said
from amem.results import Event, Reply
from amem.serve.parts import parts_of

CALL = "<tool_call>"


def marks(**changes):
    return ReplyMarks(
        **{"think_start": "<think>", "think_end": "</think>", "opens_thought": False, "call_start": CALL,
           "takes_tools": True, **changes}
    )  # fmt: skip


def said(text):
    """Parts of a reply in which a call is written ``<tool_call>name;``."""
    before, found, after = text.partition(CALL)
    calls = tuple(Call(name.removeprefix(CALL), {}) for name in (found + after).split(";") if name.startswith(CALL))
    if not calls or not (found + after).rstrip().endswith(";"):
        return Said(text, text, "", text, ())
    return Said(text, text, "", before.rpartition("</think>")[2].strip(), calls)


def read(text, cuts, *, with_tools=True, **changes):
    """Thought, text and calls of a reply that comes in pieces."""
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]

    async def events():
        for piece in pieces:
            yield Event(text=piece)
        yield Event(reply=Reply(text, (), "stop", None, 1))

    async def run():
        return [part async for part in parts_of(events(), marks(**changes), said, with_tools=with_tools)]

    parts = asyncio.run(run())
    assert parts[-1].reply is not None
    assert not any(part.reply for part in parts[:-1])
    return (
        "".join(part.thought for part in parts),
        "".join(part.text for part in parts),
        [part.call.name for part in parts if part.call is not None],
    )


CUTS = st.lists(st.integers(0, 200), max_size=8)


@pytest.mark.parametrize(
    ("text", "changes", "wanted"),
    [
        ("Hello.", {}, ("", "Hello.", [])),
        (" \n Hello. ", {}, ("", " \n Hello. ", [])),
        ("<thin ice", {}, ("", "<thin ice", [])),
        ("<th", {}, ("", "<th", [])),
        ("", {}, ("", "", [])),
        ("\n<think>\nWhy?</think>\n\nSo.", {}, ("\nWhy?", "So.", [])),
        ("Why?</think>\n\nSo.", {"opens_thought": True}, ("Why?", "So.", [])),
        ("Why</thin ", {"opens_thought": True}, ("Why</thin ", "", [])),
        ("a <think> in the middle", {}, ("", "a <think> in the middle", [])),
        ("<tool_call>weather;", {}, ("", "", ["weather"])),
        ("Let me see.\n<tool_call>weather;<tool_call>tides;", {}, ("", "Let me see.\n", ["weather", "tides"])),
        ("<think>Hm.</think><tool_call>weather;", {}, ("Hm.", "", ["weather"])),
        ("<tool_call>not to be read", {}, ("", "<tool_call>not to be read", [])),
        ("<tool_call>weather;", {"with_tools": False}, ("", "<tool_call>weather;", [])),
        ("<tool_call>weather;", {"call_start": None}, ("", "<tool_call>weather;", [])),
        ("1 < 2 <tool", {}, ("", "1 < 2 <tool", [])),
    ],
)
@given(cuts=CUTS)
def test_the_parts_do_not_depend_on_the_pieces(text, changes, wanted, cuts):
    """However the reply is cut."""
    assert wanted == read(text, cuts, **changes)


@given(text=st.text(alphabet="<think>/tool_call; a", max_size=40), cuts=CUTS, opens=st.booleans())
def test_any_reply_gives_the_same_parts_whole_and_in_pieces(text, cuts, opens):
    """Nothing is lost, and nothing is shown twice."""
    whole = read(text, [], opens_thought=opens)
    assert whole == read(text, cuts, opens_thought=opens)
    if not any(mark in text for mark in ("<think>", "</think>", CALL)) and not opens:
        assert ("", text, []) == whole
