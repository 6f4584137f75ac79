"""Contrast of all that is shown, by WCAG 2.2: 4.5:1 for text, 3:1 for marks, on light and on dark pages."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import amem_jupyter.widgets
from amem.results import BlockMap, LayerBlocks, Match, PrefetchStatus, Residency
from amem.store import VerifyReport
from amem_jupyter.dashboard import board_picture
from amem_jupyter.markup import SPARKS
from amem_jupyter.render import live_card, reply_card, side_by_side, stopped_card
from amem_jupyter.tables import history_picture, map_picture, status_picture, tree_picture, verify_picture
from tests.jupyter.scripted import ScriptedEngine, blocks, metrics, reply
from tests.jupyter.test_render import turn

#: background and text of pages: JupyterLab's light and dark themes, VS Code's dark one
PAGES = {"light": ("#ffffff", "#212121"), "dark": ("#111111", "#ffffff"), "code": ("#1e1e1e", "#cccccc")}
MARKS = set("■▨□·●○╌░█▓" + SPARKS)  #: glyphs that are shapes
TEXT, MARK = 4.5, 3.0
VOID = {"br", "hr"}
WIDGETS = Path(amem_jupyter.widgets.__file__).parent


def channels(colour, under="#ffffff"):
    """Red, green and blue of a colour, from 0 to 255, laid over an opaque one."""
    if colour.startswith("#"):
        return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    *rgb, alpha = [float(value) for value in re.findall(r"[\d.]+", colour)]
    return [alpha * value + (1 - alpha) * below for value, below in zip(rgb, channels(under), strict=True)]


def luminance(rgb):
    """Relative luminance by WCAG."""
    linear = [v / 255 / 12.92 if v / 255 <= 0.04045 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """Contrast ratio of two opaque colours."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


class Seen(HTMLParser):
    """Every piece of text with its colour and opacity on a page, and every coloured edge."""

    def __init__(self, page, text):
        super().__init__()
        self.page = page
        self.styles = [{"color": text, "opacity": 1.0}]
        self.pieces = []
        self.edges = []

    def handle_starttag(self, tag, attrs):
        if tag in VOID:
            return
        own = dict(rule.split(":", 1) for rule in (dict(attrs).get("style") or "").split(";") if ":" in rule)
        now = dict(self.styles[-1])
        now["color"] = own.get("color", now["color"])
        now["opacity"] *= float(own.get("opacity", 1))
        background = own.get("background-color", own.get("background", "transparent"))
        if background != "transparent":
            assert own.get("color") == "transparent", "text on a background needs a contrast of its own"
            self.edges += [background] if background.startswith("#") else []  # else the part of a bar that is empty
        self.edges += [found for name, rule in own.items() if name.startswith("border") and name != "border-collapse"
                       for found in re.findall(r"#[0-9a-f]{6}", rule)]  # fmt: skip
        self.styles.append(now)

    def handle_endtag(self, tag):
        self.styles.pop()

    def handle_data(self, data):
        if data.strip():
            now = self.styles[-1]
            if now["color"] == "transparent":
                return
            rgb = channels(now["color"], self.page)
            below = channels(self.page)
            shown = [now["opacity"] * v + (1 - now["opacity"]) * b for v, b in zip(rgb, below, strict=True)]
            self.pieces.append((data.strip(), shown, now["color"]))


def pictures():
    """One of everything, in every state."""
    engine = ScriptedEngine()
    for name in ("planner", "critic", "new"):
        agent = engine.agent(name)
        if name != "new":
            list(agent.stream("Hello."))
    engine.agent("critic").evict()
    engine.agent("planner").pin()
    status = replace(engine.status(), warnings=("MLX came first.",), prefetch=PrefetchStatus(3, 2, 1))
    marks = tuple(
        block for place in Residency for block in blocks(580, new_from=300, shared_before=256, residency=place)
    )
    every = BlockMap("planner", "q4", 580, (LayerBlocks("layers 0-29", 30, marks),), ("some text",) * 9)
    cut = replace(
        reply("**A** plan.", blocks=marks, notes=("Left.",), saved=False, saved_ms=900.0), finish_reason="length"
    )
    turns = [turn(1, None, on=True), turn(2, 1, on=False), turn(3, 1, on=True)]
    cards = [reply_card(cut), reply_card(reply(match=Match.COLD), "code"), live_card("planner", None, "Go"),
             stopped_card("planner", "interrupted", "Half a")]  # fmt: skip
    return {
        **{f"card {number}": card for number, card in enumerate(cards)},
        "row": side_by_side(cards),
        "map": map_picture(every),
        "status": status_picture(status),
        "full": status_picture(replace(status, agents=())),
        "dashboard": board_picture(status, {"planner": [metrics(), metrics(ttft_ms=20.0)]}),
        "full dashboard": board_picture(replace(status, hot_bytes=status.memory_budget), {}),
        "tree": tree_picture("planner", turns),
        "history": history_picture("planner", turns),
        "damage": verify_picture(VerifyReport(1, 3, 1, 34_200, ["a block is damaged"], False, [])),
        "sound": verify_picture(VerifyReport(1, 3, 1, 34_200, [], False, [])),
    }


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("name", pictures())
def test_text_and_marks_stand_out(name, page):
    """Whatever is only a shape, or an edge, as a shape; everything else as text."""
    background, text = PAGES[page]
    seen = Seen(background, text)
    seen.feed(pictures()[name].html)
    seen.close()
    assert seen.pieces
    for piece, shown, colour in seen.pieces:
        least = MARK if set(piece) <= MARKS else TEXT
        assert contrast(shown, channels(background)) >= least, (piece, colour)
    for edge in seen.edges:
        assert contrast(channels(edge), channels(background)) >= MARK, edge


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("file", sorted(WIDGETS.glob("*.css")), ids=lambda path: path.stem)
def test_the_widgets_own_colours_stand_out(file, page):
    """Borders and focus rings as shapes; text has the page's colour, at no less than the opacity of faint text."""
    background, text = PAGES[page]
    css = file.read_text(encoding="utf-8")
    for colour in re.findall(r"(?:border|outline)[^;]*(#[0-9a-f]{6})", css):
        assert contrast(channels(colour), channels(background)) >= MARK, colour
    assert {value.strip() for value in re.findall(r"(?<![-\w])color:([^;]+);", css)} <= {"inherit"}
    for rule in re.findall(r"([^{}]+)\{([^{}]*)\}", css):
        for opacity in re.findall(r"(?<![-\w])opacity: ([\d.]+)", rule[1]):
            if ":disabled" in rule[0]:  # exempt by WCAG
                continue
            shown = [float(opacity) * v + (1 - float(opacity)) * b
                     for v, b in zip(channels(text), channels(background), strict=True)]  # fmt: skip
            assert contrast(shown, channels(background)) >= TEXT


def test_contrast_is_that_of_wcag():
    """Black on white is 21 to 1, and the grey that is known to be just enough is."""
    assert contrast(channels("#000000"), channels("#ffffff")) == pytest.approx(21)
    assert contrast(channels("#767676"), channels("#ffffff")) == pytest.approx(4.54, abs=0.01)
    assert channels("rgba(0,0,0,0.5)", "#ffffff") == [127.5] * 3
