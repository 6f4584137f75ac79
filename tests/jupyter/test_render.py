"""Cards and tables as pure functions: the same state always gives the same picture."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem.results import EngineStatus, Event, Match, Residency, TurnInfo
from amem_jupyter.markup import block_strip, duration, markdown, shares, size
from amem_jupyter.render import live_card, reply_card, side_by_side, stopped_card
from amem_jupyter.tables import history_picture, map_picture, status_picture, tree_picture
from tests.jupyter.scripted import ScriptedEngine, blocks, reply

VOID = {"br", "hr"}
DROPPED = {"role", "aria-label", "aria-hidden"}  # by an untrusted notebook: nothing that is seen depends on them
ALLOWED = {
    "a", "b", "blockquote", "br", "code", "details", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol",
    "p", "pre", "span", "strong", "summary", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip


class Checker(HTMLParser):
    """Fails on a tag or an attribute that an untrusted notebook drops, and on one that is not closed."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        assert tag in ALLOWED
        assert {name for name, _ in attrs} - DROPPED <= {"style", "title", "href", "start", "class", "scope"}
        for name, value in attrs:
            if name == "style":
                assert "url(" not in value
                assert "var(" not in value  # JupyterLab's sanitizer drops it
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(picture):
    """The picture, whose HTML is what every notebook viewer keeps."""
    checker = Checker()
    checker.feed(picture.html)
    checker.close()
    assert checker.open == []
    return picture


def without_tags(html):
    """What is left where styles and tags are not shown."""
    return re.sub(r"<[^>]*>", "", html)


def test_the_text_of_a_card():
    """All that the card says, without any colour."""
    card = checked(reply_card(reply("A plan.", blocks=blocks(580, new_from=540, shared_before=256))))
    assert card.text == (
        "planner · scripted-1m q4 · EXTEND · was warm\n"
        "A plan.\n"
        "\n"
        "TTFT 180 ms [░░█████████████████████████████▓▓▓▓▓]\n"
        "     · queue 0.2 ms  ╌ match 0.8 ms  ░ restore 12 ms  █ prefill 140 ms  ▓ first decode 27 ms\n"
        "512 tokens reused, 28 computed · 40 generated at 111.4 tokens/s\n"
        "■ˢ ■ ■ᵗ⁺   (■ in memory  ˢ shared  ⁺ new  ᵗ partly filled)\n"
        "1.2 MB in memory · 3.4 MB on disk · 34.2 kB written"
    )


def test_the_html_says_all_that_the_text_says():
    """On GitHub, which strips styles, nothing is lost."""
    found = reply("A plan.")
    bare = without_tags(reply_card(found).html)
    for words in (
        "planner", "scripted-1m q4", "EXTEND", "was warm", "A plan.", "TTFT 180 ms", "queue 0.2 ms", "restore 12 ms",
        "prefill 140 ms", "first decode 27 ms", "512 tokens reused, 28 computed", "40 generated at 111.4 tokens/s",
        "■ in memory", "1.2 MB in memory", "3.4 MB on disk", "░░████",
    ):  # fmt: skip
        assert words in bare


def test_what_a_person_should_know_is_on_the_card():
    """A cut, a turn that was not saved, and the engine's notes."""
    found = replace(reply(saved=False, notes=("Turns 3, 4 were left.",)), finish_reason="length")
    for form in (reply_card(found).html, reply_card(found).text):
        assert "cut at 40 tokens" in form
        assert "not saved to disk" in form
        assert "Turns 3, 4 were left." in form


def test_a_recorded_reply_that_was_cut_names_no_count():
    """It generated nothing now; what it stopped at then is not known here."""
    found = replace(reply(generated_tokens=0), finish_reason="length")
    for form in (reply_card(found).html, reply_card(found).text):
        assert "the recorded reply was cut (--max-tokens)" in form
        assert "cut at" not in form
    whole = reply(generated_tokens=0)
    assert "was cut" not in reply_card(whole).text


HOSTILE = "<script>alert(1)</script> <img src=x onerror=y> ![p](http://x/p.png) [l](javascript:z) **b** <b>raw</b>"


