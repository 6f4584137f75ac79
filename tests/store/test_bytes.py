"""What is written, and how much of it."""

import numpy as np

from amem.store import Store
from tests.store.samples import SPACE, say

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
