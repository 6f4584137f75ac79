"""The parts of README and of the documentation that quote measurements, made from the result files alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import peer_tables

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
MEASUREMENTS = ROOT / "docs" / "measurements.md"


def rendered(page: Path) -> str:
    """A page's text with its measured parts made anew from the result files."""
    text = page.read_text(encoding="utf-8")
    for name, make in PAGES[page].items():
        pattern = re.compile(rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        made = _made(make)
        text, n = pattern.subn(lambda found, made=made: f"{found[1]}{made}{found[2]}", text)
        if n != 1:
            raise SystemExit(f"{page.name} has {n} places for {name!r}")
    return text


def _made(make: Callable[[], str]) -> str:
    """A part; empty before it was measured."""
    try:
        return make()
    except FileNotFoundError:
        return ""


def _measured_yet(name: str) -> bool:
    return (ROOT / "benchmarks" / "results" / f"{name}.json").exists()


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _first_session() -> str:
    first, second = _result("first_session")["rows"]
    metrics = second["metrics"]
    return f"""```
%load_ext amem_jupyter
```
```
{first["cell"]}
```

The reply streams into the cell. Then the kernel is restarted, and in a new process:

```
{second["cell"]}
```

This is the plain-text form of the card under that cell (in a notebook it is HTML), as it came out:

```
{second["card"].strip()}
```

The {metrics["reused_tokens"]} tokens of the conversation came back from disk in {metrics["restore_ms"]:.0f} ms; only {metrics["computed_tokens"]} were computed.
"""


def _measured() -> str:
    result = _result("next_turn")
    lines, prefill, decode = [], [], []
    for row in result["rows"]:
        cold, warm = row["cold"], row["restored"]
        ttft, restore = (median(sample[name] for sample in warm) for name in ("ttft_ms", "restore_ms"))
        lines.append(
            f"| {cold['computed_tokens']} tokens | {cold['ttft_ms'] / 1e3:.1f} s | {warm[0]['reused_tokens']} tokens | "
            f"{ttft / 1e3:.2f} s | {restore:.0f} ms |"
        )
        prefill.append(cold["computed_tokens"] / (cold["prefill_ms"] + cold["first_decode_ms"]) * 1e3)
        decode += [sample["tokens_per_second"] for sample in (cold, *warm)]
    machine = result["machine"]
    message = result["rows"][0]["restored"][0]["computed_tokens"]
    return f"""| a first message | its first token, computed from nothing | history of the next turn | its first token, from disk | of it the restore |
|---|---|---|---|---|
{chr(10).join(lines)}

The bundled model on {machine["cores"]} cores ({machine["processor"]}, a shared virtual machine), Python {machine["python"]}, MLX {machine["versions"]["mlx"]}, {machine["date"][:10]}
(`benchmarks/results/next_turn.json`): one sample of each first message, medians of {len(result["rows"][0]["restored"])} next turns of {message} tokens, at a
load average of {machine["load_average"][0]:.0f}. Prefill ran at {min(prefill):.0f} to {max(prefill):.0f} tokens/s, decoding at {min(decode):.1f} to {max(decode):.1f}.
"""


def _peers_in_short() -> str:
    return peer_tables.short_table(_result("peers"))


def _peers() -> str:
    return peer_tables.tables(_result("peers"))


def _restores() -> str:
    result = _result("restore")
    lines = []
    for row in result["rows"]:
        found = row["medians"]
        for cache in ("warm", "dropped"):
            rates = " | ".join(f"{found[f'{kind}_{cache}_gb_per_s']:.2f}" for kind in ("restore", "plain", "streamed"))
            where = "in the page cache" if cache == "warm" else "dropped from it"
            lines.append(
                f"| {row['geometry']} | {row['tokens']} | {row['file_bytes'] / 1e6:.0f} MB, {where} | {rates} | "
                f"{found[f'restore_to_plain_{cache}']:.0%} |"
            )
    loads = [row[when][0] for row in result["rows"] for when in ("load_average_before", "load_average_after")]
    return f"""Restores of real sizes (4 bits, random payloads) against plain reads of the same files in the same run, in GB/s; from
`benchmarks/results/restore.json`, {result["machine"]["date"][:10]}, on {result["machine"]["cores"]} cores with a load average from {min(loads):.0f} to {max(loads):.0f}: take the ratios.
A plain read keeps the bytes (`Path.read_bytes`), as a restore does; streamed means through 1 MiB that stays in the cache.

| geometry | tokens | files | restored | plain read | streamed | restored, of a plain read |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}
"""


def _kills() -> str:
    result = _result("soak")
    at_random = result["kills_at"].get("a random instant", 0)
    return f"""A process that talked to two agents was ended by SIGKILL {result["kills"]} times, {at_random} times at a random instant and otherwise
at a step of a commit; {result["survived"]} times the store was sound, every turn that had been told of was there, and the conversation
went on with the tokens of an undisturbed run (`make soak`, `benchmarks/results/soak.json`).
"""


def _phases() -> str:
    result = _result("phases")
    played = result["played"]
    kept, fresh = (played[way] for way in ("persistent", "not persistent"))
    seconds, computed = (
        [sum(row[name] for row in rows) for rows in (fresh, kept)] for name in ("total_ms", "computed_tokens")
    )
    machine = result["machine"]
    return f"""Three agents that meet in five phases, with a new engine for each (`benchmarks/results/phases.json`; one run of each way, one
after the other, at a load average of {machine["load_average"][0]:.0f} on {machine["cores"]} cores): the first token of the fifth phase came after {fresh[-1]["ttft_ms"] / 1e3:.1f} s without kept state
({fresh[-1]["computed_tokens"]} tokens computed) and after {kept[-1]["ttft_ms"] / 1e3:.1f} s with it ({kept[-1]["computed_tokens"]} tokens). Over all phases {computed[0]} prompt tokens were computed without and {computed[1]} with
it; all requests together took {seconds[0] / 1e3:.0f} s and {seconds[1] / 1e3:.0f} s, of which decoding is the larger part.
"""


def _attention() -> str:
    result = _result("attention")
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in result["rows"]:
        found.setdefault((row["backend"], row["codec"]), {})[row["tokens"]] = row["ms"]
    lengths = sorted(next(iter(found.values())))
    rows = "\n".join(
        f"| {'own kernels' if name == 'cpu' else 'MLX operations'} | `{codec}` | "
        + " | ".join(f"{times[n]:.2f} ms" for n in lengths)
        + " |"
        for (name, codec), times in found.items()
    )
    return f"""One new token's attention in one layer of the bundled model's shape, medians of {len(result["rows"][0]["samples"])} calls that took turns
(`benchmarks/results/attention.json`; Linux on a CPU):

| backend | codec | {" | ".join(f"{n} tokens" for n in lengths)} |
|---|---|{"---|" * len(lengths)}
{rows}
"""


def _batch() -> str:
    result = _result("batch")
    rows = "\n".join(
        f"| {row['agents']} | {one:.2f} s | {all_:.2f} s | {one / all_:.2f} |"
        for row in result["rows"]
        for one, all_ in [(row["median_seconds"]["one by one"], row["median_seconds"]["at once"])]
    )
    return f"""One message to N agents, {result["max_tokens"]} tokens of each reply: one after the other, and as one batch (`ask_all`), in turns in the
same run (`benchmarks/results/batch.json`; medians of {len(result["rows"][0]["samples"]["at once"])}):

| agents | one by one | at once | times faster |
|---|---|---|---|
{rows}
"""


def _memory() -> str:
    result = _result("memory")
    lines, left = [], []
    for codec, found in result["codecs"].items():
        first, last = found["rows"][0], found["rows"][-1]
        n = last["agents"]
        hot, mlx, resident = (
            (last[name] - first[name]) / n / 1e6 for name in ("hot_bytes", "mlx_bytes", "resident_bytes")
        )
        lines.append(f"| `{codec}` | {hot:.1f} MB | {mlx:.1f} MB | {resident:.1f} MB | {resident / hot:.2f} |")
        evicted, restored = found["evicted"], found["restored"]
        left.append(
            f"| `{codec}` | {_mb(last, evicted, 'mlx_bytes')} | {_mb(last, evicted, 'resident_bytes')} | "
            f"{_mb(restored, evicted, 'hot_bytes')} | {_mb(restored, evicted, 'resident_bytes')} |"
        )
    return f"""Each of {n} agents with {last["tokens"]} tokens, told one after the other beside one that was there before; a process for each codec
(`benchmarks/results/memory.json`, {result["machine"]["date"][:10]}). The engine counts what it reserves: the groups in their codec, with
room to grow, and the open group, which is exact. It keeps to its budget by this account.

| codec | an agent, as the engine counts | as MLX counts | growth of the process | of the engine's count |
|---|---|---|---|---|
{chr(10).join(lines)}

Then all {n + 1} were evicted, and restored from disk. An eviction that is asked for gives what MLX
frees back to the system, as far as the C library can:

| codec | evicted: MLX freed | the process shrank by | restored: the engine counts | the process grew by |
|---|---|---|---|---|
{chr(10).join(left)}
"""


def _mb(more: Mapping[str, int], less: Mapping[str, int], name: str) -> str:
    return f"{round((more[name] - less[name]) / 1e6)} MB"


def _overlap() -> str:
    result = _result("overlap")
    found: dict[tuple[int, str], dict[bool, Mapping[str, Any]]] = {}
    for row in result["rows"]:
        if row["scene"] == "turns":
            found.setdefault((row["agents"], row["cache"]), {})[row["overlap"]] = row
    rows = "\n".join(
        f"| {agents} | {'in the page cache' if cache == 'page' else 'dropped from it'} | "
        f"{off['restore_total_ms']:.0f} | {off['restore_seen_ms']:.0f} | {on['restore_total_ms']:.0f} | "
        f"{on['restore_seen_ms']:.0f} |"
        for (agents, cache), ways in found.items()
        for off, on in [(ways[False], ways[True])]
    )
    beside = result["staggered"]["dropped"]
    alone, crowded = beside["a_gaps_alone_ms"], beside["a_gaps_ms"]
    return f"""N agents with {result["history_tokens"]} tokens each, all on disk, are asked one after the other, in an order in which they were asked
before: with prefetch each one's restore happens while the one before it is answered. Milliseconds of all restores
together, and what of them the callers saw (`benchmarks/results/overlap.json`):

| agents | files | without: in all | seen | with prefetch: in all | seen |
|---|---|---|---|---|---|
{rows}

While A decodes, B arrives with its state on disk: B's first token came after {beside["b_ttft_ms"]:.0f} ms, against {beside["b_ttft_alone_ms"]:.0f} ms alone. A's
tokens came every {alone["p50"]:.0f} ms alone, at most {alone["max"]:.0f} ms apart; with B every {crowded["p50"]:.0f} ms, at most {crowded["max"]:.0f} ms.
"""


def _eviction() -> str:
    result = _result("eviction")
    policies = list(next(iter(result["workloads"].values()))["replays"][0]["hit_rates"])
    rows = "\n".join(
        f"| {name} | {replay['budget_share']:.0%} | {' | '.join(rates)} |"
        for name, workload in result["workloads"].items()
        for replay in workload["replays"]
        for rates in [[f"{replay['hit_rates'][policy]:.0%}" for policy in policies]]
    )
    return f"""How often an agent that is asked is still in memory, replayed on what an engine really served; the budget as a share of
what all agents together take (`benchmarks/results/eviction.json`). LRU is what amem does; Belady's optimum knows the future.

| who is asked | budget | {" | ".join(policies)} |
|---|---|{"---|" * len(policies)}
{rows}
"""


_NAMES = {"paper": "the paper's Q4", "q4-affine": "`q4-affine`: the paper's, with the own group exact"}


def _fidelity() -> str:
    result = _result("fidelity")
    first, *others = result["summary"].items()
    lines = []
    for form, row in sorted(first[1]["forms"].items(), key=lambda item: item[1]["kl"]):
        if form in result["bytes"]:
            lines.append(
                f"| {_NAMES.get(form, f'`{form}`')} | {result['bytes'][form]['effective_4k']:.3f} | "
                f"{row['perplexity_change']:+.2%}{_ends(row['perplexity_interval'], '+.2%')} | "
                f"{row['kl']:#.2g}{_ends(row['kl_interval'], '#.2g')} | {row['kl_p99']:#.2g} | "
                f"{row['top1_agreement']:.1%} | {row['documents']} |"
            )
    [floor] = [row for form, row in first[1]["forms"].items() if form not in result["bytes"]]
    equivalent = [
        f"`{form}`" for form, row in first[1]["forms"].items() if row["equivalent"] and form in result["bytes"]
    ]
    ratios = "; ".join(
        f"{found['kl']:.1f}{_ends(found['interval'], '.1f')} times lower in `{pair.split(' / ')[1]}` than in "
        f"{_NAMES[pair.split(' / ')[0]].split(':')[0]}"
        for pair, found in first[1]["ratios"].items()
    )
    more = [
        f"| {name} | {part['documents']} | "
        + " | ".join(
            f"{part['forms'][form]['kl']:#.2g}, {part['forms'][form]['perplexity_change']:+.2%}"
            for form in ("q4", "q3", "q4-affine", "paper")
        )
        + " |"
        for name, part in [first, *others]
    ]
    return f"""Speeches of 768 tokens, teacher-forced through the engine's caches beside full precision on the same path
(`benchmarks/results/fidelity.json`, {result["machine"]["date"][:10]}; `python -m benchmarks.fidelity`). Means over documents, 90% BCa intervals;
KL in nats a token; bytes are an agent's at 4096 tokens as a part of FP16, with the open group at its average (float32 here).

| codec | bytes | perplexity | KL | p99 of KL | top-1 | documents |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}

Full precision against itself, computed in another way: KL {floor["kl"]:.0e}. KL is {ratios}.

Within half a percent of perplexity with 95% confidence: {", ".join(equivalent) or "none"}.

KL and change of perplexity, by length and kind of text (code is Python's standard library):

| text | documents | `q4` | `q3` | `q4-affine` | the paper's Q4 |
|---|---|---|---|---|---|
{chr(10).join(more)}
{_needle()}"""


def _fidelity_in_short() -> str:
    result = _result("fidelity")
    (name, first), *_ = result["summary"].items()
    lines = [
        f"| {_NAMES.get(form, f'`{form}`')} | {result['bytes'][form]['effective_4k']:.3f} | "
        f"{first['forms'][form]['perplexity_change']:+.2%} | {first['forms'][form]['kl']:#.2g} | "
        f"{first['forms'][form]['top1_agreement']:.1%} | {first['forms'][form]['documents']} |"
        for form in ("q8", "q4", "q3", "q2", "paper")
    ]
    return f"""Against full precision on the bundled model, {name} (`benchmarks/results/fidelity.json`, {result["machine"]["date"][:10]}). Bytes are those
of an agent of 4096 tokens, as a part of FP16; KL in nats a token. [With intervals, longer texts and code](docs/measurements.md).

| codec | bytes | perplexity | KL | same likeliest token | documents |
|---|---|---|---|---|---|
{chr(10).join(lines)}

![Bytes against KL from full precision: our codecs from 2 to 16 bits, and the paper's](docs/images/fidelity.svg)
"""


def _ends(interval: list[float] | None, form: str) -> str:
    return "" if interval is None else f" [{interval[0]:{form}}, {interval[1]:{form}}]"


def _needle() -> str:
    """Empty before it was measured."""
    if not _measured_yet("needle"):
        return ""
    result = _result("needle")
    forms: dict[str, list[int]] = {}
    for row in result["rows"]:
        found = forms.setdefault(row["form"], [0, 0])
        found[0] += row["found"]
        found[1] += row["needles"]
    told = ", ".join(
        f"{_NAMES.get(form, f'`{form}`').split(':')[0]} {n} of {total}"
        for form, (n, total) in forms.items()
        if form != "exact"
    )
    return f"""
A number of five digits hidden at three depths of {result["tokens"]} tokens and asked for at the end was found {forms["exact"][0]} of {forms["exact"][1]} times at full
precision; {told}.
"""


#: The measured parts of each page, by the name that its markers bear.
PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {
        "measured": _measured,
        "peers": _peers_in_short,
        "first session": _first_session,
        "fidelity in short": _fidelity_in_short,
    },
    MEASUREMENTS: {
        "peers": _peers,
        "fidelity": _fidelity,
        "restores": _restores,
        "overlap": _overlap,
        "attention": _attention,
        "batch": _batch,
        "memory": _memory,
        "eviction": _eviction,
        "kills": _kills,
        "phases": _phases,
    },
}


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rendered(path), encoding="utf-8")
