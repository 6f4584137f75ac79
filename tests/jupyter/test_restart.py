"""Two real kernels on one store, with the bundled model: the agent goes on as if nothing had happened."""

from __future__ import annotations

import ast

import nbformat
import pytest

from tests.jupyter.kernels import kernel

FIRST = '%%agent {name} --max-tokens 12 --system "You answer in one sentence."\nName three fruits that grow on trees.'
SECOND = "%%agent {name} --max-tokens 12\nWhich of them is red?"


def tokens_of(live):
    """The tokens of the last reply."""
    return ast.literal_eval(live.run("print(list(_.token_ids))").stream)


@pytest.fixture(scope="module")
def restarted(bundled_model_path, tmp_path_factory):
    """What an uninterrupted agent said in one kernel, and its twin's second kernel, still running."""
    store = tmp_path_factory.mktemp("store")
    environment = {"AMEM_STORE": str(store), "AMEM_MODEL": str(bundled_model_path)}
    with kernel(**environment) as live:
        assert live.run("%load_ext amem_jupyter").status == "ok"
        for name in ("planner", "twin"):
            assert live.run(FIRST.format(name=name), f"first-{name}").status == "ok"
        uninterrupted = live.run(SECOND.format(name="planner"), "second")
        assert uninterrupted.status == "ok"
        expected = tokens_of(live)
    with kernel(**environment) as live:
        assert live.run("%load_ext amem_jupyter").status == "ok"
        yield live, expected, uninterrupted.metrics[0]


def test_the_greedy_reply_after_a_restart_is_that_of_an_uninterrupted_agent(restarted):
    """Token for token, from state that was read and not computed."""
    live, expected, before = restarted
    ran = live.run(SECOND.format(name="twin"), "second-twin")
    assert ran.status == "ok"
    assert tokens_of(live) == expected
    (metrics,) = ran.metrics
    assert metrics["match"] == "EXTEND"
    assert metrics["residency"] == "warm"
    assert metrics["reused_tokens"] == before["reused_tokens"] > 0
    assert metrics["computed_tokens"] == before["computed_tokens"]


def test_an_interrupt_in_mid_stream_leaves_the_agent_and_stops_the_queued_cells(restarted):
    """With the real engine under it."""
    live, _, _ = restarted
    live.run("%amem load")
    before = live.run("%amem history twin").text
    long = live.send("%%agent twin --max-tokens 400\nTell a long story about a tree, with many details.", "long")
    queued = live.send("ran_after_all = True")
    live.wait(long, until="writing")
    live.manager.interrupt_kernel()
    ran = live.wait(long)
    assert (ran.status, ran.ename) == ("error", "KeyboardInterrupt")
    assert "interrupted; twin is as it was before" in ran.text
    assert live.reply(queued)["status"] == "aborted"
    assert live.run("%amem history twin").text == before
    assert "False" in live.run("'ran_after_all' in globals()").text
    again = live.run("%%agent twin --max-tokens 4\nAnd now?", "after")
    assert again.status == "ok"


def notebook_at(path, *ids):
    """A saved notebook with these cells."""
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", id=name) for name in ids]), path)
    return path


def test_a_renamed_notebook_goes_on_and_a_copy_starts_anew(bundled_model_path, tmp_path):
    """By the ids of its cells, and whether its old path is gone; the state comes along, not only the text."""
    environment = {"AMEM_STORE": str(tmp_path / "store"), "AMEM_MODEL": str(bundled_model_path)}
    old = notebook_at(tmp_path / "old.ipynb", "one", "two")
    with kernel(JPY_SESSION_NAME=str(old), **environment) as live:
        live.run("%load_ext amem_jupyter")
        assert live.run("%%agent planner --max-tokens 4\nName three fruits that grow on trees.", "one").status == "ok"
    copy = notebook_at(tmp_path / "copy.ipynb", "one", "two")
    with kernel(JPY_SESSION_NAME=str(copy), **environment) as live:
        live.run("%load_ext amem_jupyter")
        assert "no agents yet" in live.run("%amem agents").text
    new = old.rename(tmp_path / "new.ipynb")
    with kernel(JPY_SESSION_NAME=str(new), **environment) as live:
        live.run("%load_ext amem_jupyter")
        ran = live.run("%%agent planner --max-tokens 4\nWhich of them is red?", "two")
        assert f"this notebook was at {old}; its agents came along: planner" in ran.text
        (metrics,) = ran.metrics
        assert (metrics["match"], metrics["residency"]) == ("EXTEND", "warm")


def test_a_second_kernel_on_the_same_notebook_has_a_choice(restarted, bundled_model_path):
    """Its error says who has the agent, and what to do; with a space of its own it answers."""
    live, _, _ = restarted
    store = ast.literal_eval(live.run("import os; print(repr(os.environ['AMEM_STORE']))").stream)
    with kernel(AMEM_STORE=store, AMEM_MODEL=str(bundled_model_path)) as other:
        other.run("%load_ext amem_jupyter")
        ran = other.run("%%agent twin --max-tokens 2\nHello?", "c")
        assert (ran.status, ran.ename) == ("error", "UsageError")
        assert "is in use by process" in ran.error
        assert "loaded in" not in ran.text
        assert ran.error.endswith("Or give this kernel agents of its own: %amem space NAME")
        assert "planner" in other.run("%amem status").text
        assert other.run("%amem space mine").status == "ok"
        assert other.run("%%agent twin --max-tokens 2\nHello?", "c").status == "ok"
    assert live.run("%%agent twin --max-tokens 2\nStill there?", "last").status == "ok"
