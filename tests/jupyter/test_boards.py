"""The dashboard and the tree: alive between cells, clicked from any thread, and pictures when they are of no use."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from ipywidgets.widgets.widget import _instances

from amem.errors import InputError
from amem.results import PrefetchStatus, Residency
from amem_jupyter import boards
from amem_jupyter.dashboard import board_picture
from amem_jupyter.markup import level, sparkline
from tests.jupyter.scripted import ScriptedAgent, ScriptedEngine, metrics

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def planner(notebook):
    """An agent with two turns."""
    notebook.run("%agent planner Hello")
    notebook.run("%agent planner Go on")
    yield notebook.engine.agent("planner")
    notebook.shell.magics_manager.registry["AmemMagics"].live.forget()


@pytest.fixture
def opened(notebook):
    """Runs a cell that opens one, and gives its widget."""

    def run(source, cell_id="b"):
        assert notebook.run(source, cell_id=cell_id).success
        (widget,) = widgets()
        return widget

    return run


def widgets():
    return [one for one in _instances.values() if hasattr(one, "picture")]


def click(widget, **message):
    """As the front end's message arrives: on a thread that is not the cells'."""
    thread = threading.Thread(target=widget._handle_custom_msg, args=(message, []))
    thread.start()
    thread.join()


def test_the_dashboard_shows_budgets_agents_and_their_history(planner, opened):
    """And which buttons each agent has."""
    widget = opened("%amem status --live")
    assert "scripted-1m" in widget.picture
    assert "memory 40 kB of 4 GB" in widget.text
    (row,) = [line for line in widget.text.splitlines() if line.startswith("planner")]
    assert row.split() == ["planner", "■", "hot", "400", "2", "40", "kB", "40", "kB", "180", "ms", "██", "111.4", "95%"]
    assert widget.agents == [{"name": "planner", "acts": ["evict", "pin", "fork"]}]


def test_it_follows_what_happens_in_other_cells(planner, opened, notebook, script):
    """New agents, new turns, and at the end nothing that still goes on."""
    widget = opened("%amem status --live")
    said = []
    widget.observe(lambda change: said.append(change["new"]), "doing")
    notebook.run("%agent critic Hm")
    assert [agent["name"] for agent in widget.agents] == ["critic", "planner"]
    assert said[0] == "critic: starting"
    assert said[-1] == ""
    notebook.run("%amem evict planner")
    assert widget.agents[1]["acts"] == ["restore", "pin", "fork"]
    notebook.run("%amem delete critic --yes")
    assert [agent["name"] for agent in widget.agents] == ["planner"]


def test_it_follows_a_request_in_the_background(planner, opened, notebook, script):
    """From the thread in which the reply comes in."""
    widget = opened("%amem status --live")
    script.enqueue("One, ", "two.", delay_s=0.05)
    notebook.run("%%agent critic --background\nCount.", cell_id="c")
    notebook.run("%amem wait", cell_id="d")
    assert [agent["name"] for agent in widget.agents] == ["critic", "planner"]


def test_its_buttons_do_what_they_say(planner, opened, notebook):
    """And the dashboard, which says how it went, is up to date at once."""
    widget = opened("%amem status --live")
    click(widget, act="evict", agent="planner")
    assert planner.status.residency is Residency.WARM
    assert widget.doing == "planner is on disk only"
    assert widget.agents[0]["acts"] == ["restore", "pin", "fork"]
    click(widget, act="restore", agent="planner")
    assert planner.status.residency is Residency.HOT
    click(widget, act="pin", agent="planner")
    assert planner.status.pinned
    assert widget.agents[0]["acts"] == ["evict", "unpin", "fork"]
    click(widget, act="unpin", agent="planner")
    click(widget, act="fork", agent="planner")
    click(widget, act="fork", agent="planner")
    assert notebook.engine.agents() == ["planner", "planner-2", "planner-3"]
    assert len(notebook.engine.agent("planner-3").turns) == 2


def test_a_click_that_is_refused_is_a_line_on_the_board(planner, opened, monkeypatch):
    """And so is one on an agent that is gone, or one that means nothing."""

    def refused(_agent):
        raise InputError("agent 'planner' is answering: wait for it.")

    widget = opened("%amem status --live")
    monkeypatch.setattr(ScriptedAgent, "evict", refused)
    click(widget, act="evict", agent="planner")
    assert widget.doing == "agent 'planner' is answering: wait for it."
    click(widget, act="evict", agent="nobody")
    assert widget.doing == "nobody is not there any more"
    click(widget, act="explode", agent="planner")
    assert widget.doing == "there is nothing called 'explode' to do"


def test_a_click_on_a_turn_stands_the_agent_there(planner, opened):
    """The tree shows it, and the agent goes on from there."""
    first, second = planner.turns
    widget = opened("%amem tree planner")
    assert f'title="turn {first.id} ' in widget.picture
    assert "Go on  ← here" in widget.text
    click(widget, act="checkout", turn=first.id)
    assert [turn.id for turn in planner.turns] == [first.id]
    assert "Hello  ← here" in widget.text
    assert widget.doing == f"planner stands at turn {first.id}"
    click(widget, act="checkout", turn=99_999)
    assert "has no turn 99999" in widget.doing
    assert second.id in [turn.id for turn in planner.tree()]


LIVE = ["%amem status --live", "%amem tree planner", "%amem map planner"]


@pytest.mark.parametrize("source", LIVE)
def test_run_again_it_leaves_a_picture_and_no_model(planner, notebook, source):
    """Fifty times."""
    for _ in range(50):
        notebook.run(source, cell_id="b")
    assert len(widgets()) == 1
    notebook.run("1 + 1", cell_id="b")
    assert list(_instances.values()) == []
    assert set(notebook.shown[-1]["data"]) == {"text/html", "text/plain"}


def test_without_cell_ids_it_is_a_picture_when_its_cell_ends(planner, notebook):
    """What nbclient and papermill save needs no kernel; it is followed all the same."""
    notebook.run("%amem status --live")
    assert list(_instances.values()) == []
    assert set(notebook.shown[-1]["data"]) == {"text/html", "text/plain"}
    notebook.run("%agent critic Hm")
    assert any("critic" in message["data"]["text/plain"] for message in notebook.shown)


@pytest.mark.parametrize("source", ["%amem release", "%load_ext amem_jupyter", "%amem load other/model"])
def test_it_ends_with_its_engine(planner, opened, notebook, source):
    """Or with the extension that is unloaded, which a second load does first: as a picture."""
    opened("%amem status --live")
    notebook.run(source, cell_id="c")
    assert list(_instances.values()) == []


@pytest.mark.parametrize("source", LIVE[1:])
def test_what_showed_a_deleted_agent_is_a_picture(planner, opened, notebook, source):
    """That fails no later cell."""
    opened(source)
    notebook.run("%amem delete planner --yes", cell_id="c")
    assert list(_instances.values()) == []
    assert notebook.run("%agent critic Hm", cell_id="d").success


def test_one_that_nobody_needs_becomes_a_picture(planner, opened, monkeypatch):
    """After a while without a change or a click."""
    monkeypatch.setattr(boards, "IDLE_S", 0.05)
    opened("%amem status --live")
    for timer in [one for one in threading.enumerate() if isinstance(one, threading.Timer)]:
        timer.join(30)
    assert list(_instances.values()) == []


def test_while_alive_its_output_has_a_picture_too(planner, notebook):
    """For viewers that show no widgets."""
    notebook.run("%amem status --live", cell_id="b")
    data = notebook.shown[-1]["data"]
    assert set(data) == {VIEW, "text/html", "text/plain"}
    assert "planner" in data["text/html"]


def test_the_picture_is_a_pure_function():
    """Also of an engine without agents, and of agents that were never asked here."""
    engine = ScriptedEngine()
    assert "no agents yet" in board_picture(engine.status(), {}).text
    engine.agent("planner")
    assert board_picture(engine.status(), {}).text.splitlines()[-1].split() == [
        "planner", "·", "empty", "0", "0", "0", "B", "0", "B", "-", "-", "-",
    ]  # fmt: skip
    slow_then_fast = [metrics(ttft_ms=800.0), metrics(ttft_ms=100.0)]
    board = board_picture(engine.status(), {"planner": slow_then_fast})
    assert "█▂" in board.text
    assert 'role="img" aria-label="800 ms, 100 ms"' in board.html


def test_the_dashboard_tells_how_well_the_next_agent_was_guessed():
    """Hits and misses, where prefetch is on."""
    status = ScriptedEngine().status()
    assert "prefetch" not in board_picture(replace(status, prefetch=None), {}).text
    board = board_picture(replace(status, prefetch=PrefetchStatus(restored=4, hits=3, misses=1)), {})
    for form in (board.text, board.html):
        assert "prefetch: 3 hits, 1 miss · 4 agents restored ahead" in form


def test_a_map_follows_its_agent_while_it_answers(planner, opened, notebook, script, monkeypatch):
    """It is drawn again and again, a second apart at least, and by whatever thread the reply comes in."""
    drawn = []
    now = iter(range(10_000))
    monkeypatch.setattr(boards.time, "monotonic", lambda: next(now) * 0.4)
    block_map = ScriptedAgent.block_map
    monkeypatch.setattr(ScriptedAgent, "block_map", lambda agent: drawn.append(agent.name) or block_map(agent))
    widget = opened("%amem map planner")
    script.enqueue(*["word "] * 20)
    before = len(drawn)
    notebook.run("%%agent planner\nGo on.", cell_id="c")
    assert 5 <= len(drawn) - before <= 22
    assert "planner · 600 tokens" in widget.text
    before = len(drawn)
    notebook.run("%%agent critic\nHm", cell_id="d")
    assert len(drawn) - before == 1
    script.enqueue(*["word "] * 20)
    notebook.run("%%agent planner --background\nGo on.", cell_id="e")
    notebook.run("%amem wait", cell_id="f")
    assert "planner · 800 tokens" in widget.text


def test_a_map_shows_what_became_of_an_agent_in_passing(planner, opened, notebook):
    """When another's cell ends, which may have taken its place in memory."""
    widget = opened("%amem map planner")
    notebook.shell.user_ns["planner_state"] = planner.state
    notebook.run("%agent critic Hm\nfrom amem.results import Residency\nplanner_state.residency = Residency.WARM")
    assert "▨" in widget.text


