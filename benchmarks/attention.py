"""Attention of one new token over what is stored: a layer of the bundled model's shape, by codec, length and backend.

The layer has 9 query heads, 3 heads of keys and values and 64 dimensions, with random numbers in it. All codecs of a
length take turns in one run; a sample is one call with its result in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from amem.kv import backend
from amem.kv.attention import LayerView
from benchmarks.machine import machine
from tests.kv import states

RESULT = Path(__file__).parent / "results" / "attention.json"
BACKENDS = dict.fromkeys(("cpu", "reference"), ("q4", "q4-affine", "q3", "q2", "q8", "fp16"))
CHUNK = 256


def one_token(attend: backend.Attend, codec: str, n_tokens: int) -> Callable[[], float]:
    """A layer with so many tokens; calling it gives the seconds of one new token's attention."""
    layer = states.layer(heads=3, heads_q=9)
    sequence = states.new_sequence(states.layout(layer, codec=codec))
    q, k, v = (mx.array(x) for x in states.random_qkv(layer, n_tokens + 1))
    for start in range(0, n_tokens, CHUNK):
        stop = min(start + CHUNK, n_tokens)
        sequence.begin_step(stop - start)
        sequence.append(0, k[:, start:stop], v[:, start:stop])
        sequence.end_step(stop - start)
        mx.eval(sequence.pending())
    sequence.begin_step(1)
    view: LayerView = sequence.append(0, k[:, n_tokens:], v[:, n_tokens:])
    query = q[:, n_tokens:]

    def call() -> float:
        started = time.perf_counter()
        mx.eval(attend(query, view, start=n_tokens, scale=0.125, codec=sequence.layout.codec))
        return time.perf_counter() - started

    return call


def measure(lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each backend, codec and length."""
    rows = []
    for n_tokens in lengths:
        calls = {
            (name, codec): one_token(backend.choose(name).result().attend, codec, n_tokens)
            for name, codecs in BACKENDS.items()
            for codec in codecs
        }
        samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        keys = list(calls)
        for turn in range(repeats + 1):
            for key in keys[turn % len(keys) :] + keys[: turn % len(keys)]:  # none always comes after the slowest
                call = calls[key]
                call()  # wakes the threads up, as a layer's products do before its attention
                samples[key].append(call() * 1e3)
        for (name, codec), (_, *found) in samples.items():  # the first call allocates
            rows.append({"backend": name, "codec": codec, "tokens": n_tokens, "ms": median(found), "samples": found})
            print(f"{name:>9} {codec:>9} {n_tokens:>5} tokens: {rows[-1]['ms']:.3f} ms", flush=True)
    return rows


def main() -> None:
    """Measure, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    load_before = os.getloadavg()
    rows = measure(options.lengths, options.repeats)
    load_after = os.getloadavg()
    result = {
        "machine": machine(),
        "load_average_before": load_before,
        "load_average_after": load_after,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"load average: {load_before[0]:.1f} before, {load_after[0]:.1f} after; written: {RESULT}")


if __name__ == "__main__":
    main()
