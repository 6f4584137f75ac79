"""The memory budget under load, by the pool's own peak and by the process's size."""

import json
import subprocess
import sys

from tests.tiny import write_tiny_model

MB = 10**6


def test_a_hundred_turns_of_twelve_agents_stay_within_memory_for_three(tmp_path):
    """The budget holds at every instant, and the process grows by little more than it: what is evicted is gone."""
    wide = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = write_tiny_model(tmp_path / "model", **wide)  # about 30 MB of K and V for three agents
    command = [sys.executable, "-m", "tests.engine.memory_child", model, tmp_path / "store"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 100 == found["turns"]
    assert found["budget"] > 20 * MB
    assert 0.5 * found["budget"] < found["pool_peak"] <= found["budget"]
    assert found["growth"] < 1.5 * found["budget"] + 200 * MB
    assert found["restored"] + found["prefetched"] > 30
    assert 0 == found["problems"]
