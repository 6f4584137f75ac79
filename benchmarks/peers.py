"""The next turn after a long history, side by side with what people would use instead.

For each length an agent is told a text once. Then come, in turns and each in a new process: amem on its own copy of the
store, stock mlx-lm with a saved prompt cache, as it is and quantized to 4 bits, and llama.cpp (if `llama-cpp-python` is
installed: the extra `peers`) with a saved state, in f16 and in q4_0. All get the same tokens, on as many threads as
there are cores. Stock mlx-lm runs as it is installed: its processes import nothing that changes MLX's BLAS. It is given
the weights in float32, which is best for it here: with the quantized ones MLX takes seconds for a token. Three cases:
the next turn, the identical prompt again (only its last token is computed), and the prompt from nothing.

Each row is written to the result file when it is whole, in place of an older one of its case and length; so the
lengths can be measured one by one, and what is prepared can be kept (`--folder`) and made before (`--prepare-only`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import peer_turns
from benchmarks.machine import machine

RESULT = Path(__file__).parent / "results" / "peers.json"
LENGTHS = (512, 1024, 2048, 4096, 7000)
COLD_LENGTHS = (512, 1024)  #: stock mlx-lm computes some ten tokens a second
AGAIN_LENGTHS = (1024, 4096)
FIGURES = ("process_to_first_token_s", "load_s", "ttft_s", "restore_s", "decode_tokens_per_s", "prefill_tokens_per_s")
CASES = ("next", "again", "cold")
ONCE_S = 60  #: what takes longer is measured once


def peers() -> list[str]:
    """Those that can run here."""
    has_llama = importlib.util.find_spec("llama_cpp") is not None
    return [name for name in peer_turns.PEERS if has_llama or not name.startswith("llama.cpp")]


def in_new_process(*arguments: str | Path) -> dict[str, Any]:
    """Run this module in a process of its own; what it prints last."""
    started = time.time()
    command = [sys.executable, "-m", "benchmarks.peers", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "first_token_at" in found:
        found["process_to_first_token_s"] = found.pop("first_token_at") - started
    return found


def prepared(root: Path, length: int) -> Path:
    """The folder of a length: the told agent, and each peer's saved state of the same history."""
    folder = root / str(length)
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    told = in_new_process("--tell", length, "--at", folder)
    ids = in_new_process("--prepare", folder, "--models", root / "models", "--reply", json.dumps(told["reply_ids"]))
    if "llama.cpp f16" in peers():
        in_new_process("--prepare-llama", folder, "--models", root / "models")
    print(f"prepared: {folder}, {ids}", flush=True)
    (folder / "done").touch()
    return folder


def measured(root: Path, case: str, length: int, repeats: int, names: Sequence[str]) -> dict[str, Any]:
    """All samples of one case and length: each peer in turns, after a round that is not counted."""
    load_before = os.getloadavg()
    folder = prepared(root, length)
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        for name, found in samples.items():
            if repeat and found[0]["ttft_s"] > ONCE_S:
                continue
            sample = turn(name, folder, root / "models", case)
            if repeat == 1:
                found.clear()  # the warm-up
            found.append(sample)
    wanted = {name: (found[0]["n_history"], found[0]["n_message"]) for name, found in samples.items()}
    if case == "next" and len(set(wanted.values())) > 1:
        raise SystemExit(f"not the same tokens for all: {wanted}")
    return {
        "case": case,
        "length": length,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "n_history": wanted[names[-1]][0],
        "n_message": wanted[names[-1]][1],
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "medians": {
            name: {figure: median(sample[figure] for sample in found) for figure in FIGURES}
            for name, found in samples.items()
        },
        "samples": samples,
    }


def turn(name: str, folder: Path, models: Path, case: str) -> dict[str, Any]:
    """One turn in a new process; amem's on a copy of its store, so that all have the same history."""
    if name != "amem":
        return in_new_process("--turn", name, "--at", folder, "--models", models, "--case", case)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        shutil.copy(folder / peer_turns.IDS, own)
        if case != "cold":
            shutil.copytree(folder / "store", Path(own) / "store")
        return in_new_process("--turn", name, "--at", own, "--models", models, "--case", case)


def write(row: dict[str, Any], result: Path) -> None:
    """Put a row into the result file, in place of an older one of its case and length."""
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"] if result.exists() else []
    rows = [other for other in rows if (other["case"], other["length"]) != (row["case"], row["length"])]
    rows = sorted([*rows, row], key=lambda row: (CASES.index(row["case"]), row["length"]))
    of = {"machine": machine("llama-cpp-python"), "what": " ".join((__doc__ or "").split()), "rows": rows}
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps(of, indent=1) + "\n", encoding="utf-8")


def _worker(options: argparse.Namespace) -> dict[str, Any] | None:
    """What a process that was started by another one of this module does; None in the first one."""
    if options.tell:
        return peer_turns.tell(options.at, options.tell)
    if options.prepare:
        return peer_turns.prepare(options.prepare, options.models, json.loads(options.reply))
    if options.prepare_llama:
        return peer_turns.prepare_llama_cpp(options.prepare_llama, options.models)
    if options.turn:
        return peer_turns.PEERS[options.turn](peer_turns.Turn(options.at, options.models, options.case))
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for case, lengths in zip(CASES, (LENGTHS, AGAIN_LENGTHS, COLD_LENGTHS), strict=True):
        parser.add_argument(f"--{case}", type=int, nargs="*", default=list(lengths), help="lengths in tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", nargs="+", choices=peers(), default=peers(), help="default: all that are installed")
    parser.add_argument("--folder", type=Path, help="where what is prepared is kept; default: it is not")
    parser.add_argument("--prepare-only", action="store_true")
    parser.add_argument("--result", type=Path, default=RESULT)
    for hidden, kind in (("tell", int), ("at", Path), ("models", Path), ("prepare", Path), ("prepare-llama", Path)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    for hidden in ("turn", "case", "reply"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if (found := _worker(options)) is not None:
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = options.folder or Path(scratch)
        for case in CASES:
            for length in getattr(options, case):
                if options.prepare_only:
                    prepared(root, length)
                    continue
                row = measured(root, case, length, options.repeats, options.peers)
                write(row, options.result)
                for name, figures in row["medians"].items():
                    print(
                        f"{case:>5} {row['n_history']:>5} + {row['n_message']:>4} {name:>14}: TTFT "
                        f"{figures['ttft_s']:.3f} s (restore {figures['restore_s'] * 1e3:.0f} ms), prefill "
                        f"{figures['prefill_tokens_per_s']:.0f}/s, decode {figures['decode_tokens_per_s']:.1f}/s, from "
                        f"the process's start {figures['process_to_first_token_s']:.2f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