@pytest.mark.parametrize("how", ["md", "text", "code"])
def test_a_reply_cannot_bring_its_own_html(how):
    """Tags are shown, not obeyed; no image is fetched; no script runs."""
    for card in (
        reply_card(reply(HOSTILE, agent="<i>x</i>"), how),
        live_card("<i>x</i>", None, HOSTILE, how),
        stopped_card("<i>x</i>", "<i>why</i>", HOSTILE, how),
    ):
        checked(card)
        assert 'href="javascript' not in card.html
        assert "<i>" not in card.html


@given(st.text(), st.sampled_from(["md", "text", "code"]))
def test_any_reply_gives_a_whole_card(text, how):
    """Whatever a model writes, the card's elements close."""
    checked(reply_card(reply(text), how))


def test_formats():
    """Markdown is rendered, text and code keep their lines and marks."""
    assert "<strong>a</strong>" in reply_card(reply("**a**"), "md").html
    assert "**a**\n b" in reply_card(reply("**a**\n b"), "text").html
    assert "<pre" in reply_card(reply("x = 1"), "code").html


def test_a_table_and_a_list_are_rendered():
    """What small models like to write."""
    assert "<table>" in markdown("|a|b|\n|-|-|\n|1|2|")
    assert "<li>" in markdown("1. a\n2. b")


def test_a_live_card_says_what_goes_on():
    """Before the first token, and while it writes."""
    assert (
        "reading the prompt, 128 of 540 tokens" in live_card("p", Event(stage="prefill", done=128, total=540), "").text
    )
    assert "restoring from disk" in live_card("p", Event(stage="restore"), "").html
    assert "waiting" in live_card("p", Event(stage="queued"), "").html
    assert "writing" in checked(live_card("p", Event(text="b"), "ab")).text


def test_cards_side_by_side():
    """Each whole, in a row."""
    both = checked(side_by_side([reply_card(reply("A")), reply_card(reply("B", agent="critic"))]))
    assert both.html.count("<td") >= 2
    assert "planner" in both.text
    assert "critic" in both.text


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.integers(12, 60))
def test_a_bar_is_always_full(values, width):
    """Cells are dealt out without rest, and nothing that counts is lost."""
    cells = shares(values, width)
    total = sum(values)
    if total <= 0:
        assert cells == [0] * len(values)
        return
    assert sum(cells) == width
    assert all(cell >= 0 for cell in cells)
    assert all(cell > 0 for cell, value in zip(cells, values, strict=True) if value > total / 200)


def test_a_mark_tells_all_of_its_block():
    """Where it is, what is in it, whose it is."""
    marks = [
        *blocks(256, shared_before=256),
        *blocks(256, residency=Residency.WARM),
        *blocks(100, new_from=0, residency=Residency.COLD),
    ]
    marks[-1] = replace(marks[-1], kind="open")
    strip = block_strip(marks)
    assert strip.text == "■ˢ ▨ □ᵒ⁺"
    assert 'title="block 0 · tokens 0-255 · sealed · in memory · shared · 25.6 kB"' in strip.html


NUMBERS = [(0.04, "0.0 ms"), (9.5, "9.5 ms"), (9.99, "10 ms"), (182.4, "182 ms"), (1512, "1.51 s"), (75_000, "75.0 s")]


@pytest.mark.parametrize(("ms", "text"), NUMBERS)
def test_durations(ms, text):
    """Three digits are enough for a person."""
    assert duration(ms) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (34_200, "34.2 kB"), (999_600, "1 MB"), (4 * 10**9, "4 GB")],
)
def test_sizes(nbytes, text):
    """In powers of ten."""
    assert size(nbytes) == text


def status(**changes) -> EngineStatus:
    engine = ScriptedEngine()
    for name in ("planner", "critic"):
        list(engine.agent(name).stream("Hello."))
    engine.agent("critic").evict()
    engine.agent("planner").pin()
    return replace(engine.status(), **changes)


