"""The live block map: a widget while a cell asks, a picture in every notebook that is saved."""

from __future__ import annotations

import pytest
from ipywidgets.widgets.widget import _instances

from amem_jupyter.live import INTERVAL_S, Page
from tests.jupyter.scripted import reply

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def page(notebook):
    """The outputs by display id, as a notebook's document keeps them through all cells."""

    class Page:
        def __init__(self):
            self.outputs = {}

        def run(self, source, cell_id=None):
            result = notebook.run(source, cell_id)
            for message in notebook.publisher.outputs:
                display_id = message.get("transient", {}).get("display_id")
                if display_id:
                    self.outputs.setdefault(display_id, []).append(message["data"])
            return result

        def forms(self, text):
            """The forms that the output went through whose first text begins so."""
            (found,) = [
                forms for forms in self.outputs.values() if any(form["text/plain"].startswith(text) for form in forms)
            ]
            return ["widget" if VIEW in form else "picture" for form in found], found

    return Page()


def models():
    """Whatever ipywidgets still holds, layouts too."""
    return list(_instances.values())


def test_a_map_is_a_widget_in_its_cell_and_a_picture_after_it(page, notebook):
    """What is saved between cells is HTML; no model is left in the kernel."""
    page.run("%agent planner Hello")
    page.run("%amem map planner", cell_id="m")
    kinds, forms = page.forms("planner · 200 tokens")
    assert kinds == ["picture", "widget", "picture"]
    assert "text/html" in forms[-1]
    assert models() == []


def test_a_map_lives_while_another_cell_asks(page, notebook):
    """It is a widget from the request to the cell's end, and then shows the new blocks."""
    page.run("%agent planner Hello")
    page.run("%amem map planner", cell_id="m")
    page.run("%agent planner Again\nfrom ipywidgets.widgets.widget import _instances\nalive = dict(_instances)")
    kinds, forms = page.forms("planner · 200 tokens")
    assert kinds[-2:] == ["widget", "picture"]
    assert "planner · 400 tokens" in forms[-1]["text/plain"]
    (widget,) = [one for one in notebook.shell.user_ns["alive"].values() if type(one).__name__ == "BlockMapWidget"]
    assert "400 tokens" in widget.picture
    assert widget.doing == ""
    assert models() == []


def test_a_cell_that_asks_nobody_leaves_maps_alone(page, notebook):
    """No flicker, no traffic."""
    page.run("%agent planner Hello")
    page.run("%amem map planner", cell_id="m")
    page.run("1 + 1")
    assert notebook.publisher.outputs == []


def test_a_change_of_another_kind_is_drawn_too(page):
    """evict, rewind, fork."""
    page.run("%agent planner Hello")
    page.run("%amem map planner", cell_id="m")
    page.run("%amem evict planner")
    assert "▨" in page.forms("planner · 200 tokens")[1][-1]["text/plain"]


def test_fifty_runs_of_a_map_cell_leave_no_model(page, notebook):
    """Nor fifty maps that are kept up."""
    page.run("%agent planner Hello")
    for _ in range(50):
        page.run("%amem map planner", cell_id="m")
    assert models() == []
    page.run("%agent planner Again")
    assert sum(VIEW in message["data"] for message in notebook.publisher.outputs) == 1


def test_without_cell_ids_an_agent_has_one_map(page, notebook):
    """The newest; older ones stay as pictures."""
    page.run("%agent planner Hello")
    for _ in range(3):
        page.run("%amem map planner")
    page.run("%agent planner Again")
    assert sum(VIEW in message["data"] for message in notebook.publisher.outputs) == 1


def test_release_ends_maps_as_pictures(page, notebook):
    """Even within the cell that made them."""
    page.run("%agent planner Hello")
    page.run("%amem map planner\n%amem release", cell_id="m")
    assert page.forms("planner · 200 tokens")[0][-1] == "picture"
    assert models() == []


def test_an_interrupt_ends_in_a_picture(page, notebook, script):
    """The map is static and right when the cell was cut."""
    page.run("%agent planner Hello")
    page.run("%amem map planner", cell_id="m")
    script.enqueue("a", "b", error=KeyboardInterrupt(), error_at=1)
    page.run("%agent planner Again")
    kinds, forms = page.forms("planner · 200 tokens")
    assert kinds[-1] == "picture"
    assert "planner · 200 tokens" in forms[-1]["text/plain"]


def test_a_deleted_agents_map_stays_as_it_was(page):
    """And fails no later cell."""
    page.run("%agent planner Hello")
    page.run("%amem map planner", cell_id="m")
    page.run("%amem delete planner --yes")
    assert page.run("%agent critic Hm").success
    assert page.forms("planner · 200 tokens")[0][-1] == "picture"


def test_a_card_is_updated_ten_times_a_second_at_most(notebook):
    """However fast the tokens come; its final form is always shown."""
    from amem.results import Event

    now = [0.0]
    view = Page(["planner"], "md", clock=lambda: now[0]).cards["planner"]
    for _ in range(1000):
        now[0] += 0.001
        view.take(Event(text="x"))
    view.finish(reply("x" * 1000))
    updates = notebook.publisher.outputs
    assert len(updates) <= 1 / INTERVAL_S + 2
    assert "x" * 1000 in updates[-1]["data"]["text/plain"]
    assert len({message["transient"]["display_id"] for message in updates}) == 1
