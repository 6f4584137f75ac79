"""README says what was measured."""

from benchmarks.readme import README, rendered


def test_the_measured_parts_are_those_of_the_result_files():
    """Made anew from the committed JSON they are the same; `python -m benchmarks.readme` makes them so."""
    text = README.read_text(encoding="utf-8")
    assert rendered(text) == text


def test_the_capacity_table_is_what_the_command_prints(capsys):
    """Each of its rows."""
    from amem.cli import main

    assert main(["capacity"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "---" not in line]
    text = README.read_text(encoding="utf-8")
    assert len(rows) > 30
    assert all(row in text for row in rows)
