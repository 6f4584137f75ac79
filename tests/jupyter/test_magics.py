"""The magics in a real shell: what a cell sends, shows, returns, and refuses."""

from __future__ import annotations


def test_a_cell_sends_its_body_and_shows_the_reply_in_one_card(notebook, script):
    """The whole way: a message goes out as it is, and a card comes back as HTML and as text."""
    script.enqueue("First ", "**plan**.")
    result = notebook.run("%%agent planner\nPlan a launch.\n")
    assert result.success
    assert script.asked[0]["message"] == "Plan a launch."
    loading, card, _ = notebook.shown
    assert "loaded" in loading["data"]["text/plain"]
    assert "<strong>plan</strong>" in card["data"]["text/html"]
    assert "First **plan**." in card["data"]["text/plain"]
