"""Killed processes, damaged files and a full disk: what is lost, and what is said."""

import signal
import subprocess
import sys

import pytest

from amem import Match
from amem.store import faults

LONG = "a list of many words " * 30
MESSAGES = [LONG, LONG, "The end."]


@pytest.fixture(scope="module")
def uninterrupted(tiny_model_path, tmp_path_factory):
    """Replies of one engine that nothing happens to."""
    from amem import Engine

    with Engine(tiny_model_path, tmp_path_factory.mktemp("undisturbed"), memory="200MB") as engine:
        return [engine.agent("planner").ask(message, max_tokens=20).token_ids for message in MESSAGES]


@pytest.mark.parametrize("point", faults.POINTS)
def test_a_kill_at_any_step_of_a_commit_loses_at_most_that_turn(
    point, tiny_model_path, tmp_path, open_engine, uninterrupted
):
    """The store is sound, the last committed turn is there, and the agent goes on as if nothing had happened."""
    command = [
        sys.executable,
        "-m",
        "tests.engine.crash_child",
        tiny_model_path,
        tmp_path / "store",
        point,
        *MESSAGES[:2],
    ]
    died = subprocess.run(command, check=False, capture_output=True)
    assert -signal.SIGKILL == died.returncode, died.stderr
    engine = open_engine()
    agent = engine.agent("planner")
    assert [] == engine.verify().problems
    n_turns = len(agent.turns)
    assert n_turns in (1, 2)
    for message, wanted in list(zip(MESSAGES, uninterrupted, strict=True))[n_turns:]:
        assert wanted == agent.ask(message, max_tokens=20).token_ids


def payloads(tmp_path):
    return sorted(tmp_path.glob("store/agents/*/*.safetensors"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_block_is_named_and_computed_again(damage, open_engine, tmp_path):
    """The reply is given from the longest good prefix, and the card says what was set aside."""
    engine = open_engine()
    engine.agent("planner").ask(LONG, max_tokens=10)
    wanted = engine.agent("planner").fork("twin").ask("Go on.", max_tokens=10)
    engine.agent("twin").delete()
    engine.close()
    victim = payloads(tmp_path)[-1]
    if damage == "remove":
        victim.unlink()
    else:
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 4
        victim.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    agent = open_engine().agent("planner")
    reply = agent.ask("Go on.", max_tokens=10)
    assert reply.metrics.notes
    assert reply.metrics.reused_tokens < wanted.metrics.reused_tokens
    assert wanted.token_ids == reply.token_ids
    assert [LONG, "Go on."] == [turn.prompt for turn in agent.turns]
    assert Match.EXTEND is agent.ask("More.", max_tokens=3).metrics.match
