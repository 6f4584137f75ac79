"""Which cell is running."""

from __future__ import annotations

import pytest

from amem_jupyter.cells import Cells


@pytest.fixture
def cells(shell):
    cells = Cells(shell)
    cells.attach()
    yield cells
    cells.detach()


def test_each_execution_has_its_own_token(shell, cells):
    """Also of the same cell."""
    seen = []
    shell.user_ns["see"] = lambda: seen.append((cells.cell_id, cells.execution))
    shell.run_cell("see(); see()", cell_id="a")
    shell.run_cell("see()", cell_id="a")
    shell.run_cell("see()", cell_id="vscode-notebook-cell:/n.ipynb#W1")
    assert [cell for cell, _ in seen] == ["a", "a", "a", "vscode-notebook-cell:/n.ipynb#W1"]
    assert seen[0] == seen[1]
    assert len({token for _, token in seen}) == 3


def test_code_that_a_cell_runs_belongs_to_it(shell, cells):
    """%run, run_cell and the like are the same execution, before and after."""
    seen = []
    shell.user_ns["see"] = lambda: seen.append((cells.cell_id, cells.execution))
    shell.run_cell("see(); get_ipython().run_cell('see()'); see()", cell_id="a")
    assert len(set(seen)) == 1
    assert seen[0][0] == "a"


def test_a_failing_cell_ends_too(shell, cells):
    """The next one is another."""
    ends = []
    cells.at_end.append(lambda: ends.append(cells.cell_id))
    shell.run_cell("1 / 0", cell_id="a")
    shell.run_cell("raise KeyboardInterrupt", cell_id="b")
    shell.run_cell("this is no Python", cell_id="c")
    assert ends == ["a", "b", "c"]


def test_a_cell_that_was_ended_hard_is_not_mistaken_for_the_next_one(shell, cells):
    """Another request's message id shows that a new cell runs, even if the end of the old one was never told."""
    messages = iter(["m1", "m2"])
    shell.get_parent = lambda: {"header": {"msg_id": current}, "metadata": {}}

    class Info:
        cell_id = "a"

    current = next(messages)
    cells._before(Info())
    first = cells.execution
    current = next(messages)
    Info.cell_id = "b"
    cells._before(Info())
    assert cells.cell_id == "b"
    assert cells.execution != first


def test_the_cell_that_loads_the_extension_is_known_from_its_request(shell):
    """Its own start was never told to us."""
    shell.get_parent = lambda: {"header": {"msg_id": "m"}, "metadata": {"cellId": "a"}}
    assert Cells(shell).cell_id == "a"
