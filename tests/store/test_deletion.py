"""That nothing is left."""

import time

import numpy as np

from amem.store import Store, verify
from tests.store.child import run
from tests.store.samples import SPACE, check, say

IDS = np.arange(900)


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


def look_on(told, root):
    """Another process that has listed all agents, and has the store and one of them open."""
    with Store(root) as store:
        agent = store.open("bystander", SPACE)
        say(agent, None, IDS[:100])
        told.send(len(store.agents()))
        while not (root / "deleted").exists():
            time.sleep(0.01)
        told.send([entry.name for entry in store.agents()])
        say(agent, 1, IDS[:100])
        told.send("said")


def test_nothing_is_left_while_another_process_has_the_store_open(root):
    """Databases and their logs included; the deleted agent's fork lives on, with a prefix of its own."""
    tokens = np.random.default_rng(7).integers(0, 2**31 - 1, 700, dtype=np.int32)
    needles = (b"CANARY-5481", *(tokens[at : at + 8].tobytes() for at in (0, 300, 690)))
    with Store(root) as store:
        agent = store.open("CANARY-5481", SPACE)
        first = say(agent, None, IDS, prompt="shared")
        fork = agent.fork("variant", SPACE, first.id)
        agent.set_meta("note", "CANARY-5481")
        say(agent, first.id, tokens, prompt="CANARY-5481", reply="CANARY-5481")
        child, pipe = run(look_on, root)
        assert 3 == pipe.recv()
        assert grep(root, *needles)
        assert (root / "index.sqlite3-wal").stat().st_size > 0
        assert agent.delete().n_shared == 5
        left = grep(root, *needles)
        (root / "deleted").touch()
        assert ["bystander", "variant"] == sorted(pipe.recv())
        assert "said" == pipe.recv()
        child.join()
        assert child.exitcode == 0
        assert left == []
        assert grep(root, *needles) == []
        assert check(fork, IDS) == 900
        say(fork, first.id, IDS[:10])
        fork.close()
        assert verify(store).problems == []


def test_a_deletion_that_was_interrupted_is_finished(root):
    """What a kill left of a deleted or half-made agent is removed when a store is opened."""
    with Store(root) as store:
        folder = store.open("planner", SPACE).root
    folder.rename(folder.with_name(folder.name + ".deleted"))
    with Store(root) as store:
        assert store.agents() == []
        assert list((root / "agents").iterdir()) == []
        store.open("planner", SPACE)
