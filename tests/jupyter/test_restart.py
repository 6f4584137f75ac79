"""Two real kernels on one store, with the bundled model: the agent goes on as if nothing had happened."""

from __future__ import annotations

import ast

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
