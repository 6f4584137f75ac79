"""Files that rot, shrink or vanish."""

import contextlib
import os
import random
import shutil
import sqlite3

import numpy as np
import pytest

from amem.errors import CorruptState, StoreError, StoreTooNew
from amem.store import NewTurn, Store, fileformat, names, transcript, verify
from amem.store.payload import DamagedError
from tests.store.samples import REALM, SPACE, check, prepare, say, tensors

IDS = np.arange(900)


@pytest.fixture
def saved(root):
    """A store with one agent of two turns; its folder."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        agent.set_meta("system", "You plan.")
        say(agent, None, IDS[:600], prompt="first ä", reply="one")
        say(agent, 1, IDS[600:], prompt="second", reply="two")
        return agent.root


def records(agent):
    return agent._database.tree.records()


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def flip_payload(path):
    flip(path, 8 * path.stat().st_size - 100)


def test_a_schema_that_is_no_text_any_more_is_damage_too(saved):
    """SQLite quotes the file in its message, which then is no UTF-8; other agents are served, and it is salvaged."""
    path = saved / "agent.sqlite3"
    data = path.read_bytes()
    at = data.index(b"NOT NULL") + len("NOT NUL")
    path.write_bytes(data[:at] + b"\xd3" + data[at + 1 :])
    with Store(saved.parent.parent) as store:
        [problem] = verify(store).problems
        assert "damaged" in problem
        with store.open("planner", SPACE) as agent:
            assert ["first ä", "second"] == [turn.prompt for turn in agent.turns().values()]
        assert verify(store).clean


def test_one_flipped_bit_anywhere_is_found(agent):
    """Whatever bit of a block's file flips, header and padding included, the block is never read."""
    small = {"k": np.arange(64, dtype=np.uint8), "v": np.ones(3, np.float16)}
    record = agent.write_block(REALM, None, 0, IDS[:64], small)
    path = agent.root / f"{record.id}.safetensors"
    whole = path.read_bytes()
    descriptor = os.open(path, os.O_WRONLY)
    for byte in range(len(whole)):
        for bit in range(8):
            os.pwrite(descriptor, bytes([whole[byte] ^ 1 << bit]), byte)
            with pytest.raises(DamagedError):
                fileformat.read(path, record)
            with pytest.raises(DamagedError):
                fileformat.read_into(path, record, {name: np.empty_like(x) for name, x in small.items()})
        os.pwrite(descriptor, whole[byte : byte + 1], byte)
    os.close(descriptor)
    agent.read(record)


@pytest.mark.parametrize("victim", range(3))
def test_a_bad_block_leaves_the_longest_good_prefix(saved, root, victim):
    """After damage find falls back, the rest can be written anew, and no text is lost."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        bad = agent.find(REALM, IDS).blocks[victim]
        path = saved / f"{bad.id}.safetensors"
        flip_payload(path)
        with pytest.raises(CorruptState):
            agent.read(bad)
        assert [path.name] == [file.name for file in (saved / "quarantine").iterdir()]
        assert [256 * victim, 600][victim == 2] == check(agent, IDS)  # the first turn's own tail and snapshot are good
        with pytest.raises(StoreError, match="evicted"):
            agent.read(bad)
        blocks, last, tail, snapshot = prepare(agent, IDS)
        agent.realize(2, REALM, IDS[600:], 900, blocks=blocks, tail=tail, snapshot=snapshot, last_block=last)
        assert check(agent, IDS) == 900
        assert [turn.reply for turn in agent.turns().values()] == ["one", "two"]
        assert len(store.reports) == 1
    with Store(root) as store:
        assert verify(store).problems == []


@pytest.mark.parametrize("harm", ["cut", "longer", "missing", "empty", "swapped"])
def test_a_file_that_is_not_what_was_written(saved, root, harm):
    """Cut short, grown, gone, empty, or another block's file under its name: found, named, and set aside."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        first, second = agent.find(REALM, IDS).blocks[:2]
        path = saved / f"{second.id}.safetensors"
        if harm == "cut":
            path.write_bytes(path.read_bytes()[:-1])
        elif harm == "longer":
            path.write_bytes(path.read_bytes() + b"\0")
        elif harm == "missing":
            path.unlink()
        elif harm == "empty":
            path.write_bytes(b"")
        else:
            shutil.copy(saved / f"{first.id}.safetensors", path)
        assert any(second.id in problem for problem in verify(store).problems)
        with pytest.raises(CorruptState, match=second.id):
            agent.read(second)
        assert check(agent, IDS) == 256


