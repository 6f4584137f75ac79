"""The tables of what `benchmarks.peers` wrote: README's, and those of the measurements page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NAMES = {
    "amem": "amem",
    "mlx-lm": "mlx-lm, 16-bit cache",
    "mlx-lm q4": "mlx-lm, 4-bit cache",
    "llama.cpp f16": "llama.cpp, f16",
    "llama.cpp q4_0": "llama.cpp, q4_0",
}
Row = Mapping[str, Any]


def short_table(result: Mapping[str, Any]) -> str:
    """Times to first token of the next turn, and of the same prompts from nothing."""
    rows = [row for row in result["rows"] if row["case"] != "again"]
    machine, versions = result["machine"], result["machine"]["versions"]
    llama = (
        f" and llama.cpp (llama-cpp-python {versions['llama-cpp-python']})" if "llama-cpp-python" in versions else ""
    )
    lines = _lines(rows, _kept_and_new, lambda found: f"{found['ttft_s']:.2f} s")
    return f"""
Beside stock mlx-lm {versions["mlx-lm"]}{llama}, each with a state of the same tokens that was saved before
(`benchmarks/results/peers.json`, {machine["date"][:10]}, {machine["cores"]} cores, {machine["processor"]}, the bundled model). Time to first token in a
process of its own for each, the model already loaded; {_repeats(rows)}. [More of it](docs/measurements.md#beside-others).

{lines}
"""


def tables(result: Mapping[str, Any]) -> str:
    """All that was measured: times, rates, bytes, the identical prompt, the whole process."""
    by_case = {case: [row for row in result["rows"] if row["case"] == case] for case in ("next", "again", "cold")}
    machine = result["machine"]
    parts = [
        f"""From `benchmarks/results/peers.json` ({machine["date"][:10]}; {machine["processor"]}, {machine["cores"]} cores), which has all samples and the load of the
machine. Each turn is a process of its own; the peers take turns; {_repeats(result["rows"])}. mlx-lm is as it is
installed, with float32 weights, which are its fastest here; llama.cpp reads the model's own GGUF file and, with flash
attention, keeps K and V in f16 or q4_0."""
    ]
    for title, rows, label, cell in (
        (
            "The next turn: time to first token, and of it the restore",
            by_case["next"],
            _kept_and_new,
            _ttft_and_restore,
        ),
        ("The same, from the start of the process", by_case["next"], _kept_and_new, _process),
        ("The identical prompt again: time to first token", by_case["again"], _prompt, _ttft_and_restore),
        ("A prompt from nothing, in tokens/s", by_case["cold"], _prompt, _prefill),
        ("Decoding, in tokens/s", by_case["next"], _context, _decode),
    ):
        if rows:
            parts.append(f"{title}:\n\n{_lines(rows, label, cell)}")
    if by_case["next"]:
        rows = [
            row | {"medians": {name: found[0] for name, found in row["samples"].items()}} for row in by_case["next"]
        ]
        parts.append(f"The state on disk:\n\n{_lines(rows, _context, _size)}")
    return "\n\n".join(parts) + "\n"


def _lines(rows: Sequence[Row], label: Callable[[Row], str], cell: Callable[[Row], str]) -> str:
    peers = [name for name in _NAMES if all(name in row["medians"] for row in rows)]
    head = f"| | {' | '.join(_NAMES[name] for name in peers)} |\n|{'---|' * (len(peers) + 1)}"
    body = [f"| {label(row)} | {' | '.join(cell(row['medians'][name]) for name in peers)} |" for row in rows]
    return "\n".join([head, *body])


def _repeats(rows: Sequence[Row]) -> str:
    counts = sorted({len(found) for row in rows for found in row["samples"].values()})
    if counts == [1]:
        return "one sample of each"
    return f"medians of {counts[-1]}" + (", one sample of what takes over a minute" if counts[0] == 1 else "")


def _kept_and_new(row: Row) -> str:
    return f"{row['n_history'] or 'nothing'} + {row['n_message']} tokens"


def _prompt(row: Row) -> str:
    return f"{row['n_history'] + row['n_message']} tokens"


def _context(row: Row) -> str:
    return f"{row['n_history']} tokens"


def _ttft_and_restore(found: Row) -> str:
    return f"{found['ttft_s'] * 1e3:.0f} ms ({found['restore_s'] * 1e3:.0f})"


def _process(found: Row) -> str:
    return f"{found['process_to_first_token_s']:.2f} s"


def _prefill(found: Row) -> str:
    return f"{found['prefill_tokens_per_s']:.0f}"


def _decode(found: Row) -> str:
    return f"{found['decode_tokens_per_s']:.1f}"


def _size(found: Row) -> str:
    return f"{found['state_bytes'] / 1e6:.1f} MB"
