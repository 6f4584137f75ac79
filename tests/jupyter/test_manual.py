"""Help, docstrings and handlers all follow the one table."""

from __future__ import annotations

from amem_jupyter.commands import BY_NAME, MAGICS, SUBCOMMANDS
from amem_jupyter.magics import AmemMagics
from amem_jupyter.manual import describe, overview, usage
from amem_jupyter.subcommands import Subcommands


def test_every_row_has_its_method_and_every_method_its_row():
    """No command without effect, and none that help does not tell."""
    handlers = {name.removeprefix("_") for name, value in vars(Subcommands).items()
                if callable(value) and name.startswith("_") and not name.startswith("__")}  # fmt: skip
    assert set(BY_NAME) <= handlers
    assert handlers - set(BY_NAME) == {"agent", "agents_of", "changed", "each", "open"} - set(BY_NAME)


def test_every_command_that_people_are_promised_is_there():
    """And no other."""
    promised = (
        "status load agents map tree history fork rewind checkout evict restore pin unpin delete export import verify why "
        "wait cancel release space prefetch fidelity serve snapshot capacity config help"
    )
    assert set(BY_NAME) == set(promised.split())
    flags = (
        "--max-tokens --temperature --top-p --seed --stop --system --into --format --raw --append --cached --background "
        "--dry-run --from"
    )
    assert {option.flag for option in MAGICS["%%agent"].options} == set(flags.split())
    assert {option.flag for option in MAGICS["%%agents"].options} == set(flags.split()) - {"--system"}


def test_the_overview_has_a_line_for_each_command():
    """And fits a screen."""
    lines = overview().splitlines()
    for command in SUBCOMMANDS:
        assert any(line.startswith(f"%amem {command.name}") and command.summary in line for line in lines)
    assert all(len(line) <= 120 for line in lines)


def test_one_command_is_described_with_all_its_options():
    """Usage, summary, options, notes."""
    text = describe(MAGICS["%%agent"])
    assert text.startswith("%%agent NAME [options], with the message in the lines below\n")
    for option in MAGICS["%%agent"].options:
        assert option.flag in text
        assert option.help in text


def test_usage_is_one_line_for_each():
    """As an error shows it."""
    assert usage(BY_NAME["fork"]) == "%amem fork NAME NEW [--at TURN] [--keep-last N] [--replace]"
    assert usage(BY_NAME["evict"]) == "%amem evict NAME ..."
    assert usage(MAGICS["%agent"]) == "%agent NAME [options] TEXT"


def test_docstrings_are_the_help():
    """`%%agent?` tells the same as `%amem help agent`."""
    assert describe(MAGICS["%%agent"]) in AmemMagics.agent.__doc__
    assert describe(MAGICS["%agent"]) in AmemMagics.agent.__doc__
    assert AmemMagics.amem.__doc__ == overview()