def test_a_cell_that_asks_nobody_leaves_everything_alone(planner, opened, notebook):
    """No flicker, no traffic."""
    widget = opened("%amem map planner")
    changes = []
    widget.observe(changes.append)
    notebook.run("1 + 1", cell_id="c")
    assert changes == []
    assert notebook.publisher.outputs == []


def test_without_cell_ids_there_is_one_of_a_kind(planner, notebook):
    """The newest is kept up; older ones stay as pictures, and a map is not taken for a tree."""
    for source in ("%amem map planner", "%amem map planner", "%amem tree planner"):
        notebook.run(source)
    notebook.run("%agent planner Again")
    ids = {"planner · 600 tokens": set(), "← here": set()}
    for message in notebook.publisher.outputs:
        for words, found in ids.items():
            if words in message["data"]["text/plain"]:
                found.add(message["transient"]["display_id"])
    assert [len(found) for found in ids.values()] == [1, 1]


def test_an_interrupt_leaves_a_map_that_is_right(planner, opened, notebook, script):
    """It shows the agent as it was before."""
    widget = opened("%amem map planner")
    script.enqueue("a", "b", error=KeyboardInterrupt(), error_at=1)
    notebook.run("%%agent planner\nGo on.", cell_id="c")
    assert "planner · 400 tokens" in widget.text
    assert widget.doing == ""


def test_sparks_and_levels():
    """The largest is the highest; a little is not nothing, and too much is full."""
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([1, 4, 8]) == "▂▅█"
    assert level(0, 10).text == "░" * 20
    assert level(1, 1e12).text == "█" + "░" * 19
    assert level(5, 10).text == "█" * 10 + "░" * 10
    assert level(20, 10).text == "█" * 20
    assert level(1, 0).text == "█" + "░" * 19
