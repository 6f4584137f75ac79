"""The notebook layer in JupyterLab, with chromium: what a person sees, saves and opens again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.jupyter.lab import CHROMIUM, Lab, browser, server, write_notebook
from tests.jupyter.test_contrast import PAGES, TEXT, channels, contrast

pytest.importorskip("playwright.sync_api", reason="needs playwright (the test extra brings it)")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="found no chromium: apt-get install chromium, as .ci/run does"),
]

VIEW = "application/vnd.jupyter.widget-view+json"
SETUP = "from tests.jupyter import scripted\nscripted.install()\nscript = scripted.script"
LONG = "script.enqueue(*['word '] * 400, delay_s=0.03)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def lab_address(folder):
    with server(folder) as address:
        yield address


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@pytest.fixture
def open_notebook(folder, lab_address, chromium, request):
    """Opens a notebook of these cells."""
    opened = []

    def open_one(*sources, **page):
        path = write_notebook(folder / f"{request.node.name}-{len(opened)}.ipynb", *sources)
        opened.append(Lab(chromium, lab_address, path, **page))
        return opened[-1]

    yield open_one
    for lab in opened:
        lab.page.close()


def views(notebook):
    """The outputs of a saved notebook that are widget views."""
    return [output for cell in notebook.cells for output in cell.get("outputs", []) if VIEW in output.get("data", {})]


def printed(notebook, cell):
    """What a cell of a saved notebook printed."""
    return "".join(output.text for output in notebook.cells[cell].outputs if output.output_type == "stream")


def metrics(notebook, cell):
    """The metrics of the reply in a cell of a saved notebook."""
    (found,) = [output.metadata["amem"] for output in notebook.cells[cell].outputs if "amem" in output.metadata]
    return found


def test_run_all_save_restart_and_open_again(open_notebook):
    """A map is alive and follows what happens; what is saved reads well without the kernel that made it."""
    lab = open_notebook(
        SETUP, "%load_ext amem_jupyter", "%%agent planner\nHello", "%amem map planner",
        "script.enqueue(*['word '] * 60, delay_s=0.1)", "%%agent planner\nGo on", "%amem status",
    )  # fmt: skip
    lab.watch(".amem-map")
    lab.command("notebook:run-all-cells")
    lab.wait_text("writing", cell=3)
    lab.wait_text("word word", cell=5)
    lab.wait_text("last TTFT")
    lab.wait_idle()
    lab.wait_text("400 tokens", cell=3)
    drawn = [int(found[1]) for text in lab.watched() if (found := re.search(r"(\d+) tokens", text))]
    assert any(200 < n_tokens < 400 for n_tokens in drawn)  # its blocks were drawn anew while the reply came in
    assert lab.cell(3).locator(".amem-map").is_visible()
    saved = lab.save()
    assert views(saved) == []
    assert "400 tokens" in saved.cells[3].outputs[-1].data["text/html"]
    assert saved.cells[5].outputs[-1].metadata["amem"]["agent"] == "planner"
    lab.restart()
    lab.page.wait_for_selector(".amem-map", state="detached")
    assert "400 tokens" in lab.cell(3).inner_text()
    lab.save()
    lab.open()
    lab.wait_text("TTFT 180 ms")
    lab.wait_text("400 tokens", cell=3)  # a page shows its cells one after the other
    assert "model not found" not in lab.text()


def test_an_interrupt_in_mid_stream_stops_the_cells_after_it(open_notebook):
    """As the stop button does."""
    lab = open_notebook(SETUP, "%load_ext amem_jupyter", LONG, "%%agent planner\nGo on", "print('ran' + ' anyway')")
    lab.command("notebook:run-all-cells")
    lab.wait_text("word word", cell=3)
    lab.command("notebook:interrupt-kernel")
    lab.wait_text("interrupted; planner is as it was before", cell=3)
    lab.wait_idle()
    assert "ran anyway" not in lab.text()


def test_an_untrusted_notebook_shows_its_cards(open_notebook, folder, lab_address, chromium):
    """Styles and all, since they are inline."""
    lab = open_notebook(SETUP, "%load_ext amem_jupyter", "%%agent planner\nHello", "%amem map planner")
    lab.run_all()
    lab.save()
    # Another id makes it a notebook that was never signed.
    copy = folder / "untrusted.ipynb"
    copy.write_text(lab.path.read_text(encoding="utf-8").replace("You said", "You wrote"), encoding="utf-8")
    other = Lab(chromium, lab_address, copy)
    try:
        other.wait_text("You wrote: Hello")
        card = other.page.locator(".jp-OutputArea-output div[style*='border-left']").first
        assert card.evaluate("e => getComputedStyle(e).borderLeftWidth") == "3px"
        other.wait_text("layers 0-29")
    finally:
        other.page.close()


def test_cards_read_well_in_the_light_and_in_the_dark(open_notebook):
    """In JupyterLab's own themes, whose colours the computed contrasts take for granted."""
    lab = open_notebook(
        f"{SETUP}\n%load_ext amem_jupyter", "%%agent planner\nHello", "%amem status", "print('all ran')"
    )
    lab.run_all()
    lab.wait_text("last TTFT", cell=2)
    for theme, page in (("JupyterLab Dark", "dark"), ("JupyterLab Light", "light")):
        lab.theme(theme)
        background, text = lab.colours(lab.cell(1).get_by_text("You said: Hello"))
        assert contrast(text, background) >= TEXT
        assert [[round(value) for value in channels(colour)] for colour in PAGES[page]] == [background, text]


