"""The memory budget under load, by the pool's own peak, by MLX's own count and by the process's size."""

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from amem import Cancelled, Engine
from tests.tiny import write_tiny_model

MB = 10**6
LONG = "a list of many words " * 30


@pytest.fixture
def without_collection():
    """Only what nobody refers to is freed: circles stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_hundred_turns_of_twelve_agents_stay_within_memory_for_three(tmp_path):
    """The budget holds at every instant, and the process grows by little more than it: what is evicted is gone."""
    # K and V of twelve agents are more than the process may grow by
    wide = {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
    model = write_tiny_model(tmp_path / "model", **wide)
    command = [sys.executable, "-m", "tests.engine.memory_child", model, tmp_path / "store"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 100 == found["turns"]
    assert 4 * found["budget"] > 1.5 * found["budget"] + 200 * MB
    assert 0.5 * found["budget"] < found["pool_peak"] <= found["budget"]
    assert found["growth"] < 1.5 * found["budget"] + 200 * MB
    assert found["restored"] + found["prefetched"] > 30
    assert 0 == found["problems"]


def test_what_is_evicted_is_gone_at_once(tmp_path, without_collection):
    """And does not wait for Python to look for circles, which may take many turns: after replies, restores, cancels."""
    model = write_tiny_model(
        tmp_path / "model", num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8, head_dim=64
    )
    with Engine(model, tmp_path / "store", memory="1GB", prefetch=False) as engine:
        agent = engine.agent("a")
        agent.ask(LONG, max_tokens=4)
        hot = agent.status.hot_bytes
        after = []
        for _ in range(5):
            agent.evict()
            after.append(engine._owner.call(mx.get_active_memory))
            agent.ask("And then?", max_tokens=8)  # restored, and computed
            agent.ask("And then?", max_tokens=8)  # from memory
            stream = agent.stream("And then?", max_tokens=900)
            next(stream)
            stream.cancel()
            with contextlib.suppress(Cancelled):
                list(stream)
        assert max(after) - after[0] < hot


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_an_evicted_agents_memory_goes_back_to_the_system(tmp_path):
    """Not only to the allocator: other programs can have it."""
    wide = {"num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
    model = write_tiny_model(tmp_path / "model", **wide)
    with Engine(model, tmp_path / "store", memory="1GB", codec="fp16", prefetch=False) as engine:
        for name in "abc":
            engine.agent(name).ask(LONG, max_tokens=4)
        hot, resident = engine.status().hot_bytes, resident_nbytes()
        assert hot > 20 * MB
        for name in "abc":
            engine.agent(name).evict()
        assert resident - resident_nbytes() > hot / 2


def resident_nbytes():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
