"""The figures are drawn from what the result files have."""

from __future__ import annotations

import json

import pytest

from benchmarks.readme import MEASUREMENTS, ROOT

figures = pytest.importorskip("benchmarks.figures", reason="the bench extra is not installed")


def _row(n_history, *peers):
    return {
        "case": "next",
        "n_history": n_history,
        "n_message": 42,
        "medians": {peer: {"ttft_s": 0.2} for peer in peers},
        "samples": {peer: [{"bytes_written": 2_000_000, "state_bytes": 9_000_000}] for peer in peers},
    }


@pytest.mark.parametrize("draw", [figures.next_turn, figures.written])
def test_a_peer_has_a_line_over_the_lengths_at_which_it_was_measured(tmp_path, draw):
    """One that a row lacks, or all of them, does not stop the others."""
    draw({"rows": [_row(600, "amem"), _row(7400, "amem", "transformers")]}, tmp_path / "figure.svg")
    assert "<!-- transformers" in (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "llama" not in (tmp_path / "figure.svg").read_text(encoding="utf-8")


def test_every_figure_is_shown_once_its_result_is_there():
    """On a page, and drawn."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", MEASUREMENTS))
    for name, (source, _) in figures.FIGURES.items():
        if (ROOT / "benchmarks" / "results" / f"{source}.json").exists():
            assert f"images/{name}.svg)" in pages
            assert (figures.IMAGES / f"{name}.svg").exists()


def test_memory_is_drawn_as_what_agents_add(tmp_path):
    """Growth since the first row, of each codec, by both accounts."""
    file = ROOT / "benchmarks" / "results" / "memory.json"
    figures.memory(json.loads(file.read_text(encoding="utf-8")), tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text(encoding="utf-8")
    for codec in ("q4", "fp16"):
        assert f"<!-- {codec}, growth of the process" in drawn