def test_a_dashboard_and_a_tree_are_clicked_and_saved_as_pictures(open_notebook):
    """They live between cells, and follow others; the document never holds their views, alive or after a restart."""
    lab = open_notebook(
        SETUP, "%load_ext amem_jupyter", "%%agent planner\nHello", "%%agent planner\nGo on", "%amem status --live",
        "%amem tree planner", "%%agent critic\nHm",
    )  # fmt: skip
    lab.run_all()
    lab.wait_text("critic", cell=4)
    board, tree = lab.cell(4).locator(".amem-board"), lab.cell(5).locator(".amem-tree")
    board.get_by_title("evict planner").click()
    lab.wait_text("planner is on disk only", cell=4)
    lab.wait_text("▨ warm", cell=4)
    board.get_by_title("restore planner").click()
    lab.wait_text("planner is in memory", cell=4)
    tree.get_by_text("Hello").click()
    lab.wait_text("planner stands at turn", cell=5)
    assert "Hello  ← here" in tree.inner_text().replace("\N{NO-BREAK SPACE}", " ")
    saved = lab.save()
    assert board.is_visible()
    assert views(saved) == []
    assert "planner" in saved.cells[4].outputs[-1].data["text/plain"]
    assert "← here" in saved.cells[5].outputs[-1].data["text/html"]
    lab.restart()
    assert views(lab.save()) == []
    lab.open()
    lab.wait_text("← here", cell=5)
    assert "model not found" not in lab.text()


LIVE = {2: "%amem map planner", 3: "%amem tree planner", 4: "%amem status --live"}


@pytest.mark.parametrize("how", ["restart", "shutdown", "death"])
def test_live_widgets_end_with_their_kernel(open_notebook, how):
    """Whoever ends it: what was shown last stays, as HTML, and there is nothing to click that would do nothing."""
    lab = open_notebook(f"{SETUP}\n%load_ext amem_jupyter", "%%agent planner\nHello", *LIVE.values(), "import os")
    lab.run_all()
    for cell in LIVE:
        lab.cell(cell).locator(".amem-panel").wait_for()
    if how == "restart":
        lab.restart()
    elif how == "shutdown":
        lab.shutdown()
    else:
        lab.edit(5, "os._exit(1)")
        lab.run(5)
    lab.page.wait_for_selector(".amem-panel", state="detached")
    for cell, words in zip(LIVE, ("200 tokens", "← here", "■ hot"), strict=True):
        lab.wait_text(words, cell=cell)
    assert lab.page.locator(".jp-Notebook .jp-OutputArea-output button").count() == 0
    assert views(lab.save()) == []


