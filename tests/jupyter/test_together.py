"""One message to several agents: their replies stream in side by side, in one batch, in the cell or behind it."""

from __future__ import annotations

import itertools
import queue
import threading

import pytest

import amem_jupyter
from amem.errors import Cancelled, MemoryBudgetError
from amem.results import Event
from amem_jupyter.asking import Request, Settings, replies_behind
from amem_jupyter.boards import Boards
from amem_jupyter.cells import Cells
from amem_jupyter.live import Page
from tests.jupyter.scripted import reply

LONG = ["word "] * 2000
PATIENCE_S = 60


class FedStream:
    """A stream whose events a test gives it, one by one."""

    def __init__(self):
        self.events = queue.Queue()

    def __iter__(self):
        return self

    def __next__(self):
        event = self.events.get(timeout=PATIENCE_S)
        if isinstance(event, BaseException):
            raise event
        if event is None:
            raise StopIteration
        return event

    def cancel(self):
        self.events.put(Cancelled("the request was cancelled; its agent is as it was before."))

    def close(self):
        pass


class FedEngine:
    def __init__(self, *names):
        self.streams = {name: FedStream() for name in names}

    def stream_all(self, messages, **_options):
        return {name: self.streams[name] for name in messages}

    def say(self, name, text):
        self.streams[name].events.put(Event(text=text))

    def end(self, name, text):
        for event in (Event(reply=reply(text, name)), None):
            self.streams[name].events.put(event)


class Shown(threading.Condition):
    """The last form of a page's output, for which a test can wait."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.text, self.metadata = "", None
        monkeypatch.setattr("amem_jupyter.live.Output.send", lambda _output, bundle, meta=None: self.take(bundle, meta))

    def take(self, bundle, meta):
        with self:
            self.text, self.metadata = bundle["text/plain"], meta
            self.notify_all()

    def until(self, *words):
        with self:
            assert self.wait_for(lambda: all(word in self.text for word in words), PATIENCE_S), self.text
            return self.text


def test_each_card_fills_as_its_reply_comes(shell, monkeypatch):
    """In whatever order, in one output; the metrics are there once somebody has answered."""
    shown, engine = Shown(monkeypatch), FedEngine("planner", "critic")
    page = Page(["planner", "critic"], "md", clock=itertools.count().__next__)
    request = Request(("planner", "critic"), "Hi", Settings(8, 0.0, 1.0, None, ()), None, None, "md", append=False,
                      cached=False, dry_run=False, background=False)  # fmt: skip
    pending = replies_behind(engine, request, page.cards, Boards(lambda: None), Cells(shell), page.show_again)
    engine.say("critic", "I doubt")
    shown.until("planner · starting", "critic · writing", "I doubt")
    engine.say("planner", "I plan")
    engine.say("critic", " it.")
    shown.until("I plan", "I doubt it.")
    assert shown.metadata is None
    engine.end("critic", "I doubt it.")
    assert "I plan" in shown.until("critic · scripted-1m")
    assert ["critic"] == [found["agent"] for found in shown.metadata["amem"]["agents"]]
    assert not pending.done
    engine.end("planner", "I plan.")
    shown.until("planner · scripted-1m", "critic · scripted-1m")
    assert {"planner": "I plan.", "critic": "I doubt it."} == {name: str(one) for name, one in pending.replies.items()}
    assert ["planner", "critic"] == [found["agent"] for found in shown.metadata["amem"]["agents"]]


def test_what_one_cannot_do_does_not_stop_the_others(notebook, script):
    """Its card says why, and its error is that of the cell."""
    script.enqueue("I ", "plan.", error=MemoryBudgetError("there is no room."), error_at=1)
    script.enqueue("I doubt.")
    seen = notebook.fails("%%agents planner critic\nYour view?")
    assert seen.strip() == "UsageError: there is no room."
    assert "planner · there is no room." in notebook.text
    assert "I doubt." in notebook.text
    assert notebook.engine.agent("planner").turns == []
    assert len(notebook.engine.agent("critic").turns) == 1


def test_behind_the_cells_each_can_be_waited_for_and_cancelled(notebook, script):
    """The cell's value has a handle for each agent, and its card is in the cell that asked."""
    notebook.run("%amem load")
    script.enqueue("I plan.", delay_s=0.01)
    script.enqueue(*LONG, delay_s=0.05)
    both = notebook.run("%%agents planner critic --background --into both\nYour view?", cell_id="c").result
    assert notebook.shell.user_ns["both"] is both
    card = notebook.publisher.outputs[0]["transient"]["display_id"]
    assert notebook.run("%amem wait planner").success
    assert str(both["planner"]) == "I plan."
    assert not both.done
    assert "critic is answering" in repr(both)
    notebook.run("%amem cancel critic", cell_id="d")
    assert both.done
    last = [message for message in notebook.shown if message["transient"].get("display_id") == card][-1]
    assert "I plan." in last["data"]["text/plain"]
    assert "critic · cancelled; critic is as it was before" in last["data"]["text/plain"]
    assert notebook.engine.agent("critic").tree() == []
    with pytest.raises(Cancelled):
        _ = both.replies


def test_the_value_of_a_cell_behind_shows_the_cards_when_all_are_there(notebook, script):
    """And before that a line."""
    script.enqueue("I plan.", delay_s=0.2)
    script.enqueue("I doubt.", delay_s=0.2)
    both = notebook.run("%%agents planner critic --background\nYour view?").result
    notebook.run("%amem wait")
    assert "planner, critic: done" in notebook.text
    data, metadata = notebook.shell.display_formatter.format(both)
    assert "I plan." in data["text/plain"]
    assert "I doubt." in data["text/plain"]
    assert len(metadata["amem"]["agents"]) == 2


def test_all_are_asked_in_one_batch(notebook, script):
    """By one call to the engine."""
    notebook.run("%%agents planner critic --max-tokens 5\nYour view?")
    notebook.run("%%agents planner critic --background\nYour view?")
    notebook.run("%amem wait")
    assert [("planner", "critic"), ("planner", "critic")] == script.batches


def test_a_terminal_gets_each_reply_whole(script, shell, capsys):
    """No two of them are mixed."""
    amem_jupyter.load_ipython_extension(shell)
    script.enqueue("I ", "plan.", delay_s=0.01)
    script.enqueue("I ", "doubt.", delay_s=0.01)
    try:
        assert shell.run_cell("%%agents planner critic\nYour view?").success
        written = capsys.readouterr().out
        assert shell.run_cell("%%agents planner critic --background\nYour view?").success is False
    finally:
        amem_jupyter.unload_ipython_extension(shell)
    assert "I plan.\n\nplanner ·" in written
    assert "I doubt.\n\ncritic ·" in written
