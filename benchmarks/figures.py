"""The figures of README, drawn from the result files alone: needs the extra `bench`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "amem"  # the same numbers give the same file

from matplotlib import pyplot as plt  # noqa: E402  # after the choice of how it draws
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: E402

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
OURS = ("q2", "q3", "q4", "q8", "fp16")
LENGTH = "prose, 768 tokens"
PEERS = {
    "amem": "#0072b2",
    "llama.cpp f16": "#009e73",
    "llama.cpp q4_0": "#56b4e9",
    "mlx-lm": "#e69f00",
    "mlx-lm q4": "#d55e00",
    "transformers": "#cc79a7",
    "transformers q4": "#882255",
}


def _axes(width: float = 7) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(width, 4.2), layout="constrained")
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _log(axes: Axes) -> None:
    """A logarithmic axis of values that is read in plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def fidelity(result: dict[str, Any], path: Path) -> None:
    """Bytes against KL, each form once: the front of ours, and the paper's form beside it."""
    forms, sizes = result["summary"][LENGTH]["forms"], result["bytes"]
    figure, axes = _axes()

    def point(form: str) -> tuple[float, float]:
        return sizes[form]["effective_4k"], forms[form]["kl"]

    axes.plot(*zip(*map(point, OURS), strict=True), "-", color="#0072b2", linewidth=1, zorder=1)
    marks = [(form, form, "o", "#0072b2") for form in OURS]
    marks += [
        ("q4-affine", "q4-affine\n(own group exact)", "s", "#d55e00"),
        ("paper", "the paper's Q4", "D", "#d55e00"),
    ]
    for form, label, mark, colour in marks:
        x, y = point(form)
        interval = forms[form]["kl_interval"]
        if interval is not None:
            axes.plot([x, x], interval, color=colour, linewidth=2, alpha=0.5)
        axes.plot(x, y, mark, color=colour)
        aside = {"xytext": (-7, -11), "ha": "right"} if form in OURS else {"xytext": (8, 3)}
        axes.annotate(label, (x, y), textcoords="offset points", color=colour, **aside)
    axes.set_yscale("log")
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("bytes of an agent of 4096 tokens, as a part of FP16 (open group included)")
    axes.set_ylabel("KL from full precision, nats a token")
    axes.set_title(f"{result['model']}, speeches of 768 tokens; lower and further left is better", fontsize=10)
    _save(figure, path)


def next_turn(result: dict[str, Any], path: Path) -> None:
    """Time to first token against the length of the history, each way to keep it a line."""
    rows = [row for row in result["rows"] if row["case"] == "next"]
    figure, axes = _axes(width=8)
    for peer, colour in PEERS.items():
        points = [(row["n_history"], row["medians"][peer]["ttft_s"]) for row in rows if peer in row["medians"]]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=peer)
    _log(axes)
    axes.set_xlabel("tokens of the history that was kept on disk")
    axes.set_ylabel("s to the first token of the next turn")
    axes.set_title(f"The next turn ({rows[0]['n_message']} tokens) in a new process, model loaded", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False)  # beside the lines, which fill the plot
    _save(figure, path)


def written(result: dict[str, Any], path: Path) -> None:
    """Bytes that a turn writes against the length of the history: its own blocks, or the whole state again."""
    rows = [row for row in result["rows"] if row["case"] == "next"]
    figure, axes = _axes(width=8)
    for peer, colour in PEERS.items():
        name = "bytes_written" if peer == "amem" else "state_bytes"
        points = [(row["n_history"], row["samples"][peer][0][name] / 1e6) for row in rows if peer in row["samples"]]
        if points:
            label = "amem: the turn" if peer == "amem" else f"{peer}: the state"
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
    _log(axes)
    axes.set_xlabel("tokens of the history")
    axes.set_ylabel("MB written to keep the turn")
    axes.set_title("Bytes written for each turn", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False)  # beside the lines, which fill the plot
    _save(figure, path)


def memory(result: dict[str, Any], path: Path) -> None:
    """Memory against the number of agents: the growth of the process, and what the engine counts as theirs."""
    figure, axes = _axes()
    for (codec, found), colour in zip(result["codecs"].items(), ("#0072b2", "#d55e00"), strict=True):
        rows = found["rows"]
        agents = [row["agents"] for row in rows]
        for name, line, label in (
            ("hot_bytes", "o-", f"{codec}, as the engine counts"),
            ("resident_bytes", "x--", f"{codec}, growth of the process"),
        ):
            grown = [(row[name] - rows[0][name]) / 1e6 for row in rows]
            axes.plot(agents, grown, line, color=colour, label=label)
    axes.set_xlabel(f"agents more in memory, {rows[-1]['tokens']} tokens each")
    axes.set_ylabel("MB more")
    axes.set_title("Memory that agents take (4 bits, and 16)", fontsize=10)
    axes.legend(frameon=False)
    _save(figure, path)


def throughput(result: dict[str, Any], path: Path) -> None:
    """Tokens a second against the number of agents that are asked, at once and one by one."""
    figure, axes = _axes()
    for way, colour in (("at once", "#0072b2"), ("one by one", "#999999")):
        rates = [
            median(sample["generated_tokens"] / sample["seconds"] for sample in row["samples"][way])
            for row in result["rows"]
        ]
        axes.plot([row["agents"] for row in result["rows"]], rates, "o-", color=colour, label=way)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("agents that get a message")
    axes.set_ylabel("generated tokens/s, prompts included in the time")
    axes.set_title("Throughput of a batch", fontsize=10)
    axes.legend(frameon=False)
    _save(figure, path)


#: Each figure with its result file, which may not be there yet.
FIGURES: dict[str, tuple[str, Callable[[dict[str, Any], Path], None]]] = {
    "fidelity": ("fidelity", fidelity),
    "next-turn": ("peers", next_turn),
    "written": ("peers", written),
    "memory": ("memory", memory),
    "throughput": ("batch", throughput),
}


def main() -> None:
    """Draw all of them."""
    for name, (source, draw) in FIGURES.items():
        file = ROOT / "benchmarks" / "results" / f"{source}.json"
        if file.exists():
            draw(json.loads(file.read_text(encoding="utf-8")), IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