def test_live_widgets_are_used_with_the_keyboard(open_notebook):
    """Zoom, blocks, turns and buttons; the notebook's own keys do not interfere, and a redrawn picture keeps the focus."""
    lab = open_notebook(
        f"{SETUP}\n%load_ext amem_jupyter",
        "%%agent planner\nHello", *LIVE.values(), "%agent planner One\n%agent planner Two",
    )  # fmt: skip
    lab.run_all()
    lab.wait_text("600 tokens", cell=2)
    keys, map_, tree, board = lab.page.keyboard, lab.cell(2), lab.cell(3), lab.cell(4)
    blocks = map_.locator(".amem-block")
    blocks.first.focus()
    lab.wait_text("block 0 · tokens 0-255 · sealed · in memory · 25.6 kB: text of stretch 0", cell=2)
    keys.press("ArrowRight")
    lab.wait_text("block 1 · tokens 256-511", cell=2)
    keys.press("End")
    lab.wait_text("block 2 · tokens 512-599", cell=2)
    assert lab.focused() == "block 2 · tokens 512-599 · tail · in memory · 8.8 kB: text of stretch 2"
    assert [mark.get_attribute("tabindex") for mark in blocks.all()] == ["-1", "-1", "0"]
    width = blocks.last.bounding_box()["width"]
    keys.press("+")
    lab.wait_text("150%", cell=2)
    keys.press("+")
    lab.wait_text("225%", cell=2)
    assert blocks.last.bounding_box()["width"] > width
    keys.press("-")
    keys.press("0")
    lab.wait_text("100%", cell=2)
    map_.get_by_label("zoom in (+)").click()
    lab.wait_text("150%", cell=2)

    tree.locator(".amem-turn").first.focus()
    keys.press("ArrowDown")
    keys.press("ArrowUp")
    keys.press("Enter")
    lab.wait_text("planner stands at turn", cell=3)
    assert lab.focused().startswith("1")
    assert tree.locator("[aria-current=true]").count() == 1

    board.get_by_label("evict planner").focus()
    keys.press("Enter")
    lab.wait_text("planner is on disk only", cell=4)
    board.get_by_label("restore planner").wait_for()
    assert lab.focused() == "restore planner"
    keys.press(" ")
    lab.wait_text("planner is in memory", cell=4)
    keys.press("Tab")
    assert lab.focused() == "pin planner"
    assert board.locator(".amem-doing").get_attribute("aria-live") == "polite"
    assert board.get_by_role("columnheader", name="what can be done").count() == 1
    assert map_.get_by_role("group", name="planner · 200 tokens").count() == 1
    assert lab.page.locator(".jp-Notebook .jp-Cell").count() == 6  # no key did anything to the notebook


def test_a_reply_in_the_background_streams_into_its_own_cell(open_notebook):
    """While the next cells run and print."""
    lab = open_notebook(
        SETUP, "%load_ext amem_jupyter", "script.enqueue(*['word '] * 60, delay_s=0.05)",
        "%%agent planner --background\nGo on", "for i in range(3):\n    print('line', i)", "%amem wait",
    )  # fmt: skip
    lab.command("notebook:run-all-cells")
    lab.wait_text("line 2", cell=4)
    lab.wait_text("word word", cell=3)
    lab.wait_text("planner: done", cell=5)
    lab.wait_text("TTFT 180 ms", cell=3)
    assert "word" not in lab.cell(4).inner_text()
    assert "line" not in lab.cell(3).locator(".jp-Cell-outputArea").inner_text()


def test_two_notebooks_at_once_have_two_planners(open_notebook, tiny_model_path, tmp_path):
    """In one store, each in a kernel and a page of its own."""
    load = f"%load_ext amem_jupyter\n%amem load {tiny_model_path} --memory 200MB --store {tmp_path / 'store'}"
    asked = "%%agent planner --max-tokens 4\n{}"
    first = open_notebook(load, asked.format("We grow apples."), "%amem history planner")
    second = open_notebook(load, asked.format("We sell boats."), "%amem history planner")
    for lab in (first, second):
        lab.command("notebook:run-all-cells")
    for lab, own, other in ((first, "apples", "boats"), (second, "boats", "apples")):
        lab.wait_text(f"{own}.", cell=2)
        lab.wait_idle()
        assert other not in lab.cell(2).inner_text()


MESSAGE = (
    "We sell a small greenhouse kit for balconies. It folds, it costs 89 euros, and a sensor tells a phone when the soil "
    "is dry. Our customers live in cities and have little time. "
) * 3 + "How should we tell them about it?"


