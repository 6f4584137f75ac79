"""README and the measurements page say what was measured."""

from __future__ import annotations

import pytest

from benchmarks.readme import MEASUREMENTS, PAGES, README, peers_table, rendered


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_measured_parts_are_those_of_the_result_files(page):
    """Made anew from the committed JSON they are the same; `python -m benchmarks.readme` makes them so."""
    assert rendered(page) == page.read_text(encoding="utf-8")


def _capacity_rows(text):
    rows = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == 8 and "---" not in line]
    return [row for row in rows if row.split()[3] in {"4K", "8K", "16K", "32K"}]


def test_the_capacity_tables_are_what_the_command_prints(capsys):
    """All of its rows on the measurements page, and some of them in README."""
    from amem.cli import main

    assert main(["capacity"]) == 0
    printed = _capacity_rows(capsys.readouterr().out)
    assert len(printed) > 30
    assert _capacity_rows(MEASUREMENTS.read_text(encoding="utf-8")) == printed
    shown = _capacity_rows(README.read_text(encoding="utf-8"))
    assert shown
    assert [row for row in printed if row in shown] == shown


def test_peers_are_shown_as_their_result_file_has_them():
    """A row for each length, and one for each prompt without history."""
    times = {"amem": 0.5, "mlx-lm": 0.75, "mlx-lm q4": 6.0}
    result = {
        "machine": {"date": "2026-01-02 03:04", "cores": 2, "versions": {"mlx-lm": "0.32.2"}},
        "rows": [{"n_history": 600, "n_message": 40,
                  "medians": {peer: {"ttft_s": time} for peer, time in times.items()},
                  "samples": {peer: [{}] * 5 for peer in times}}],
        "cold": [{"n_tokens": 577, "samples": {peer: {"ttft_s": 10 * time} for peer, time in times.items()}}],
    }  # fmt: skip
    table = peers_table(result)
    assert "| 600 + 40 tokens | 0.50 s | 0.75 s | 6.00 s |" in table
    assert "| nothing + 577 tokens | 5.0 s | 7.5 s | 60.0 s |" in table
    assert "medians of 5" in table
