"""The notebook layer in JupyterLab, with chromium: what a person sees, saves and opens again."""

from __future__ import annotations

import pytest

from tests.jupyter.lab import CHROMIUM, Lab, browser, server, write_notebook

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

    def open_one(*sources):
        path = write_notebook(folder / f"{request.node.name}.ipynb", *sources)
        opened.append(Lab(chromium, lab_address, path))
        return opened[-1]

    yield open_one
    for lab in opened:
        lab.page.close()


def views(notebook):
    """The outputs of a saved notebook that are widget views."""
    return [output for cell in notebook.cells for output in cell.get("outputs", []) if VIEW in output.get("data", {})]


def test_run_all_save_restart_and_open_again(open_notebook):
    """A map is alive while a cell asks; what is saved reads well without the kernel that made it."""
    lab = open_notebook(
        SETUP, "%load_ext amem_jupyter", "%%agent planner\nHello", "%amem map planner",
        "script.enqueue(*['word '] * 60, delay_s=0.05)", "%%agent planner\nGo on", "%amem status",
    )  # fmt: skip
    lab.command("notebook:run-all-cells")
    lab.page.wait_for_selector(".amem-map")
    lab.wait_text("writing", cell=3)
    lab.wait_text("word word", cell=5)
    lab.wait_text("last TTFT")
    lab.wait_idle()
    lab.page.wait_for_selector(".amem-map", state="detached")
    lab.wait_text("400 tokens", cell=3)
    saved = lab.save()
    assert views(saved) == []
    assert "400 tokens" in saved.cells[3].outputs[-1].data["text/html"]
    assert saved.cells[5].outputs[-1].metadata["amem"]["agent"] == "planner"
    lab.restart()
    lab.save()
    lab.open()
    lab.wait_text("TTFT 180 ms")
    assert "model not found" not in lab.text()
    assert "400 tokens" in lab.text()


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
    lab.command("notebook:run-all-cells")
    lab.wait_text("layers 0-29")
    lab.wait_idle()
    lab.save()
    # Another id makes it a notebook that was never signed.
    copy = folder / "untrusted.ipynb"
    copy.write_text(lab.path.read_text(encoding="utf-8").replace("You said", "You wrote"), encoding="utf-8")
    other = Lab(chromium, lab_address, copy)
    try:
        other.wait_text("You wrote: Hello")
        card = other.page.locator(".jp-OutputArea-output div[style*='border-left']").first
        assert card.evaluate("e => getComputedStyle(e).borderLeftWidth") == "3px"
        assert "layers 0-29" in other.text()
    finally:
        other.page.close()
