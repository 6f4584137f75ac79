"""The tables of what `benchmarks.peers` wrote: README's, and those of the measurements page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NAMES = {
    "amem": "amem",
    "mlx-lm": "mlx-lm, float32 cache",
    "mlx-lm q4": "mlx-lm, 4-bit cache",
    "llama.cpp f16": "llama.cpp, f16",
    "llama.cpp q4_0": "llama.cpp, q4_0",
    "transformers": "Transformers, bfloat16 cache",
    "transformers q4": "Transformers, 4-bit cache",
}
_COMPARED = 4096  #: the length at which the others are told as multiples of amem
_SHORT, _LONG = 1024, 7000  #: lengths between which the growth of the time to first token is told
_AIM_MS = 200  #: what it should not grow by
Row = Mapping[str, Any]


def short_table(result: Mapping[str, Any]) -> str:
    """Times to first token of the next turn, and of the same prompts from nothing."""
    rows = [row for row in result["rows"] if row["case"] != "again"]
    machine = result["machine"]
    lines = _lines(rows, _kept_and_new, lambda found: f"{found['ttft_s']:.2f} s")
    return f"""
Beside {_who(result)}, each with a state of the same tokens that was saved before
(`benchmarks/results/peers.json`, {machine["date"][:10]}, {machine["cores"]} cores, {machine["processor"]}, the bundled model). Time to first token in a
process of its own for each, the model already loaded; {_repeats(rows)}. [More of it](docs/measurements.md#beside-others).

{lines}
{_ratios(rows)}"""


def tables(result: Mapping[str, Any]) -> str:
    """All that was measured: times, rates, bytes, the identical prompt, the whole process."""
    by_case = {case: [row for row in result["rows"] if row["case"] == case] for case in ("next", "again", "cold")}
    machine = result["machine"]
    parts = [
        f"""From `benchmarks/results/peers.json` ({machine["date"][:10]}; {machine["processor"]}, {machine["cores"]} cores), which has all samples and the load of the
machine. Each turn is a process of its own; the peers take turns; {_repeats(result["rows"])}. mlx-lm is as it is
installed, with float32 weights, which are its fastest here; llama.cpp reads the model's own GGUF file and, with flash
attention, keeps K and V in f16 or q4_0.{_of_transformers(result["rows"])}"""
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
            if rows is by_case["next"] and cell is _ttft_and_restore:
                parts += [told.strip() for told in (_ratios(rows), _growth(rows)) if told]
    if by_case["next"]:
        rows = [
            row | {"medians": {name: found[0] for name, found in row["samples"].items()}} for row in by_case["next"]
        ]
        parts.append(f"The state on disk:\n\n{_lines(rows, _context, _size)}")
    return "\n\n".join(parts) + "\n"


def _lines(rows: Sequence[Row], label: Callable[[Row], str], cell: Callable[[Row], str]) -> str:
    """A Markdown table: a column for each peer that was measured; a dash where a row lacks it."""
    peers = [name for name in _NAMES if any(name in row["medians"] for row in rows)]
    head = f"| | {' | '.join(_NAMES[name] for name in peers)} |\n|{'---|' * (len(peers) + 1)}"
    body = [
        f"| {label(row)} | {' | '.join(cell(row['medians'][name]) if name in row['medians'] else '-' for name in peers)} |"
        for row in rows
    ]
    return "\n".join([head, *body])


def _ratios(rows: Sequence[Row]) -> str:
    """The others' times to first token as multiples of amem's; empty if the length or amem was not measured."""
    for row in rows:
        found = row["medians"]
        if (row["case"], row["length"]) == ("next", _COMPARED) and "amem" in found:
            others = [
                f"{label} {found[name]['ttft_s'] / found['amem']['ttft_s']:.1f}"
                for name, label in _NAMES.items()
                if name in found and name != "amem"
            ]
            return f"""
After {row["n_history"]} tokens the others' times to first token are these multiples of amem's (below 1: sooner than amem):
{"; ".join(others)}.
"""
    return ""


def _growth(rows: Sequence[Row]) -> str:
    """What the time to first token grows by with the history; empty if one of the lengths was not measured."""
    by_length = {row["length"]: row for row in rows}
    if not {_SHORT, _LONG} <= by_length.keys():
        return ""
    short, long = by_length[_SHORT], by_length[_LONG]
    grown = {
        name: (long["medians"][name]["ttft_s"] - short["medians"][name]["ttft_s"]) * 1e3
        for name in _NAMES
        if name in short["medians"] and name in long["medians"]
    }
    amem = grown.pop("amem", None)
    if amem is None:
        return ""
    others = "; ".join(f"{_NAMES[name]} {ms:+.0f} ms" for name, ms in grown.items())
    return f"""
From {short["n_history"]} to {long["n_history"]} tokens of history amem's time to first token changes by {amem:+.0f} ms (the aim is at most {_AIM_MS} ms:
{"met" if amem <= _AIM_MS else "missed"}). The others': {others}.
"""


def _who(result: Mapping[str, Any]) -> str:
    """The peers with their versions."""
    of_mlx, transformers = result["machine"]["versions"], _transformers(result["rows"])
    others = [f"stock mlx-lm {of_mlx['mlx-lm']}"]
    if "llama-cpp-python" in of_mlx:
        others.append(f"llama.cpp (llama-cpp-python {of_mlx['llama-cpp-python']})")
    if transformers:
        others.append(f"Transformers {transformers['transformers']} (torch {transformers['torch']})")
    return " and ".join([", ".join(others[:-1]), others[-1]] if others[1:] else others)


def _transformers(rows: Sequence[Row]) -> Mapping[str, str]:
    """The versions of the environment that Transformers ran in; none if it was not measured."""
    found = [row["versions"]["transformers"] for row in rows if "transformers" in row.get("versions", {})]
    return found[-1] if found else {}


def _of_transformers(rows: Sequence[Row]) -> str:
    versions = _transformers(rows)
    if not versions:
        return ""
    quanto = f", and its 4-bit cache is optimum-quanto's {found}" if (found := versions.get("optimum-quanto")) else ""
    return (
        f" Transformers {versions['transformers']}\nruns on torch {versions['torch']} with weights in bfloat16{quanto}."
    )


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
