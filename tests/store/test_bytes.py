"""What is written, and how much of it."""

import os

import numpy as np
import pytest

from amem.errors import CorruptState, InputError
from amem.store import Store, payload
from tests.store.samples import REALM, SPACE, say

IDS = np.arange(900)


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


def pieces_of(size):
    """Tensors of a block of many layers, and one array for each that two blocks lie in, as runs have them."""
    named = {"k": np.random.default_rng(0).integers(0, 2**32, (32, 4, size), dtype=np.uint32)}
    named |= {"scales": np.ones((32, 4, 8), np.float16), "biases": np.zeros((32, 4, 8), np.float16)}
    joined = {name: np.zeros((32, 8, *x.shape[2:]), x.dtype) for name, x in named.items()}
    return named, joined


@pytest.mark.parametrize("size", [16, 4096])
def test_a_block_is_read_in_place_in_few_calls_and_each_byte_once(agent, monkeypatch, size):
    """Counted: the bytes that the system copies are those of the file, in about one call for each megabyte and span."""
    tensors, joined = pieces_of(size)
    record = agent.write_block(REALM, None, 0, IDS[:256], tensors)
    calls = []

    def counted(descriptor, buffers, offset):
        calls.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        return preadv(descriptor, buffers, offset)

    preadv = os.preadv
    monkeypatch.setattr(payload.os, "preadv", counted)
    agent.read_into(record, {name: x[:, 4:] for name, x in joined.items()})
    nbytes = sum(x.nbytes for x in tensors.values())
    assert nbytes == sum(calls)
    assert len(calls) <= 2 + nbytes // payload._BATCH + len(tensors)
    for name, x in joined.items():
        assert np.array_equal(tensors[name], x[:, 4:])
        assert not x[:, :4].any()


def test_what_is_not_wanted_is_not_read(agent, monkeypatch):
    """Layers that no longer see a block cost no bytes."""
    tensors, joined = pieces_of(4096)
    record = agent.write_block(REALM, None, 0, IDS[:256], tensors | {"other": tensors["k"]})
    preadv, read = os.preadv, []
    monkeypatch.setattr(payload.os, "preadv", lambda *given: read.append(preadv(*given)) or read[-1])
    agent.read_into(record, {"k": joined["k"][:, 4:]})
    assert tensors["k"].nbytes == sum(read)


def test_short_reads_are_read_again(agent, monkeypatch):
    """A system may give fewer bytes than it was asked for."""
    tensors, joined = pieces_of(16)
    record = agent.write_block(REALM, None, 0, IDS[:256], tensors)
    preadv = os.preadv
    monkeypatch.setattr(
        payload.os, "preadv", lambda fd, buffers, at: preadv(fd, [memoryview(buffers[0]).cast("B")[:7]], at)
    )
    agent.read_into(record, {name: x[:, 4:] for name, x in joined.items()})
    assert all(np.array_equal(tensors[name], x[:, 4:]) for name, x in joined.items())


def test_a_file_of_other_shapes_is_not_read_in_place(agent):
    """It is set aside like a damaged one, and no array of ours is used for it."""
    tensors, joined = pieces_of(16)
    record = agent.write_block(REALM, None, 0, IDS[:256], tensors)
    with pytest.raises(InputError, match="no tensor 'v'"):
        agent.read_into(record, {"v": joined["k"]})
    with pytest.raises(CorruptState, match="as wanted"):
        agent.read_into(record, {"k": joined["k"]})
