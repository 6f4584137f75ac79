"""Turns that find no room on the disk, and state that a quota took: what is remembered, saved later, computed again."""

import contextlib
import os
import shutil
import subprocess

import pytest

from amem import Engine, Match, Residency
from amem.store import faults
from tests.tiny import write_tiny_model

LONG = "a list of many words " * 30
MESSAGES = ["Hello.", LONG * 2, "And then?", "Go on. " * 30, "The end."]
WINDOWED = {"sliding_window": 128, "sliding_window_pattern": 2, "head_dim": 32, "query_pre_attn_scalar": 32}


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model(request, tmp_path_factory):
    """A model, one of them with windowed layers, whose old blocks are not in memory any more."""
    config = WINDOWED if request.param == "gemma3_text" else {}
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / request.param, request.param, **config)


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    """Replies of an engine that nothing happens to."""
    with Engine(model, tmp_path_factory.mktemp("undisturbed"), memory="200MB") as engine:
        return [engine.agent("planner").ask(message, max_tokens=8).token_ids for message in MESSAGES]


def no_room(engine, kinds=("block", "snapshot", "commit")):
    """From now on nothing of these kinds can be written by this process, as on a full disk."""

    def fail(reached):
        if reached.split(".")[0] in kinds and (reached == "commit.rows" or "commit" not in reached):
            raise OSError(28, "No space left on device")

    faults.hook = fail


@pytest.fixture(autouse=True)
def room_again():
    yield
    faults.hook = None


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("kinds", [("block", "snapshot"), ("block", "snapshot", "commit")])
def test_unsaved_turns_are_remembered_and_saved_once_there_is_room(model, undisturbed, tmp_path, kinds, evicted):
    """The replies are those of an undisturbed engine all the way, and after a restart nothing is missing."""
    with Engine(model, tmp_path, memory="200MB") as engine:
        agent = engine.agent("planner")
        replies = [agent.ask(MESSAGES[0], max_tokens=8)]
        no_room(engine, kinds)
        for number in (1, 2):
            replies.append(agent.ask(MESSAGES[number], max_tokens=8))
            assert not replies[-1].metrics.saved
            assert any("not saved" in note for note in replies[-1].metrics.notes)
            assert not agent.status.saved
            assert MESSAGES[: number + 1] == [turn.prompt for turn in agent.turns]
            assert engine.verify().problems == []
        if evicted:
            agent.evict()
        faults.hook = None
        replies.append(agent.ask(MESSAGES[3], max_tokens=8))
        assert replies[-1].metrics.saved
        assert agent.status.saved
        n_tokens = agent.status.n_tokens
        assert engine.verify().problems == []
    with Engine(model, tmp_path, memory="200MB") as engine:
        agent = engine.agent("planner")
        assert MESSAGES[:4] == [turn.prompt for turn in agent.turns]
        replies.append(agent.ask(MESSAGES[4], max_tokens=8))
        assert n_tokens == replies[-1].metrics.reused_tokens
        assert engine.verify().problems == []
    if not evicted:  # what is computed again in other chunks may differ in rounding
        assert undisturbed == [reply.token_ids for reply in replies]


def test_what_was_never_saved_is_gone_after_a_restart_and_nothing_else(model, tmp_path):
    """A held turn is this process's alone, and the store is as sound as before."""
    with Engine(model, tmp_path, memory="200MB") as engine:
        agent = engine.agent("planner")
        agent.ask(MESSAGES[0], max_tokens=8)
        no_room(engine)
        agent.ask(MESSAGES[1], max_tokens=8)
        assert 2 == len(agent.turns)
    faults.hook = None
    with Engine(model, tmp_path, memory="200MB") as engine:
        agent = engine.agent("planner")
        assert MESSAGES[:1] == [turn.prompt for turn in agent.turns]
        assert Match.EXTEND is agent.ask("Go on.", max_tokens=3).metrics.match
        assert engine.verify().problems == []


def test_text_is_saved_where_only_blocks_find_no_room(model, tmp_path):
    """After a restart the conversation goes on: what has no blocks is computed again."""
    with Engine(model, tmp_path, memory="200MB") as engine:
        no_room(engine, ("block", "snapshot"))
        for message in MESSAGES[:2]:
            assert not engine.agent("planner").ask(message, max_tokens=8).metrics.saved
    faults.hook = None
    with Engine(model, tmp_path, memory="200MB") as engine:
        agent = engine.agent("planner")
        assert MESSAGES[:2] == [turn.prompt for turn in agent.turns]
        assert Residency.COLD is agent.status.residency
        assert agent.ask("Go on.", max_tokens=3).metrics.saved


def test_a_quota_that_takes_the_blocks_of_an_agent_in_memory(model, undisturbed, tmp_path):
    """It goes on from memory, bit for bit, and what was taken is written again."""
    with Engine(model, tmp_path, memory="200MB") as engine:
        agent = engine.agent("planner")
        replies = [agent.ask(message, max_tokens=8).token_ids for message in MESSAGES[:2]]
        (store,) = [session.store for session in engine._roster.sessions.values()]
        store.find(engine._parts.realm, [])  # what was found last is spared
        snapshots, blocks = store.evictable()
        store.evict([*snapshots, *blocks])
        assert Residency.HOT is agent.status.residency
        last = agent.ask(MESSAGES[2], max_tokens=8)
        replies.append(last.token_ids)
        assert last.metrics.saved
        assert engine.verify().problems == []
        n_tokens = agent.status.n_tokens
    with Engine(model, tmp_path, memory="200MB") as engine:
        reply = engine.agent("planner").ask(MESSAGES[3], max_tokens=8)
        assert n_tokens == reply.metrics.reused_tokens
        if last.metrics.reused_tokens:
            assert undisturbed[:4] == [*replies, reply.token_ids]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MB; skipped where it cannot be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=3m", "amem", str(place)]
    if mount is None or subprocess.run([mount, *options], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_full_and_has_room_again(model, undisturbed, small_disk):
    """For real: a file fills the disk, and is removed later."""
    with Engine(model, small_disk / "store", memory="200MB") as engine:
        agent = engine.agent("planner")
        replies = [agent.ask(MESSAGES[0], max_tokens=8)]
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert os.statvfs(small_disk).f_bavail < 2
        replies += [agent.ask(message, max_tokens=8) for message in MESSAGES[1:3]]
        assert [True, False, False] == [reply.metrics.saved for reply in replies]
        assert MESSAGES[:3] == [turn.prompt for turn in agent.turns]
        filler.unlink()
        replies.append(agent.ask(MESSAGES[3], max_tokens=8))
        assert replies[-1].metrics.saved
    with Engine(model, small_disk / "store", memory="200MB") as engine:
        replies.append(engine.agent("planner").ask(MESSAGES[4], max_tokens=8))
        assert MESSAGES == [turn.prompt for turn in engine.agent("planner").turns]
        assert engine.verify().problems == []
    assert undisturbed == [reply.token_ids for reply in replies]
