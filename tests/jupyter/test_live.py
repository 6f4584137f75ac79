"""Cards that fill while replies come in."""

from __future__ import annotations

from amem.results import Event
from amem_jupyter.live import INTERVAL_S, Page
from tests.jupyter.scripted import reply


def test_a_card_is_updated_ten_times_a_second_at_most(notebook):
    """However fast the tokens come; its final form is always shown."""
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
