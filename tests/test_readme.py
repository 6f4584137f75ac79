"""README and the measurements page say what was measured."""

from __future__ import annotations

import pytest

from benchmarks import peer_tables
from benchmarks.readme import MEASUREMENTS, PAGES, README, rendered


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_measured_parts_are_those_of_the_result_files(page):
    """Made anew from the committed JSON they are the same; `python -m benchmarks.readme` makes them so."""
    assert rendered(page) == page.read_text(encoding="utf-8")


def _capacity_rows(text):
    rows = [line for line in text.splitlines() if line.startswith("| ") and line.count("|") == 8 and "---" not in line]
    return [row for row in rows if row.split()[3] in {"4K", "8K", "16K", "32K"}]


def test_the_capacity_tables_are_what_the_command_prints(capsys):
    """All of its rows, on the measurements page and in README."""
    from amem.cli import main

    assert main(["capacity"]) == 0
    printed = _capacity_rows(capsys.readouterr().out)
    assert len(printed) > 30
    for page in (MEASUREMENTS, README):
        assert _capacity_rows(page.read_text(encoding="utf-8")) == printed


def _peers(**options):
    times = {"amem": 0.5, "mlx-lm": 0.75, "mlx-lm q4": 6.0, **options}

    def row(case, length, n_history, n_message, factor, n_samples):
        figures = {peer: {"ttft_s": factor * time, "restore_s": 0.1 * time, "process_to_first_token_s": 2.0,
                          "prefill_tokens_per_s": 10 / time, "decode_tokens_per_s": 20 / time}
                   for peer, time in times.items()}  # fmt: skip
        samples = {peer: [{"state_bytes": 2_000_000}] * n_samples for peer in times}
        found = {"torch": "2.13.0", "transformers": "5.24.0", "optimum-quanto": "0.2.7"}
        versions = {"transformers": found} if "transformers" in times else {}
        return {"case": case, "length": length, "n_history": n_history, "n_message": n_message, "versions": versions,
                "medians": figures, "samples": samples}  # fmt: skip

    versions = {"mlx-lm": "0.32.2"} | ({"llama-cpp-python": "0.3.9"} if "llama.cpp f16" in options else {})
    return {
        "machine": {"date": "2026-01-02 03:04", "cores": 2, "processor": "Fast", "versions": versions},
        "rows": [
            row("next", 512, 600, 40, 1, 5),
            row("again", 512, 576, 1, 1, 5),
            row("cold", 512, 0, 577, 10, 1),
        ],
        "row": row,
    }


def test_peers_are_shown_as_their_result_file_has_them():
    """A row for each length, and one for each prompt without history."""
    table = peer_tables.short_table(_peers())
    assert "| 600 + 40 tokens | 0.50 s | 0.75 s | 6.00 s |" in table
    assert "| nothing + 577 tokens | 5.00 s | 7.50 s | 60.00 s |" in table
    assert "medians of 5, one sample of what takes over a minute" in table
    assert "Beside stock mlx-lm 0.32.2, each with" in table
    assert "576" not in table
    assert "llama" not in table
    assert "Transformers" not in table


def test_all_figures_of_the_peers_are_on_the_measurements_page():
    """Those that were measured and no others; llama.cpp where it was installed."""
    table = peer_tables.tables(_peers(**{"llama.cpp f16": 0.25}))
    assert "| 600 + 40 tokens | 500 ms (50) | 750 ms (75) | 6000 ms (600) | 250 ms (25) |" in table
    assert "| 577 tokens | 500 ms (50) | 750 ms (75) | 6000 ms (600) | 250 ms (25) |" in table
    assert "| 577 tokens | 20 | 13 | 2 | 40 |" in table
    assert "| 600 tokens | 40.0 | 26.7 | 3.3 | 80.0 |" in table
    assert "| 600 tokens | 2.0 MB | 2.0 MB | 2.0 MB | 2.0 MB |" in table
    assert "q4_0 |" not in table


def test_transformers_is_told_with_the_versions_of_its_own_environment():
    """It is not among this environment's packages."""
    result = _peers(**{"llama.cpp f16": 0.25, "transformers": 0.125})
    short = peer_tables.short_table(result)
    assert (
        "Beside stock mlx-lm 0.32.2, llama.cpp (llama-cpp-python 0.3.9) and Transformers 5.24.0 (torch 2.13.0), each"
        in short
    )
    assert "| 600 + 40 tokens | 0.50 s | 0.75 s | 6.00 s | 0.25 s | 0.12 s |" in short
    assert "optimum-quanto's 0.2.7" in peer_tables.tables(result)


def test_a_peer_that_one_row_lacks_has_a_dash_there():
    """Rows may be measured at different times, with other peers beside amem."""
    result = _peers(**{"llama.cpp f16": 0.25})
    del result["rows"][2]["medians"]["llama.cpp f16"], result["rows"][2]["samples"]["llama.cpp f16"]
    short = peer_tables.short_table(result)
    assert "| 600 + 40 tokens | 0.50 s | 0.75 s | 6.00 s | 0.25 s |" in short
    assert "| nothing + 577 tokens | 5.00 s | 7.50 s | 60.00 s | - |" in short
    assert "| 577 tokens | 20 | 13 | 2 |\n" in peer_tables.tables(result)


def test_ratios_are_told_once_the_length_was_measured():
    """The others' times at 4K as multiples of amem's, whoever is sooner."""
    result = _peers(**{"llama.cpp f16": 0.25})
    assert "multiples" not in peer_tables.short_table(result)
    result["rows"].append(result["row"]("next", 4096, 4352, 42, 2, 5))
    for made in (peer_tables.short_table(result), peer_tables.tables(result)):
        assert "After 4352 tokens the others' times to first token are these multiples of amem's" in made
        assert "mlx-lm, float32 cache 1.5; mlx-lm, 4-bit cache 12.0; llama.cpp, f16 0.5." in made


@pytest.mark.parametrize(("factor", "told"), [(1.2, "+100 ms"), (1.4, "+200 ms"), (2.0, "+500 ms")])
def test_what_the_first_token_takes_longer_after_7000_tokens_is_told(factor, told):
    """Beside the aim, and whether it was met; only if both lengths were measured."""
    result = _peers()
    result["rows"].append(result["row"]("next", 1024, 1118, 42, 1, 5))
    assert "the aim" not in peer_tables.tables(result)
    result["rows"].append(result["row"]("next", 7000, 7442, 42, factor, 5))
    made = peer_tables.tables(result)
    assert f"From 1118 to 7442 tokens of history amem's time to first token changes by {told} (the aim" in made
    assert ("missed" if factor > 1.4 else "met") in made
    assert f"mlx-lm, float32 cache {0.75 * (factor - 1) * 1e3:+.0f} ms" in made
    assert "| 7442 + 42 tokens |" in made
