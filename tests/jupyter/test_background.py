"""Requests behind the cells: they return at once, stream into their own cell, and can be waited for or cancelled."""

from __future__ import annotations

import threading

import pytest

from amem.errors import MemoryBudgetError
from amem_jupyter import background
from tests.jupyter.kernels import kernel

LONG = ["word "] * 2000


@pytest.fixture
def pending(notebook, script):
    """An agent that goes on for long in the background."""
    script.enqueue(*LONG, delay_s=0.05)
    yield notebook.run("%%agent planner --background --into later\nGo on.").result
    for running in notebook.shell.user_ns["later"], *background_of(notebook).running():
        running.cancel()
        running.wait()


def background_of(notebook):
    return notebook.shell.magics_manager.registry["AmemMagics"].session.background


def test_the_cell_ends_at_once_and_its_value_waits_for_the_reply(notebook, script):
    """The text, the metrics and a {{quotation}} come when they are there."""
    script.enqueue("One, ", "two.", delay_s=0.1)
    pending = notebook.run("%%agent planner --background --into later\nCount.").result
    assert not pending.done
    assert repr(pending) == "<planner is answering>"
    assert "planner · starting …" in [message["data"]["text/plain"].strip() for message in notebook.publisher.outputs]
    assert notebook.shell.user_ns["later"] is pending
    notebook.run("%agent critic Judge: {{later}}")
    assert script.asked[-1]["message"] == "Judge: One, two."
    assert pending.done
    assert pending.metrics.agent == "planner"
    assert repr(pending) == "<reply of planner: 'One, two.'>"


def test_it_ends_in_the_card_of_its_own_cell(notebook, script):
    """With the metrics, as if it had been waited for."""
    script.enqueue("One, ", "two.", delay_s=0.05)
    notebook.run("%amem load")
    notebook.run("%%agent planner --background\nCount.\n", cell_id="c")
    card = notebook.publisher.outputs[0]["transient"]["display_id"]
    notebook.run("%amem wait")
    last = next(message for message in notebook.shown if message["transient"]["display_id"] == card)
    assert "One, two." in last["data"]["text/html"]
    assert last["metadata"]["amem"]["agent"] == "planner"
    assert "planner: done" in notebook.text


def test_other_agents_answer_meanwhile(notebook, script, pending):
    """And %amem wait for them does not wait for it."""
    assert notebook.run("%agent critic Hm").success
    script.enqueue("Yes.", delay_s=0.01)
    notebook.run("%%agent critic --background\nSure?")
    notebook.run("%amem wait critic")
    assert "critic: done" in notebook.text
    assert not pending.done


def test_cancelled_it_leaves_the_agent_as_it_was(notebook, pending):
    """By the message's agent, or by the value of its cell."""
    notebook.run("%amem cancel planner")
    assert notebook.text.endswith("planner: cancelled; it is as it was")
    assert pending.done
    assert pending.failure == ""
    assert notebook.engine.agent("planner").tree() == []
    with pytest.raises(Exception, match="was cancelled"):
        _ = pending.text
    assert "no request in the background" in notebook.fails("%amem cancel planner")
    notebook.run("%amem wait")
    assert notebook.text == "nothing is going on in the background"


def test_the_handle_cancels_too(notebook, pending):
    """Without a magic."""
    pending.cancel()
    assert pending.wait(30)
    assert notebook.engine.agent("planner").tree() == []
    assert repr(pending).startswith("<no reply of planner: ")


def test_a_failure_is_told_where_it_is_waited_for(notebook, script):
    """On the card, and as the error of %amem wait, so that Run All stops there."""
    script.enqueue("a", "b", error=MemoryBudgetError("there is no room."), error_at=1)
    assert notebook.run("%%agent planner --background\nGo on.").success
    assert notebook.fails("%amem wait").strip() == "UsageError: planner: there is no room."
    assert notebook.run("%amem wait").success


