"""The extension in a real kernel, with the scripted engine: streaming, interrupts, what a saved notebook holds."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

from tests.jupyter.kernels import ROOT, kernel

SETUP = "from tests.jupyter import scripted\nscripted.install()\nfrom tests.jupyter.scripted import script"


@pytest.fixture(scope="module")
def live():
    """One kernel for this file's tests."""
    with kernel() as running:
        assert running.run(SETUP).status == "ok"
        assert running.run("%load_ext amem_jupyter").status == "ok"
        yield running


def test_a_reply_streams_into_one_output_and_is_not_shown_twice(live):
    """Text comes before the end, and the cell's value adds no second card."""
    live.run("script.enqueue('One, ', 'two, ', 'three.', delay_s=0.2)")
    request = live.send("%%agent planner\nCount.", "c1")
    assert "three." not in live.wait(request, until="One, ").text
    live.wait(request)
    live.run("script.enqueue('Done.')")
    ran = live.run("%%agent planner\nAgain.", "c2")
    assert len(ran.outputs) == 1
    assert ran.metrics[0]["agent"] == "planner"
    assert "Done." in ran.text
    assert "'Done.'" in live.run("str(_)").text


def test_the_cells_id_comes_from_the_request(live):
    """As JupyterLab sends it."""
    live.run("%agent planner Hi", "cell-42")
    assert "'cell-42'" in live.run("script.asked[-1]['cell_id']").text


def test_an_interrupt_stops_the_cell_and_those_queued_after_it(live):
    """The agent is as it was, and the next cell has not run."""
    live.run("script.enqueue(*['word '] * 500, delay_s=0.05)")
    before = live.run("%amem history planner").text
    long = live.send("%%agent planner\nGo on for long.", "c3")
    queued = live.send("ran_after_all = True")
    live.wait(long, until="word word")
    live.manager.interrupt_kernel()
    ran = live.wait(long)
    assert (ran.status, ran.ename) == ("error", "KeyboardInterrupt")
    assert "interrupted; planner is as it was before" in ran.text
    assert live.reply(queued)["status"] == "aborted"
    assert live.run("%amem history planner").text == before
    assert "False" in live.run("'ran_after_all' in globals()").text


def test_an_interrupt_cancels_all_who_were_asked_together(live):
    """Each card says so, each agent is as it was, and the next cell has not run."""
    for _ in range(2):
        live.run("script.enqueue(*['word '] * 500, delay_s=0.05)")
    long = live.send("%%agents left right\nGo on for long.", "c4")
    queued = live.send("ran_after_both = True")
    while "left · writing" not in (text := live.wait(long, until="right · writing").text):
        assert "cancelled" not in text
    live.manager.interrupt_kernel()
    ran = live.wait(long)
    assert (ran.status, ran.ename) == ("error", "KeyboardInterrupt")
    assert "left · cancelled; left is as it was before" in ran.text
    assert "right · cancelled; right is as it was before" in ran.text
    assert "whoever of left, right had not answered is as before" in ran.error
    assert live.reply(queued)["status"] == "aborted"
    assert "has no turns yet" in live.run("%amem history left").text
    assert "False" in live.run("'ran_after_both' in globals()").text


def test_bad_input_stops_the_queue_too(live, tmp_path):
    """Run All does not go on after a refused cell."""
    sent = tmp_path / "sent"  # both are to be in the queue before the first of them runs
    live.send(
        f"import pathlib, time\nwhile not pathlib.Path({str(sent)!r}).exists():\n    time.sleep(0.1)\ntime.sleep(0.5)"
    )
    bad = live.send("%%agent planner --max-tokens 0\nHi")
    queued = live.send("x = 1")
    sent.touch()
    ran = live.wait(bad)
    assert (ran.status, ran.ename) == ("error", "UsageError")
    assert ran.error.startswith("UsageError: --max-tokens")
    assert len(ran.error.splitlines()) == 1
    assert live.reply(queued)["status"] == "aborted"


def executed(*sources):
    """A notebook with these cells, executed by nbclient."""
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, "%load_ext amem_jupyter", *sources)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    return client.execute()


def test_what_nbclient_saves_needs_no_kernel_to_be_read():
    """HTML and text in every output, no widget view, metrics in the metadata."""
    notebook = executed("%%agent planner\nHi", "%amem map planner", "%agent planner Again", "%amem status")
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    assert outputs
    assert all(set(output.data) == {"text/html", "text/plain"} for output in outputs)
    assert [output.metadata.amem.agent for output in outputs if "amem" in output.metadata] == ["planner", "planner"]
    html, _ = (
        pytest.importorskip("nbconvert", reason="needs nbconvert (the lab extra brings it)")
        .HTMLExporter()
        .from_notebook_node(notebook)
    )
    page = html[html.index("<main") :]  # what a viewer such as nbviewer shows
    assert "You said: Hi" in page
    assert "TTFT" in page
    assert "border-left:3px solid" in page
    assert "widgets" not in notebook.metadata
    (drawn,) = [output for output in notebook.cells[3].outputs if "layers" in output.data["text/plain"]]
    assert "400 tokens" in drawn.data["text/plain"]