def test_missing_files_are_noticed_when_an_agent_is_opened(saved, root):
    """Blocks whose files are gone do not match, and a report says so."""
    for path in saved.glob("*.safetensors"):
        path.unlink()
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        assert check(agent, IDS) == 0
        assert "missing" in store.reports[0]
        assert np.array_equal(IDS, agent.path_tokens(2, REALM))


def test_verify_names_and_repairs(saved, root):
    """Without repair nothing changes; with it the store is clean afterwards."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        blocks = agent.find(REALM, IDS).blocks
    flip_payload(saved / f"{blocks[1].id}.safetensors")
    flip(saved / "transcript.jsonl", 500)
    with Store(root) as store:
        report = verify(store)
        assert len(report.problems) == 2
        assert not report.clean
        assert report == verify(store)
        assert report.agents == 1
        repaired = verify(store, repair=True)
        assert repaired.clean
        assert report.problems == repaired.problems
        assert verify(store).problems == []
        assert check(store.open("planner", SPACE), IDS) == 256


@pytest.mark.parametrize("harm", ["lost", "noise", "empty", "header"])
def test_the_index_is_rebuilt(saved, root, harm):
    """Without a usable index every agent is there, with its name, size and turns."""
    index = root / "index.sqlite3"
    if harm == "lost":
        index.unlink()
    elif harm == "noise":
        index.write_bytes(random.Random(0).randbytes(20_000))
    elif harm == "empty":
        index.write_bytes(b"")
    else:
        flip(index, 8 * 20 + 1)
    with Store(root) as store:
        (entry,) = store.agents()
        assert ("planner", SPACE, saved.name, 2) == (entry.name, entry.space, entry.key, entry.n_turns)
        assert check(store.open("planner", SPACE, create=False), IDS) == 900


def test_the_index_is_rebuilt_while_in_use(saved, root):
    """An index that vanishes or rots under an open store costs nothing."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        (root / "index.sqlite3").unlink()
        say(agent, 2, IDS[:10])
        assert [entry.n_turns for entry in store.agents()] == [3]
        with Store(root) as other:
            assert [entry.name for entry in other.agents()] == ["planner"]
        (root / "index.sqlite3").write_bytes(b"x" * 8192)
        (root / "index.sqlite3-wal").unlink(missing_ok=True)
        say(agent, 3, IDS[:10])
        assert [entry.name for entry in store.agents()] == ["planner"]


def all_facts(agent):
    return (
        agent.meta, agent.head, agent.turns(), agent.path_tokens(2, REALM).tolist(), agent.find(REALM, IDS).n_tokens,
        sorted(agent._database.tree.names()),
    )  # fmt: skip


