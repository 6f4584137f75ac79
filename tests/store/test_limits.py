"""Quota, full disks, and several threads."""

import os
import shutil
import subprocess

import numpy as np
import pytest

from amem.errors import StoreError, StoreFull
from amem.store import NewTurn, Store, files, verify
from tests.store.samples import REALM, SPACE, check, say, tensors

IDS = np.arange(900)


def test_the_quota_evicts_snapshots_then_the_least_used_agents_leaves(root):
    """Snapshots go first, then blocks of the agent that was used least recently; text and tokens stay."""
    ids, layers = np.arange(959), 200  # a snapshot and a group have 130 KB each
    with Store(root) as store:
        for name in ("old", "new"):
            agent = store.open(name, SPACE)
            say(agent, None, ids, layers=layers)
            agent.close()
    with Store(root) as store:
        full = store.disk_bytes
    with Store(root, disk_quota=full - 50_000) as store:
        assert store.enforce_quota() > 0
        old, new = store.open("old", SPACE), store.open("new", SPACE)
        assert (check(old, ids, layers=layers), check(new, ids, layers=layers)) == (896, 959)
        old.close()
        new.close()
    with Store(root, disk_quota=full - 400_000) as store:
        store.enforce_quota()
        assert store.disk_bytes <= full - 400_000
        old, new = store.open("old", SPACE), store.open("new", SPACE)
        assert (check(old, ids, layers=layers), check(new, ids, layers=layers)) == (768, 896)
        assert np.array_equal(old.path_tokens(1, REALM), ids)
        assert (old.realization(1, REALM).tail, old.realization(1, REALM).snapshot) == (None, None)
        assert verify(store).problems == []
        old.close()
        new.close()
    with Store(root, disk_quota=1) as store:
        store.enforce_quota()
        old = store.open("old", SPACE)
        assert (check(old, ids), old.turn(1).reply) == (0, "!")


def test_an_agent_in_another_process_is_not_evicted(root):
    """The lock is respected, and what the last find returned is spared."""
    with Store(root) as other, Store(root, disk_quota=1) as store:
        theirs = other.open("theirs", SPACE)
        say(theirs, None, IDS)
        store._ledger.quota = None
        ours = store.open("ours", SPACE)
        say(ours, None, IDS)
        say(ours, None, IDS + 1)
        assert check(ours, IDS) == 900
        store._ledger.quota = 1
        store.enforce_quota()
        assert check(theirs, IDS) == 900
        assert check(ours, IDS) == 900
        assert check(ours, IDS + 1) == 0


def fill(agent, ids):
    for _ in range(200):
        say(agent, agent.head, ids)


def test_a_full_quota_is_an_error_that_loses_nothing(root):
    """When nothing is left to evict, a turn is refused with StoreFull, and everything old is there."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        say(agent, None, IDS)
    with Store(root, disk_quota=200_000) as store:
        agent = store.open("planner", SPACE)
        assert check(agent, IDS) == 900
        ids = np.arange(3000)
        with pytest.raises(StoreFull, match="quota of 200000 bytes"):
            fill(agent, ids)
        turns = agent.turns()
        assert store.disk_bytes <= 200_000
    with Store(root) as store:
        assert verify(store).problems == []
        assert turns == store.open("planner", SPACE).turns()


@pytest.mark.parametrize(("number", "kind"), [(28, StoreFull), (30, StoreError), (13, StoreError), (5, StoreError)])
def test_errors_of_the_disk_are_explained(agent, monkeypatch, number, kind):
    """No space, a read-only disk, no permission, an I/O error: one clear line, and nothing is left behind."""

    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(kind, match="cannot write a block"):
        say(agent, None, IDS)
    monkeypatch.undo()
    assert list(agent.root.glob("*.safetensors*")) == []
    say(agent, None, IDS)
    assert check(agent, IDS) == 900


def test_blocks_may_be_written_by_several_threads(store):
    """Writing and reading on I/O threads while turns are committed."""
    from concurrent.futures import ThreadPoolExecutor

    agent = store.open("planner", SPACE)
    say(agent, None, IDS)
    with ThreadPoolExecutor(4) as pool:
        written = [
            pool.submit(agent.write_block, REALM, None, 0, IDS[:64] + number, tensors(IDS[:64] + number, 0, 64))
            for number in range(20)
        ]
        read = [pool.submit(check, agent, IDS) for _ in range(20)]
        for _ in range(5):
            say(agent, agent.head, IDS[:10])
        assert {900} == {future.result() for future in read}
        agent.keep([future.result() for future in written])
    assert check(agent, IDS[:64] + 19) == 64
    assert agent.commit(NewTurn(None, "", "", "stop"), REALM, [1], 1).id == 7


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB; skipped where it cannot be mounted."""
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "amem", tmp_path], check=False).returncode
    ):
        pytest.skip("needs the right to mount a small disk")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_loses_nothing(small_disk):
    """Turns are refused with StoreFull from some point on; all before it are there, also after reopening."""
    with Store(small_disk / "store") as store:
        agent = store.open("planner", SPACE)
        with pytest.raises(StoreFull, match="no space left"):
            fill(agent, np.arange(3000))
        turns, head = agent.turns(), agent.head
        with pytest.raises(StoreFull):
            fill(agent, np.arange(100))
    with Store(small_disk / "store") as store:
        agent = store.open("planner", SPACE)
        assert turns.items() <= agent.turns().items()
        assert agent.path(head) == list(turns)
        assert verify(store).problems == []
        store.delete("planner", SPACE)
        assert check(store.open("planner", SPACE), IDS) == 0