def test_restart_and_run_all_walks_through_what_is_stored(open_notebook, bundled_model_path, tmp_path):
    """Another process, the same greedy replies, from disk and sooner. The pictures in README are of this notebook."""
    store = tmp_path / "store"
    lab = open_notebook(
        f"%load_ext amem_jupyter\n%amem load {bundled_model_path} --store {store}\nimport os\nprint('pid', os.getpid())",
        f"%%agent planner --max-tokens 8 --into one\n{MESSAGE}",
        "%%agent planner --max-tokens 6 --into two\nName one risk.",
        "print(one.token_ids, two.token_ids)",
        "%amem map planner",
        "%amem tree planner",
        "%amem status --live",
    )  # fmt: skip
    saved = []
    for _ in range(2):
        lab.run_all()
        saved.append(lab.save())
        lab.restart()
    before, after = saved
    assert re.findall(r"pid \d+", printed(before, 0)) != re.findall(r"pid \d+", printed(after, 0))
    assert printed(before, 3) == printed(after, 3)
    for cell in (1, 2):
        first, again = metrics(before, cell), metrics(after, cell)
        assert first["turn"] == again["turn"]
        assert again["match"] == "EXACT"
    first, again = metrics(before, 1), metrics(after, 1)
    assert (first["match"], again["residency"]) == ("COLD", "warm")
    assert again["reused_tokens"] > again["computed_tokens"]
    assert again["ttft_ms"] < first["ttft_ms"]
    assert views(before) == views(after) == []


BRIEF = """\
We sell a small greenhouse kit for balconies. It folds flat, it costs 89 euros, and a sensor tells a phone when the soil
is dry. Our customers live in cities, rent their flats and have little time. Most of them have never grown anything; a
few grow tomatoes every year and know more about it than we do.

The frame is made of ash from the region, and the cover of a film that lasts ten years. A box holds four pots and weighs
six kilograms. It goes up in ten minutes without a tool, and comes down in five. The sensor runs for two years on a coin
cell; the app is free, keeps nothing, and works without an account. We send seeds for basil, radish and lettuce along,
and a sheet of paper that says what to do in which week.

We make two hundred kits a month in a workshop with three people. Until now we sold them at two markets and through
friends. A garden centre in the next town wants thirty on commission. A magazine for tenants offers half a page in its
spring issue for 900 euros. Nobody has answered our letters to the housing associations yet. We have 6000 euros for the
launch, a list of 340 people who asked to be told, and eight weeks until the first warm days.

What people like most, when they see it, is that it is gone in winter. What they fear is that it looks cheap from the
street, and that the landlord will not have it. Whoever has had one for a year buys a second one, or gives one away.

What we made and sold, week by week:
"""
BRIEF += "\n".join(
    f"In week {week} we made {40 + week} kits, and sold {5 + week % 4} at the market and {3 + week % 5} to friends."
    for week in range(1, 19)
)
BRIEF += "\n\nHow should we tell people about it?"


def test_pictures_for_readme(open_notebook, bundled_model_path, tmp_path):
    """Card, map, tree and dashboard, as they look; AMEM_SCREENSHOTS names the folder that README shows."""
    folder = Path(os.environ.get("AMEM_SCREENSHOTS") or tmp_path)
    lab = open_notebook(
        f"%load_ext amem_jupyter\n%amem space launch\n%amem load smollm2-135m --store {tmp_path / 'store'}",
        f"%%agent planner --max-tokens 24\n{BRIEF}",
        "%%agent planner --max-tokens 24\nName one risk.",
        "%%agent planner --max-tokens 24\nName one chance.",
        "%amem fork planner variant",
        "%%agent variant --max-tokens 24\nSay it in other words.",
        "%amem evict variant\n%amem pin planner",
        "%%agent variant --max-tokens 24\nWhat is the price of one kit?",
        "%amem map variant",
        "%amem tree planner",
        "%amem status --live",
        width=1080,
        scale=2,
    )
    lab.command("application:toggle-left-area")
    lab.run_all()
    lab.edit(2, "%%agent planner --max-tokens 24\nName one risk, and what to do about it.")
    lab.run(2)
    lab.wait_text("another branch", cell=2)
    lab.wait_idle()
    lab.wait_text("and what to do about it.  ← here".replace("  ", "\N{NO-BREAK SPACE} "), cell=9)
    for name, cell in {"card": 7, "map": 8, "tree": 9, "dashboard": 10}.items():
        lab.shoot(cell, folder / f"{name}.png")
        assert (folder / f"{name}.png").stat().st_size > 2000
