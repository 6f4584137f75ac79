"""Notebooks that papermill runs: parameters in, cards and metrics out."""

from __future__ import annotations

import nbformat
import papermill
import pytest

from tests.jupyter.kernels import ROOT

SETUP = "from tests.jupyter import scripted\nscripted.install()\n%load_ext amem_jupyter"


def run(tmp_path, *sources, **parameters):
    """The executed notebook; its first cell after the set-up has the parameters."""
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, "topic = 'nothing'", *sources)]
    cells[1].metadata["tags"] = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    source, target = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), source)
    papermill.execute_notebook(source, target, parameters, cwd=str(ROOT), progress_bar=False, kernel_name="python3")
    return nbformat.read(target, as_version=4)


@pytest.mark.filterwarnings("ignore")  # papermill's own
def test_parameters_reach_the_message_and_the_cards_are_kept(tmp_path):
    """Every output is HTML and text, with the metrics where a pipeline finds them."""
    notebook = run(
        tmp_path, "%%agent planner\nAbout {{topic}}.", "%amem map planner",
        "%%agent critic --background\nAbout {{topic}} too.", "%amem wait", topic="cats",
    )  # fmt: skip
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "\n".join(output.data["text/plain"] for output in outputs)
    assert "You said: About cats." in text
    assert "You said: About cats too." in text
    assert all(set(output.data) == {"text/html", "text/plain"} for output in outputs)
    asked = [output.metadata.amem.agent for output in outputs if "amem" in output.metadata]
    assert asked == ["planner", "critic"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("waits", ["%amem wait", "late.text", "%%agent planner\n{{late.text}}"])
def test_a_card_that_ends_after_its_cell_is_kept(tmp_path, waits):
    """A client that runs one cell after the other drops what comes from an earlier cell."""
    notebook = run(
        tmp_path, "scripted.script.enqueue('It', ' came', ' late.', delay_s=0.5)",
        "%%agent critic --background --into late\nHi", waits,
    )  # fmt: skip
    (card,) = [output for output in notebook.cells[-2].outputs if "amem" in output.metadata]
    assert "It came late." in card.data["text/plain"]


@pytest.mark.filterwarnings("ignore")
def test_the_cards_of_several_that_end_after_their_cell_are_kept(tmp_path):
    """All of them, in the one output that they share."""
    late = "scripted.script.enqueue('It', ' came', ' late.', delay_s=0.5)"
    notebook = run(tmp_path, late, late, "%%agents critic planner --background\nHi", "%amem wait")
    (card,) = [output for output in notebook.cells[-2].outputs if "amem" in output.metadata]
    assert card.data["text/plain"].count("It came late.") == 2
    assert [found["agent"] for found in card.metadata.amem.agents] == ["critic", "planner"]


@pytest.mark.filterwarnings("ignore")
def test_a_refused_cell_stops_the_run(tmp_path):
    """With its one line in the error."""
    with pytest.raises(papermill.PapermillExecutionError) as caught:
        run(tmp_path, "%%agent planner --max-tokens 0\nHi", "1 / 0")
    assert caught.value.ename == "UsageError"
    assert caught.value.evalue.startswith("--max-tokens must be a whole number")
