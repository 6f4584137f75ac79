"""Names, locks, forks, deletion, limits, and several processes at once."""

import os
import stat
import time

import numpy as np
import pytest

from amem.errors import AgentLocked, InputError, StoreError, StoreFull
from amem.store import NewTurn, Store, files, verify
from tests.store.child import history, received, run, save_turns
from tests.store.samples import OTHER, REALM, SPACE, check, say, tensors

IDS = np.arange(900)

# -- names


@pytest.mark.parametrize(
    "name",
    [
        "a", "ü", "日本語", "🤖👩‍🚀", "..", ".", "/", "../../etc/passwd", "a/b", "CON", "NUL", "C:\\x", "~", "-rf", " ", "%s", "'; DROP",
        "x" * 128, "🚀" * 128, "index.sqlite3",
    ],
)  # fmt: skip
def test_any_name_of_one_line_works_and_reaches_no_path(root, name):
    """The folder is a random key, whatever the name; and the name comes back as it was given."""
    with Store(root) as store:
        agent = store.open(name, name)
        say(agent, None, IDS[:10])
        assert len(agent.root.name) == 32
        assert root / "agents" == agent.root.parent
    with Store(root) as store:
        assert [(name, name)] == [(entry.name, entry.space) for entry in store.agents()]
        assert check(store.open(name, name, create=False), IDS[:10]) == 10
        store.delete(name, name)
        assert store.agents() == []


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "a\0b", "\t", "\x7f", "\ud800", "a\u2028b", "\r", None, 5])
def test_other_names_are_refused(store, name):
    """Empty, too long, more than a line, control characters, half characters: refused before anything is made."""
    with pytest.raises(InputError):
        store.open(name, SPACE)
    assert store.agents() == []


def test_the_same_name_in_two_spaces(store):
    """Two notebooks that both say planner do not meet."""
    first, second = store.open("planner", "one.ipynb"), store.open("planner", "two.ipynb")
    say(first, None, IDS)
    assert second.find(REALM, IDS).n_tokens == 0
    assert [entry.space for entry in store.agents("one.ipynb")] == ["one.ipynb"]


def test_an_unknown_agent_comes_with_a_hint(store):
    """Opening without create says which agent may have been meant."""
    store.open("planner", SPACE)
    with pytest.raises(InputError, match="did you mean 'planner'"):
        store.open("planer", SPACE, create=False)
    with pytest.raises(InputError, match="none yet"):
        store.delete("x", "empty")


def test_only_the_owner_can_read(root):
    """Folders are 0700, files 0600, whatever the umask."""
    before = os.umask(0)
    try:
        with Store(root) as store:
            say(store.open("planner", SPACE), None, IDS)
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    finally:
        os.umask(before)
    assert {0o700} == {mode for path, mode in modes.items() if path.is_dir()}
    assert {0o600} == {mode for path, mode in modes.items() if path.is_file()}


# -- locks


def test_one_writer_within_a_process(root):
    """Two stores in one process conflict too, and closing lets the next one in."""
    with Store(root) as first, Store(root) as second:
        agent = first.open("planner", SPACE)
        for store in (first, second):
            with pytest.raises(AgentLocked, match=rf"'planner' is in use by this process {os.getpid()} on .* since 20"):
                store.open("planner", SPACE)
        with pytest.raises(AgentLocked):
            second.delete("planner", SPACE)
        assert [entry.name for entry in second.agents()] == ["planner"]
        agent.release()
        second.open("planner", SPACE)
        with pytest.raises(StoreError, match="was closed"):
            agent.turns()


def hold(told, root, name):
    with Store(root) as store:
        store.open(name, SPACE)
        told.send(os.getpid())
        time.sleep(60)


def test_a_lock_between_processes_ends_with_its_holder(root):
    """Another process's agent is refused with its pid; after its death the lock is taken over."""
    child, pipe = run(hold, root, "planner")
    pid = pipe.recv()
    with Store(root) as store:
        with pytest.raises(AgentLocked, match=f"process {pid} on "):
            store.open("planner", SPACE)
        assert [f"process {pid}" in text for text in verify(store).skipped] == [True]
        store.open("critic", SPACE)
        child.kill()
        child.join()
        say(store.open("planner", SPACE), None, IDS)


def test_a_brief_holder_is_waited_for(root):
    """Eviction and verify hold an agent for a moment: opening it then waits instead of failing."""
    import threading

    with Store(root) as store, Store(root) as other:
        store.open("planner", SPACE).close()
        (key,) = store.keys_by_use()
        with store.borrow(key):
            waiting = threading.Thread(target=lambda: other.open("planner", SPACE))
            waiting.start()
            waiting.join(0.1)
            assert waiting.is_alive()
        waiting.join(10)
        assert {key} == other.open_keys()


