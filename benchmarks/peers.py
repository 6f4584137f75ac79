"""The next turn after a long history, side by side with what people would use instead.

For each length an agent is told a text once. Then come, in turns and each in a new process: amem on its own copy of the
store, and stock mlx-lm with a saved prompt cache, as it is and quantized to 4 bits. All get as many tokens of history
and of message. Stock mlx-lm runs as it is installed: its processes import nothing that changes MLX's BLAS. It is given
the weights in float32, which is best for it here: with the quantized ones MLX takes seconds for a token. (Folder and
caches are made with a faster BLAS than it has, since only their use is measured.) Takes half an hour or more on two
quiet cores; `--lengths 64 --cold --repeats 1` is a look at whether all of it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import machine
from benchmarks.next_turn import SENTENCE

RESULT = Path(__file__).parent / "results" / "peers.json"
MESSAGE = SENTENCE + "What does the crew do before it goes on?"
TOKENS = 16  #: of each reply
PEERS = ("amem", "mlx-lm", "mlx-lm q4")
COLD_LENGTHS = (512, 1024)  #: stock mlx-lm computes some ten tokens a second
FIGURES = ("process_to_first_token_s", "load_s", "ttft_s", "decode_tokens_per_s")


# -- in a process of its own: each prints its figures ------------------------------------------------------------------


def amem_turn(folder: Path, n_history: int, n_message: int) -> dict[str, Any]:
    """One turn of an agent; the first one tells it the history, if nothing is stored yet."""
    from amem import Engine

    del n_message  # the text has it
    started = time.perf_counter()
    with Engine(store=folder) as engine:
        loaded = time.perf_counter()
        agent = engine.agent("reader")
        message = MESSAGE if agent.turns else SENTENCE * max(1, round(n_history / 20))
        stream = iter(agent.stream(message, max_tokens=TOKENS))
        first = next(time.time() for event in stream if event.text)
        metrics = next(event.reply for event in stream if event.reply is not None).metrics
        status = engine.status()
    return {
        "first_token_at": first,
        "load_s": loaded - started,
        "ttft_s": metrics.ttft_ms / 1e3,
        "restore_s": metrics.restore_ms / 1e3,
        "decode_tokens_per_s": metrics.tokens_per_second,
        "prefill_tokens_per_s": metrics.computed_tokens / (metrics.prefill_ms + metrics.first_decode_ms) * 1e3,
        "n_history": metrics.reused_tokens,
        "n_message": metrics.computed_tokens,
        "attention": status.attention,
        "blas": status.blas,
    }


def mlx_lm_turn(folder: Path, n_history: int, n_message: int, *, bits: int | None) -> dict[str, Any]:
    """One turn on a saved prompt cache, or on none if there is no history."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache

    started = time.perf_counter()
    model, tokenizer = load(str(folder / "model"))[:2]
    loaded = time.perf_counter()
    cache = load_prompt_cache(str(_cache_file(folder, bits))) if n_history else make_prompt_cache(model)
    mx.eval([layer.state for layer in cache] if n_history else [])
    restored = time.perf_counter()
    ids = mx.array(_ids(tokenizer, n_history + n_message)[n_history:])
    times, first = [], 0.0
    for _ in generate_step(ids, model, max_tokens=TOKENS, prompt_cache=cache, kv_bits=bits, kv_group_size=64):
        first = first or time.time()
        times.append(time.perf_counter())
    return {
        "first_token_at": first,
        "load_s": loaded - started,
        "ttft_s": times[0] - loaded,
        "restore_s": restored - loaded,
        "decode_tokens_per_s": (len(times) - 1) / (times[-1] - times[0]),
        "prefill_tokens_per_s": n_message / (times[0] - restored),
        "n_history": n_history,
        "n_message": n_message,
    }