def test_status_names_engine_memory_disk_and_agents():
    """The table, and the library that is in use."""
    picture = checked(status_picture(status(warnings=("MLX came first.",), codec_choice="auto chose q4 (KL 0.002)")))
    for form in (picture.text, without_tags(picture.html)):
        for words in (
            "scripted-1m",
            "q4",
            "BLAS OpenBLAS 0.3.30",
            "of 4 GB",
            "of 10 GB",
            "▨ warm",
            "pinned",
            "MLX came first.",
            "auto chose q4 (KL 0.002)",
        ):
            assert words in form
    assert re.search(r"^planner +■ hot +200 +1 +20 kB +20 kB +180 ms +pinned$", picture.text, re.MULTILINE)


def test_status_without_agents_says_how_one_is_made():
    """An empty table would tell nothing."""
    assert "%%agent NAME" in checked(status_picture(status(agents=()))).text


def test_a_map_shows_the_blocks_and_what_is_in_them():
    """One strip per group of layers, and the text of each block."""
    engine = ScriptedEngine()
    agent = engine.agent("planner")
    for _ in range(3):
        list(agent.stream("Hello."))
    picture = checked(map_picture(agent.block_map()))
    assert picture.text.startswith("planner · 600 tokens · q4 · 60 kB\nlayers 0-29, full attention, q4\n  ■ ■ ■ᵗ")
    assert "text of stretch 2" in picture.text
    assert "<details>" in picture.html


def test_a_map_of_an_agent_without_turns():
    """Is no error."""
    assert "no blocks yet" in checked(map_picture(ScriptedEngine().agent("new").block_map())).text


def turn(number, parent, *, on, prompt="hi"):
    return TurnInfo(number, parent, prompt, "there", "stop", 0.0, None, on, number * 10)


def test_a_tree_keeps_the_head_path_straight():
    """Branches step to the right, and name the turn they left from."""
    turns = [
        turn(1, None, on=True),
        turn(2, 1, on=False),
        turn(3, 2, on=False),
        turn(4, 1, on=True),
        turn(5, 4, on=True),
    ]
    assert checked(tree_picture("planner", turns)).text.splitlines() == [
        "planner",
        "● 1  hi",
        "● 4  hi",
        "● 5  hi  ← here",
        "   ○ 2  hi  (after 1)",
        "   ○ 3  hi",
    ]


def test_a_card_says_what_reuse_saved():
    """In a few words, where it was measured and is something."""
    for saved_ms, words in ((4210.0, "512 tokens reused, 28 computed · 4.21 s saved ·"), (None, "28 computed · 40"),
                            (0.2, "28 computed · 40"), (-3.0, "28 computed · 40")):  # fmt: skip
        card = checked(reply_card(reply(saved_ms=saved_ms, recompute_ms=4222.5)))
        for form in (card.text, without_tags(card.html)):
            assert words in form


def test_a_tree_may_have_several_beginnings():
    """A first cell that was edited and run again."""
    turns = [turn(1, None, on=False), turn(2, 1, on=False), turn(3, None, on=True)]
    assert tree_picture("planner", turns).text.splitlines() == [
        "planner",
        "● 3  hi  ← here",
        "   ○ 1  hi  (from the start)",
        "   ○ 2  hi",
    ]


def test_a_long_tree_needs_no_deep_stack():
    """A thousand turns in a row are drawn."""
    turns = [turn(1, None, on=True), *(turn(n, n - 1, on=True) for n in range(2, 3000))]
    assert len(tree_picture("planner", turns).text.splitlines()) == 3000


def test_history_shows_prompts_and_replies():
    """As text, whatever is in it."""
    picture = checked(history_picture("planner", [turn(1, None, on=True, prompt="<b>x</b>")]))
    assert "you: <b>x</b>" in picture.text
    assert "&lt;b&gt;x" in picture.html
    assert "no turns" in history_picture("planner", []).text


def test_a_cold_start_says_so():
    """The word of the match is on the card."""
    assert "COLD" in reply_card(reply(match=Match.COLD, residency=Residency.EMPTY)).text


@pytest.mark.parametrize("text", ["Hi\n\n\n", "\n\n\n", "a", "", "\nplanner\n"])
def test_a_terminal_writes_any_reply_once(text, capsys):
    """Newlines at its ends, no text, or text that is in the title too: title and footer are whole."""
    from amem_jupyter.live import TerminalView

    TerminalView("planner").finish(reply(text))
    out = capsys.readouterr().out
    assert 1 == out.count("TTFT")
    assert "planner ·" in out