def create(told, root, name):
    with Store(root) as store:
        try:
            agent = store.open(name, SPACE)
            time.sleep(1)
            told.send(agent.key)
        except AgentLocked:
            told.send(None)


def test_a_name_is_given_once(root):
    """Processes that create the same agent at the same time make one agent, and one of them writes it."""
    children = [run(create, root, "planner") for _ in range(4)]
    keys = [key for _, pipe in children for key in received(pipe) if key is not None]
    for child, _ in children:
        child.join()
    with Store(root) as store:
        assert keys == [entry.key for entry in store.agents()]


def many_processes(root, processes, turns):
    children = [run(save_turns, root, f"agent {number}", turns, None, 0) for number in range(processes)]
    for child, pipe in children:
        assert turns == len(list(received(pipe)))
        child.join()
        assert child.exitcode == 0
    with Store(root) as store:
        report = verify(store)
        assert ([], processes) == (report.problems, report.agents)
        assert {turns} == {entry.n_turns for entry in store.agents()}
        ids = np.concatenate([history(number) for number in range(1, turns + 1)])
        for number in range(processes):
            assert len(ids) == check(store.open(f"agent {number}", SPACE), ids)


def test_several_processes_leave_a_clean_store(root):
    """Different agents of one store are written by several processes at once."""
    many_processes(root, 4, 6)


@pytest.mark.soak
def test_eight_processes_of_fifty_turns_leave_a_clean_store(root):
    """As above, for longer."""
    many_processes(root, 8, 50)


# -- forks


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


# -- bytes


def test_a_turn_writes_only_what_is_new(store):
    """A 50-token turn on a long history writes what it writes on a short one: no byte of the history again."""
    sizes = {}
    for length in (512, 4096):
        agent = store.open(f"{length}", SPACE)
        say(agent, None, np.arange(length))
        before = store.written
        say(agent, agent.head, IDS[:50])
        after = store.written
        sizes[length] = (after.payload - before.payload, after.database - before.database)
    (short, short_database), (long, long_database) = sizes[512], sizes[4096]
    assert abs(long - short) <= 64  # the header is padded to 64 bytes, and positions have more digits
    assert long_database - short_database <= 4 * 4120  # pages of larger indexes


def test_what_was_written_is_what_is_there(root):
    """The counter of payload bytes is the size of the files."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        say(agent, None, IDS)
        on_disk = sum(path.stat().st_size for path in agent.root.glob("*.safetensors"))
        assert on_disk == store.written.payload
        assert store.bytes_written >= on_disk
        assert (agent.root / "transcript.jsonl").stat().st_size == store.written.transcript
        assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) == store.disk_bytes


# -- deletion


def grep(root, *needles):
    return [path for path in root.rglob("*") if path.is_file() for needle in needles if needle in path.read_bytes()]


def test_nothing_is_left_of_a_deleted_agent(root):
    """No byte of its name, text or tokens is in any file, also while another store has everything open."""
    canary, tokens = "CANARY-5481", np.random.default_rng(7).integers(0, 2**31 - 1, 700, dtype=np.int32)
    needles = (b"CANARY-5481", tokens[300:310].tobytes(), tokens[690:].tobytes())
    with Store(root) as other, Store(root) as store:
        bystander = other.open("bystander", SPACE)
        say(bystander, None, IDS[:100])
        for number in range(30):
            agent = store.open(f"{canary} {number}", canary)
            agent.set_meta("system", canary)
            say(agent, None, tokens, prompt=canary, reply=canary * 100, settings={"x": canary}, cell_id=canary)
            assert len(other.agents()) == 2
            assert grep(root, *needles)
            store.delete(f"{canary} {number}", canary) if number % 2 else agent.delete()
            assert grep(root, *needles) == []
        for number in range(10):
            agent = store.open(f"{canary} {number}", canary)
            say(agent, None, tokens, prompt=canary)
            agent.close()
        for number in range(10):
            other.delete(f"{canary} {number}", canary)
        assert grep(root, *needles) == []
        assert [entry.name for entry in store.agents()] == ["bystander"]
        say(bystander, 1, IDS[:100])


def test_a_deletion_that_was_interrupted_is_finished(root):
    """What a kill left of a deleted or half-made agent is removed when a store is opened."""
    with Store(root) as store:
        folder = store.open("planner", SPACE).root
    folder.rename(folder.with_name(folder.name + ".deleted"))
    with Store(root) as store:
        assert store.agents() == []
        assert list((root / "agents").iterdir()) == []
        store.open("planner", SPACE)


# -- limits


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