def mlx_lm_prepare(folder: Path, n_history: int, n_message: int) -> dict[str, Any]:
    """Save the model in float32, and the prompt caches of a history, as stock mlx-lm does."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

    from amem.model.load import load

    del n_message
    loaded = load("smollm2-135m")
    save_float32(loaded.model, loaded.path, folder / "model")
    if not n_history:
        return {}
    cache = make_prompt_cache(loaded.model)
    ids = _ids(loaded.tokenizer, n_history)
    for at in range(0, n_history, 256):
        loaded.model(mx.array([ids[at : at + 256]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    save_prompt_cache(str(_cache_file(folder, None)), cache)
    save_prompt_cache(str(_cache_file(folder, 4)), [layer.to_quantized(group_size=64, bits=4) for layer in cache])
    return {}


def save_float32(model: Any, source: Path, target: Path) -> None:
    """A model folder with the weights that are in memory."""
    from mlx_lm.utils import save_model

    if target.exists():
        return
    save_model(target, model)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}), encoding="utf-8")
    for file in source.iterdir():
        if not (target / file.name).exists() and not file.name.startswith("model"):
            shutil.copy(file, target / file.name)


def _cache_file(folder: Path, bits: int | None) -> Path:
    return folder / f"cache-{bits or 16}.safetensors"


def _ids(tokenizer: Any, n_tokens: int) -> list[int]:
    ids: list[int] = tokenizer.encode(SENTENCE * (n_tokens // 15 + 1))
    return ids[:n_tokens]


WORKERS: dict[str, Callable[[Path, int, int], dict[str, Any]]] = {
    "amem": amem_turn,
    "mlx-lm": lambda *given: mlx_lm_turn(*given, bits=None),
    "mlx-lm q4": lambda *given: mlx_lm_turn(*given, bits=4),
    "prepare": mlx_lm_prepare,
}


# -- the parent --------------------------------------------------------------------------------------------------------


def run(worker: str, folder: Path, n_history: int, n_message: int) -> dict[str, Any]:
    """A worker in a new process; its figures, and the seconds from its start to its first token."""
    command = [sys.executable, "-m", "benchmarks.peers", "--worker", worker, "--folder", str(folder)]
    started = time.time()
    done = subprocess.run(
        [*command, "--history", str(n_history), "--message", str(n_message)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{worker} at {n_history} tokens failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "first_token_at" in found:
        found["process_to_first_token_s"] = found.pop("first_token_at") - started
    return found


def next_turns(length: int, repeats: int) -> dict[str, Any]:
    """All samples of one length: amem's first, cold turn, and the turns after it."""
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cold = run("amem", folder / "told", length, 0)
        warm_up = run("amem", Path(shutil.copytree(folder / "told", folder / "warm-up")), length, 0)
        n_history, n_message = warm_up["n_history"], warm_up["n_message"]
        run("prepare", folder, n_history, n_message)
        for peer in PEERS[1:]:
            run(peer, folder, n_history, n_message)
        samples: dict[str, list[dict[str, Any]]] = {peer: [] for peer in PEERS}
        for repeat in range(repeats):
            for peer in PEERS:
                own = shutil.copytree(folder / "told", folder / str(repeat)) if peer == "amem" else folder
                samples[peer].append(run(peer, Path(own), n_history, n_message))
    return {
        "n_history": n_history,
        "n_message": n_message,
        "cold": cold,
        "samples": samples,
        "medians": {
            peer: {figure: median(sample[figure] for sample in found) for figure in FIGURES}
            for peer, found in samples.items()
        },
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
    }


def cold_turns(length: int) -> dict[str, Any]:
    """The same prompt computed from nothing by each, once."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours = run("amem", folder / "told", length, 0)
        n_tokens = ours["n_message"]
        run("prepare", folder, 0, 0)
        peers = {peer: run(peer, folder, 0, n_tokens) for peer in PEERS[1:]}
    return {"n_tokens": n_tokens, "samples": {"amem": ours, **peers}}


def main() -> None:
    """Measure, print a table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 7000])
    parser.add_argument("--cold", type=int, nargs="*", default=list(COLD_LENGTHS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    for hidden, kind in (("--folder", Path), ("--history", int), ("--message", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(WORKERS[options.worker](options.folder, options.history, options.message)))
        return
    cold = []
    for length in options.cold:
        cold.append(cold_turns(length))
        for peer, sample in cold[-1]["samples"].items():
            rate = sample["prefill_tokens_per_s"]
            print(
                f"{cold[-1]['n_tokens']:>6} cold {peer:>12}: TTFT {sample['ttft_s']:.2f} s, {rate:.1f} tokens/s",
                flush=True,
            )
    rows = []
    for length in options.lengths:
        rows.append(next_turns(length, options.repeats))
        for peer, found in rows[-1]["medians"].items():
            print(
                f"{rows[-1]['n_history']:>6} next {peer:>12}: TTFT {found['ttft_s']:.3f} s, decode "
                f"{found['decode_tokens_per_s']:.1f} tokens/s, from the start of its process "
                f"{found['process_to_first_token_s']:.2f} s",
                flush=True,
            )
    result = {"machine": machine(), "what": " ".join((__doc__ or "").split()), "cold": cold, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
