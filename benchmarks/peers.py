"""The next turn after a long history, side by side with what people would use instead.

For each length an agent is told a text once. Then come, in turns and each in a new process: amem on its own copy of the
store; stock mlx-lm with a saved prompt cache, as it is and quantized to 4 bits; llama.cpp (if `llama-cpp-python` is
installed: the extra `peers`) with a saved state, in f16 and in q4_0; and Transformers on torch's CPU (if
`--transformers-python` names the interpreter of an environment that has it) with a saved cache, as it is and, where
quanto is installed, quantized to 4 bits. All get the same tokens, on as many threads as there are cores. Stock mlx-lm
runs as it is installed: its processes import nothing that changes MLX's BLAS. It is given the weights in float32, which
is best for it here: with the quantized ones MLX takes seconds for a token. Transformers gets them in bfloat16. Three
cases: the next turn, the identical prompt again (only its last token is computed), and the prompt from nothing.

Each row is written to the result file when it is whole, in place of an older one of its case and length; so the
lengths can be measured one by one, and what is prepared can be kept (`--folder`) and made before (`--prepare-only`). It
is prepared anew where the sources or versions that made it were others: a store that another amem wrote may be brought
up to date when it is opened, and the figures would be of that.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import peer_transformers, peer_turns
from benchmarks.machine import machine, versions

RESULT = Path(__file__).parent / "results" / "peers.json"
LENGTHS = (512, 1024, 2048, 4096, 7000)
COLD_LENGTHS = (512, 1024)  #: stock mlx-lm computes some ten tokens a second
AGAIN_LENGTHS = (1024, 4096)
_DONE = "done"  # in a length's folder: what made it, once all of it is there
FIGURES = ("process_to_first_token_s", "load_s", "ttft_s", "restore_s", "decode_tokens_per_s", "prefill_tokens_per_s")
CASES = ("next", "again", "cold")
ONCE_S = 60  #: what takes longer is measured once
PEERS: dict[str, Callable[[peer_turns.Turn], dict[str, Any]]] = peer_turns.PEERS | peer_transformers.PEERS

#: What an environment must have for peers to run in it, by the first word of their names.
_PACKAGES = {
    "amem": ("amem", "mlx", "mlx-lm"),
    "mlx-lm": ("mlx", "mlx-lm"),
    "llama.cpp": ("llama-cpp-python",),
    "transformers": peer_transformers.PACKAGES,
}


@dataclass(frozen=True)
class Environment:
    """An interpreter, and what of a peer's packages it has."""

    python: str
    versions: Mapping[str, str]


def environments(transformers: str | None = None) -> dict[str, Environment]:
    """Where each kind of peer can run, by the first word of its names; what is not installed is left out."""
    found = {
        kind: Environment(sys.executable, versions(*packages))
        for kind, packages in _PACKAGES.items()
        if kind != "transformers"
    }
    if not found["llama.cpp"].versions:
        del found["llama.cpp"]
    if transformers:
        there = Environment(transformers, in_new_process("--versions", python=transformers))
        if not {"torch", "transformers"} <= there.versions.keys():
            raise SystemExit(f"{transformers} has no torch and transformers: see CONTRIBUTING.")
        found["transformers"] = there
    return found


def peers(where: Mapping[str, Environment]) -> list[str]:
    """Those that can run here."""
    return [
        name
        for name in PEERS
        if (kind := name.split()[0]) in where
        and (name != "transformers q4" or "optimum-quanto" in where[kind].versions)
    ]


def made_by(where: Mapping[str, Environment]) -> dict[str, dict[str, str]]:
    """What decides the prepared files of each kind of peer: versions, and a hash of the sources that write them."""
    of_amem = Path(str(importlib.util.find_spec("amem").origin)).parent  # type: ignore[union-attr]
    of_peers = Path(__file__).parent
    amem = [*sorted((of_amem / "store").rglob("*.py")), of_amem / "kv" / "codec.py"]  # the form of what is stored
    sources = {"transformers": [of_peers / "peer_transformers.py"], "amem": [*amem, of_peers / "peer_turns.py"]}
    return {
        kind: {
            **environment.versions,
            "sources": hashlib.sha256(b"".join(file.read_bytes() for file in sources.get(kind, ()))).hexdigest(),
        }
        for kind, environment in where.items()
    }


