"""Agents that begin as another one."""

import numpy as np
import pytest

from amem.errors import AgentLocked, InputError
from amem.store import Store, files, verify
from tests.store.samples import OTHER, REALM, SPACE, check, say

IDS = np.arange(900)


def test_a_fork_shares_every_file_and_copies_nothing(store):
    """Blocks, tails and snapshots of its path are links; the two go separate ways from there."""
    agent = store.open("planner", SPACE)
    agent.set_meta("system", "You plan.")
    say(agent, None, IDS[:600])
    say(agent, 1, IDS[600:])
    side = say(agent, 1, IDS[:500])
    agent.realize(1, OTHER, [1, 2, 3], 3)
    before = store.written.payload
    fork = agent.fork("variant", SPACE, at=2)
    assert before == store.written.payload
    assert ({1, 2}, 2, {"system": "You plan."}) == (set(fork.turns()), fork.head, fork.meta)
    assert check(fork, IDS) == 900
    assert fork.path_tokens(1, OTHER).tolist() == [1, 2, 3]
    assert fork.find(REALM, np.concatenate([IDS[:599], [0]])).n_tokens == 576
    assert all(fork.shared(block.id) and agent.shared(block.id) for block in fork.find(REALM, IDS).blocks)
    assert not agent.shared(agent.realization(side.id, REALM).last_block)
    say(fork, 2, IDS[:300])
    say(agent, 2, IDS[300:600])
    assert check(agent, np.concatenate([IDS, IDS[:30]])) == 900
    files_of = {path.stat().st_ino: path.stat().st_size for path in store.root.rglob("*.safetensors")}
    assert sum(files_of.values()) == store.written.payload
    with pytest.raises(InputError, match="already"):
        agent.fork("variant", SPACE)
    assert verify(store).problems == []


def test_a_fork_outlives_its_source(store):
    """Deleting one of the two leaves the other whole, and says how many files live on."""
    agent = store.open("planner", SPACE)
    say(agent, None, IDS)
    agent.fork("variant", SPACE)
    deleted = agent.delete()
    assert deleted.n_shared == 5
    variant = store.open("variant 2", SPACE)
    variant.close()
    assert sorted(entry.name for entry in store.agents()) == ["variant", "variant 2"]
    with Store(store.root) as other, pytest.raises(AgentLocked):
        other.open("variant", SPACE)


def test_a_fork_copies_where_links_are_impossible(store, monkeypatch):
    """On a file system without hard links the files are copied, and counted as written."""
    agent = store.open("planner", SPACE)
    say(agent, None, IDS)

    def no_link(source, target):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.os, "link", no_link)
    before = store.written.payload
    fork = agent.fork("variant", SPACE)
    assert before < store.written.payload
    assert check(fork, IDS) == 900
    assert not fork.shared(fork.find(REALM, IDS).blocks[0].id)


def test_an_empty_agent_is_forked(store):
    """There is nothing to share yet, and that is no error."""
    fork = store.open("planner", SPACE).fork("variant", SPACE)
    assert (fork.head, fork.turns()) == (None, {})