def test_waiting_for_an_agent_that_is_not_there_is_refused(notebook, pending):
    """At once, with the nearest name, also beside one that is there; what goes on is still waited for later."""
    for line in ("%amem wait planer", "%amem wait planner planer"):
        seen = notebook.fails(line).strip()
        assert seen == "UsageError: no agent 'planer' in this space; did you mean planner?"
    assert background_of(notebook).running() == [pending]


def test_waiting_for_an_idle_agent_or_without_an_engine_is_no_error(notebook, script):
    """There is nothing to wait for, and no engine is loaded to find that out."""
    notebook.run("%amem wait planner")
    assert notebook.text == "nothing is going on in the background"
    assert script.opened == []
    notebook.run("%agent planner Hi")
    notebook.run("%amem wait planner")
    assert notebook.text == "nothing is going on in the background"


def test_an_interrupt_ends_the_waiting_and_not_the_request(notebook, pending, monkeypatch):
    """The next wait finds it again."""

    def interrupted(*_args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(background.PendingReply, "wait", interrupted)
        seen = notebook.fails("%amem wait")
    assert seen.strip() == "KeyboardInterrupt: no longer waiting; still answering: planner"
    assert not pending.done
    assert background_of(notebook).running() == [pending]


@pytest.mark.parametrize("source", ["%amem load other/model", "%amem space other", "%amem release"])
def test_the_engine_is_not_closed_under_it(notebook, script, pending, source):
    """One line says what to do first."""
    assert "%amem wait or %amem cancel comes first" in notebook.fails(source)
    assert not notebook.engine.is_closed
    assert len(script.opened) == 1


def test_a_dry_run_in_the_background_sends_nothing(notebook, script):
    """Whatever else is given."""
    notebook.run("%%agent planner --background --dry-run\nHi")
    assert "nothing was sent" in notebook.text
    assert script.asked == []


def test_what_is_refused_is_refused_in_the_cell(notebook):
    """Before anything is in the background."""
    assert "there is no message" in notebook.fails("%%agent planner --background\n  \n")
    assert background_of(notebook).running() == []


def test_many_leave_no_thread(notebook):
    """And nothing that is kept for a wait."""
    for _ in range(30):
        notebook.run("%%agent planner --background\nHi")
    notebook.run("%amem wait")
    assert [thread for thread in threading.enumerate() if thread.name.startswith("amem-cell")] == []
    assert background_of(notebook).take(()) == []


def test_each_output_goes_to_its_own_cell_in_a_real_kernel():
    """The card to the cell that asked, prints of other cells to theirs, while the reply comes in."""
    setup = "from tests.jupyter import scripted\nscripted.install()\nfrom tests.jupyter.scripted import script"
    with kernel() as live:
        assert live.run(f"{setup}\n%load_ext amem_jupyter").status == "ok"
        live.run("%amem load")
        live.run("script.enqueue(*['word '] * 40, delay_s=0.05)")
        asked = live.send("%%agent planner --background\nGo on.", "c1")
        ran = live.wait(asked)
        assert ran.status == "ok"
        (card,) = ran.outputs
        counting = live.send("import time\nfor i in range(10):\n    print('line', i)\n    time.sleep(0.05)", "c2")
        live.send("%amem wait", "c3")
        parents, lines, last, counted = set(), "", None, False
        while last is None or not counted:
            message = live.client.get_iopub_msg(timeout=120)
            parent, content, kind = message["parent_header"].get("msg_id"), message["content"], message["msg_type"]
            if kind == "update_display_data" and content["transient"]["display_id"] == card and last is None:
                parents.add(parent)
                last = content if "amem" in content["metadata"] else None
            if kind == "stream":
                assert parent == counting
                lines += content["text"]
            counted |= kind == "status" and content["execution_state"] == "idle" and parent == counting
        assert parents == {asked}
        assert lines == "".join(f"line {i}\n" for i in range(10))
        assert last["data"]["text/plain"].count("word") == 40