@pytest.mark.parametrize("harm", ["lost", "noise", "cut", "text", "page"])
def test_a_damaged_database_is_salvaged(saved, root, harm):
    """Transcript and block files restore all of it, head and settings included, and a report says so."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        agent.set_head(1)
        expected = all_facts(agent)
    database = saved / "agent.sqlite3"
    data = database.read_bytes()
    if harm == "lost":
        database.unlink()
    elif harm == "noise":
        database.write_bytes(random.Random(0).randbytes(len(data)))
    elif harm == "cut":
        database.write_bytes(data[: len(data) // 2])
    elif harm == "text":
        flip(database, 8 * data.index("first ä".encode()))
    else:
        database.write_bytes(data[:4096] + bytes(4096) + data[8192:])
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        assert expected == all_facts(agent)
        assert "rebuilt from transcript and block files" in store.reports[0]
        assert check(agent, IDS) == 900
        say(agent, 2, IDS[:100])
        assert list(agent.turns()) == [1, 2, 3]
    with Store(root) as store:
        assert verify(store).problems == []


def test_every_flipped_bit_of_a_database_is_harmless(saved, root):
    """A sample of all bits: the agent opens, its text and tokens are those that were saved, nothing wrong is read."""
    database = saved / "agent.sqlite3"
    whole = database.read_bytes()
    with Store(root) as store:
        turns = store.open("planner", SPACE).turns()
    files = {path.name: path.read_bytes() for path in saved.iterdir() if path.is_file()}
    chance = random.Random(1)
    for _ in range(40):
        flip(database, chance.randrange(8 * len(whole)))
        with Store(root) as store:
            agent = store.open("planner", SPACE)
            assert turns == agent.turns()
            assert np.array_equal(IDS, agent.path_tokens(2, REALM))
            try:
                check(agent, IDS)
            except CorruptState:
                check(agent, IDS)
        shutil.rmtree(saved)
        saved.mkdir()
        for name, data in files.items():
            (saved / name).write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE state SET value = '1' WHERE key = 'head'",
        "UPDATE state SET key = 'hEad' WHERE key = 'head'",
        "UPDATE state SET value = '10' WHERE key = 'transcript_nbytes'",
        "UPDATE meta SET value = 'You plot.'",
        "UPDATE meta SET key = 'cystem'",
        "UPDATE turns SET reply = 'three' WHERE id = 2",
        "UPDATE realizations SET last_block = 1 WHERE turn = 2",
        "UPDATE realizations SET tail = 3 WHERE turn = 2",
        "UPDATE realizations SET snapshot = 1 WHERE turn = 2",
        "UPDATE realizations SET n_tokens = 901 WHERE turn = 2",
        "UPDATE blocks SET start = 512 WHERE seq = 2",
        "UPDATE blocks SET chain = zeroblob(16) WHERE seq = 2",
        "UPDATE blocks SET parent = NULL WHERE seq = 2",
        "UPDATE blocks SET token_ids = zeroblob(1024) WHERE seq = 1",
        "DELETE FROM prefixes WHERE block = 2",
        "UPDATE prefixes SET chain = zeroblob(16) WHERE block = 4 AND chain = (SELECT chain FROM blocks WHERE seq = 4)",
        "UPDATE snapshots SET position = 601 WHERE seq = 1",
        "UPDATE snapshots SET chain = zeroblob(16) WHERE seq = 2",
        "UPDATE snapshots SET open_hash = zeroblob(8) WHERE seq = 2",
        "UPDATE snapshots SET open_ids = zeroblob(16) WHERE seq = 2",
        "UPDATE snapshots SET block = NULL WHERE seq = 2",
        "UPDATE blocks SET id = iif(id LIKE 'f%', 'e', 'f') || substr(id, 2) WHERE seq = 2",
        "UPDATE blocks SET checksum = iif(checksum LIKE 'f%', 'e', 'f') || substr(checksum, 2) WHERE seq = 2",
        "UPDATE blocks SET nbytes = nbytes + 1 WHERE seq = 2",
        "UPDATE blocks SET nbytes = 'many' WHERE seq = 2",
        "UPDATE blocks SET realm = 9 WHERE seq = 2",
        "UPDATE prefixes SET realm = 9 WHERE block = 2",
        "UPDATE snapshots SET id = iif(id LIKE 'f%', 'e', 'f') || substr(id, 2) WHERE seq = 2",
        "UPDATE snapshots SET checksum = iif(checksum LIKE 'f%', 'e', 'f') || substr(checksum, 2) WHERE seq = 2",
        "UPDATE snapshots SET nbytes = nbytes + 1 WHERE seq = 2",
        "UPDATE snapshots SET n_open = n_open + 1 WHERE seq = 2",
        "UPDATE snapshots SET realm = 9 WHERE seq = 2",
        "UPDATE realms SET fingerprint = 'model-c'",
        "UPDATE realms SET codec = 'k3'",
        "UPDATE turns SET id = 7 WHERE id = 2",
        "UPDATE turns SET parent = NULL WHERE id = 2",
        "UPDATE turns SET settings = '{' WHERE id = 2",
        "UPDATE turns SET created = created + 1 WHERE id = 2",
        "UPDATE realizations SET token_ids = zeroblob(1200) WHERE turn = 2",
        "DELETE FROM turns WHERE id = 2",
        "DELETE FROM blocks WHERE seq = 3",
        "DELETE FROM snapshots WHERE seq = 2",
    ],
)
def test_a_changed_value_in_the_database_is_found_and_mended(saved, root, change):
    """Each value by itself, in a database that SQLite finds sound: nothing of the agent is lost."""
    with Store(root) as store:
        before = store.open("planner", SPACE)
        turns, meta = before.turns(), before.meta
    with contextlib.closing(sqlite3.connect(saved / "agent.sqlite3", isolation_level=None)) as database:
        assert database.execute(change).rowcount
    with Store(root) as store:
        assert verify(store).problems
        assert verify(store, repair=True).clean
        assert verify(store).problems == []
        agent = store.open("planner", SPACE, create=False)
        assert (turns, meta, 2) == (agent.turns(), agent.meta, agent.head)
        assert check(agent, IDS) == 900


@pytest.fixture
def killed(root):
    """A copy of a store whose process was killed after two turns: the log is not in the database yet."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        agent.set_meta("system", "You plan.")
        say(agent, None, IDS[:600], prompt="first ä", reply="one")
        say(agent, 1, IDS[600:], prompt="second", reply="two")
        shutil.copytree(root, root.with_name("killed"))
        turns = agent.turns()
    log = root.with_name("killed") / "agents" / agent.root.name / "agent.sqlite3-wal"
    assert log.stat().st_size > 10_000
    return log, turns