def in_new_process(*arguments: str | Path | int, python: str = sys.executable) -> dict[str, Any]:
    """Run this module in a process of its own; what it prints last."""
    started = time.time()
    command = [python, "-m", "benchmarks.peers", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "first_token_at" in found:
        found["process_to_first_token_s"] = found.pop("first_token_at") - started
    return found


def prepared(root: Path, length: int, where: Mapping[str, Environment]) -> Path:
    """The folder of a length: the told agent, and each peer's saved state of the same history."""
    folder, wanted = root / str(length), made_by(where)
    if (folder / _DONE).exists():
        made = json.loads((folder / _DONE).read_text(encoding="utf-8") or "{}")
        if all(made.get(kind) == by for kind, by in wanted.items()):
            return folder
    shutil.rmtree(folder, ignore_errors=True)
    told = in_new_process("--tell", length, "--at", folder)
    models = ("--models", root / "models")
    ids = in_new_process("--prepare", folder, *models, "--reply", json.dumps(told["reply_ids"]))
    if "llama.cpp" in where:
        in_new_process("--prepare-llama", folder, *models)
    if there := where.get("transformers"):
        quantized = ["--quantized"] if "optimum-quanto" in there.versions else []
        in_new_process("--prepare-transformers", folder, *models, *quantized, python=there.python)
    print(f"prepared: {folder}, {ids}", flush=True)
    (folder / _DONE).write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
    return folder


def measured(
    root: Path, case: str, length: int, repeats: int, names: Sequence[str], where: Mapping[str, Environment]
) -> dict[str, Any]:
    """All samples of one case and length: each peer in turns, after a round that is not counted."""
    folder = prepared(root, length, where)
    load_before = os.getloadavg()
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        for name, found in samples.items():
            if repeat and found[0]["ttft_s"] > ONCE_S:
                continue
            sample = turn(name, folder, root / "models", case, where[name.split()[0]].python)
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
        "versions": {kind: where[kind].versions for kind in dict.fromkeys(name.split()[0] for name in names)},
        "medians": {
            name: {figure: median(sample[figure] for sample in found) for figure in FIGURES}
            for name, found in samples.items()
        },
        "samples": samples,
    }


def turn(name: str, folder: Path, models: Path, case: str, python: str = sys.executable) -> dict[str, Any]:
    """One turn in a new process; amem's on a copy of its store, so that all have the same history."""
    if name != "amem":
        return in_new_process("--turn", name, "--at", folder, "--models", models, "--case", case, python=python)
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
    if options.prepare_transformers:
        return peer_transformers.prepare(options.prepare_transformers, options.models, quantized=options.quantized)
    if options.versions:
        return versions(*peer_transformers.PACKAGES)
    if options.turn:
        return PEERS[options.turn](peer_turns.Turn(options.at, options.models, options.case))
    return None


def parser() -> argparse.ArgumentParser:
    """Of this module's command line, and of what it starts."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for case, lengths in zip(CASES, (LENGTHS, AGAIN_LENGTHS, COLD_LENGTHS), strict=True):
        found.add_argument(f"--{case}", type=int, nargs="*", default=list(lengths), help="lengths in tokens")
    found.add_argument("--repeats", type=int, default=5)
    found.add_argument("--peers", nargs="+", choices=list(PEERS), help="default: all that are installed")
    found.add_argument(
        "--transformers-python", help="of an environment with torch and transformers; CONTRIBUTING has it"
    )
    found.add_argument("--folder", type=Path, help="where what is prepared is kept; default: it is not")
    found.add_argument("--prepare-only", action="store_true")
    found.add_argument("--result", type=Path, default=RESULT)
    found.add_argument("--tell", type=int, help=argparse.SUPPRESS)
    for hidden in ("at", "models", "prepare", "prepare-llama", "prepare-transformers"):
        found.add_argument(f"--{hidden}", type=Path, help=argparse.SUPPRESS)
    for hidden in ("turn", "case", "reply"):
        found.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    for hidden in ("versions", "quantized"):
        found.add_argument(f"--{hidden}", action="store_true", help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the result file."""
    options = parser().parse_args(arguments)
    if (found := _worker(options)) is not None:
        print(json.dumps(found))
        return
    where = environments(options.transformers_python)
    names = options.peers or peers(where)
    if absent := [name for name in names if name not in peers(where)]:
        parser().error(f"not installed: {', '.join(absent)} (Transformers needs --transformers-python)")
    with tempfile.TemporaryDirectory() as scratch:
        root = options.folder or Path(scratch)
        for case in CASES:
            for length in getattr(options, case):
                if options.prepare_only:
                    prepared(root, length, where)
                    continue
                row = measured(root, case, length, options.repeats, names, where)
                write(row, options.result)
                for name, figures in row["medians"].items():
                    print(
                        f"{case:>5} {row['n_history']:>5} + {row['n_message']:>4} {name:>15}: TTFT "
                        f"{figures['ttft_s']:.3f} s (restore {figures['restore_s'] * 1e3:.0f} ms), prefill "
                        f"{figures['prefill_tokens_per_s']:.0f}/s, decode {figures['decode_tokens_per_s']:.1f}/s, from "
                        f"the process's start {figures['process_to_first_token_s']:.2f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