@pytest.mark.parametrize("harm", ["lost", "empty", *range(12)])
def test_a_damaged_log_loses_no_turn(killed, harm):
    """SQLite stops before the first frame that is bad, in silence; transcript and files know what came after it."""
    log, turns = killed
    if harm == "lost":
        log.unlink()
    elif harm == "empty":
        log.write_bytes(b"")
    else:
        flip(log, random.Random(harm).randrange(8 * log.stat().st_size))
    for _ in range(2):
        with Store(log.parent.parent.parent) as store:
            assert verify(store).problems == []
            agent = store.open("planner", SPACE, create=False)
            assert (turns, {"system": "You plan."}) == (agent.turns(), agent.meta)
            assert np.array_equal(IDS, agent.path_tokens(agent.head, REALM))
            assert check(agent, IDS) == 900
            if harm in ("lost", "empty"):
                assert "its last 2 turns were taken over from its transcript" in store.reports[0]
                break
        log.unlink(missing_ok=True)


def test_of_a_commit_that_is_torn_nothing_is_taken_over(killed):
    """A turn without its tokens, and half a line, are cut off."""
    log, turns = killed
    log.unlink()
    path = log.with_name("transcript.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    (second,) = [number for number, line in enumerate(lines) if b'"kind":"turn","id":2,' in line]
    path.write_bytes(b"".join(lines[: second + 1]) + lines[second + 1][:-2])
    with Store(log.parent.parent.parent) as store:
        agent = store.open("planner", SPACE, create=False)
        assert ({1: turns[1]}, 1) == (agent.turns(), agent.head)
        assert check(agent, IDS) == 600
        assert path.read_bytes() == b"".join(lines[:second])
        say(agent, 1, IDS[600:])
        assert verify(store).problems == []


@pytest.mark.parametrize("column", ["key", "digest", "used", "last_used", "nbytes", "n_turns"])
@pytest.mark.parametrize("value", ["'other'", "7"])
def test_a_changed_value_in_the_index_is_found_and_mended(saved, root, column, value):
    """Each value by itself: the index is made anew from the folders."""
    with contextlib.closing(sqlite3.connect(root / "index.sqlite3", isolation_level=None)) as index:
        assert index.execute(f"UPDATE agents SET {column} = {value}").rowcount
    with Store(root) as store:
        assert "the index was damaged" in store.reports[0]
        (entry,) = store.agents()
        assert ("planner", SPACE, saved.name, 2) == (entry.name, entry.space, entry.key, entry.n_turns)
        assert entry.nbytes > 1000
        assert check(store.open("planner", SPACE, create=False), IDS) == 900


def test_every_flipped_bit_of_a_name_is_found(saved):
    """The label is what it was, or known to be damaged."""
    path = saved / names.LABEL
    whole, label = path.read_bytes(), names.read_label(saved)
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert names.read_label(saved) in (None, label)


def test_every_damaged_byte_of_a_transcript_is_found(saved):
    """A line that is not what was written is not read; all others are."""
    path = saved / "transcript.jsonl"
    whole, (rows, _) = path.read_bytes(), transcript.read(saved)
    chance = random.Random(5)
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        found, bad = transcript.read(saved)
        assert bad > 0
        assert len(rows) - 2 <= len(found) < len(rows)
        assert all(row in rows for row in found)


def test_database_and_transcript_both_damaged(saved, root):
    """What is readable stays: a lost turn is named, and the turns after it are kept."""
    (saved / "agent.sqlite3").unlink()
    lines = (saved / "transcript.jsonl").read_bytes().split(b"\n")
    lines = [b"rubbish" if b'"kind":"turn","id":1,' in line else line for line in lines]
    (saved / "transcript.jsonl").write_bytes(b"\n".join(lines))
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        assert [turn.reply for turn in agent.turns().values()] == ["two"]
        assert agent.path_tokens(2, REALM) is None
        assert any("lost the turn before it" in report for report in store.reports)
        assert check(agent, IDS) == 896
        assert verify(store).problems == []


def test_a_lost_transcript_is_written_anew(saved, root):
    """The database restores the transcript, and the other way round."""
    (saved / "transcript.jsonl").unlink()
    with Store(root) as store:
        store.open("planner", SPACE)
        assert len(store.reports) == 1
    (saved / "agent.sqlite3").unlink()
    with Store(root) as store:
        assert check(store.open("planner", SPACE), IDS) == 900


def test_a_lost_name_is_restored(saved, root):
    """The transcript knows whose it is."""
    with Store(root) as store:
        (saved / "name.json").write_text("{")
        assert any("name" in problem for problem in verify(store).problems)
        assert [entry.name for entry in store.agents()] == ["planner"]
        assert verify(store).problems == []


def test_a_newer_store_is_refused(saved, root, monkeypatch):
    """Index, agent or name of a newer format: an error that says to upgrade, and nothing is touched."""
    import sqlite3

    for path in (root / "index.sqlite3", saved / "agent.sqlite3"):
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 2")
        connection.close()
        with pytest.raises(StoreTooNew, match="upgrade amem"), Store(root) as store:
            store.open("planner", SPACE)
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version = 1")
        connection.close()
    monkeypatch.setattr(names, "FORMAT", 2)
    names.write_label(saved, names.read_label(saved))
    monkeypatch.undo()
    with pytest.raises(StoreTooNew), Store(root) as store:
        store.agents()


def test_a_damaged_snapshot_costs_at_most_a_group(saved, root):
    """Without its snapshot a turn's end is found at the last group boundary."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        found = agent.find(REALM, IDS)
        flip_payload(saved / f"{found.snapshot.id}.safetensors")
        with pytest.raises(CorruptState, match="snapshot"):
            agent.read(found.snapshot)
        assert check(agent, IDS) == 896
        assert agent.realization(2, REALM).snapshot is None


def test_a_block_that_is_not_committed_yet_may_be_bad(agent):
    """A pending block is set aside like any other."""
    record = agent.write_block(REALM, None, 0, IDS[:64], tensors(IDS, 0, 64))
    (agent.root / f"{record.id}.safetensors").unlink()
    with pytest.raises(CorruptState):
        agent.read(record)
    assert agent.commit(NewTurn(None, "", "", "stop"), REALM, IDS[:64], 64).id == 1


def flip_anywhere(root, seed, count):
    """Flip one bit of any file of a store, open it, repair it, and go on."""
    original = root.with_name("original")
    with Store(root) as store:
        turns = store.open("planner", SPACE).turns()
    shutil.copytree(root, original)
    chance = random.Random(seed)
    files = [
        path.relative_to(original) for path in sorted(original.rglob("*")) if path.stat().st_size and path.is_file()
    ]
    for _ in range(count):
        shutil.rmtree(root)
        shutil.copytree(original, root)
        path = root / chance.choice(files)
        flip(path, chance.randrange(8 * path.stat().st_size))
        with Store(root) as store:
            agent = store.open("planner", SPACE, create=False)
            assert agent.turns() == turns
            assert np.array_equal(agent.path_tokens(2, REALM), IDS)
            verify(store, repair=True)
            assert verify(store).problems == []
            check(agent, IDS)
            say(agent, 2, IDS[:300])
            assert check(agent, np.concatenate([IDS, IDS[:300]])) == 1200


def test_a_flipped_bit_in_any_file_is_harmless(saved, root):
    """A sample over all files: opened and repaired, the store has every turn, and nothing wrong is read."""
    flip_anywhere(root, 0, 40)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_flipped_bits_are_harmless(saved, root, seed):
    """As above, for many bits."""
    flip_anywhere(root, seed, 1000)
