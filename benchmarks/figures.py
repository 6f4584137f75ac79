"""The figures of README, drawn from the result files alone: needs the extra `bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "amem"  # the same numbers give the same file

from matplotlib import pyplot as plt  # noqa: E402  # after the choice of how it draws

ROOT = Path(__file__).parent.parent
FIDELITY = ROOT / "docs" / "images" / "fidelity.svg"
OURS = ("q2", "q3", "q4", "q8", "fp16")
LENGTH = "prose, 768 tokens"


def fidelity(result: dict[str, Any], path: Path) -> None:
    """Bytes against KL, each form once: the front of ours, and the paper's form beside it."""
    forms, sizes = result["summary"][LENGTH]["forms"], result["bytes"]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")

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
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Draw all of them."""
    fidelity(json.loads((ROOT / "benchmarks/results/fidelity.json").read_text(encoding="utf-8")), FIDELITY)


if __name__ == "__main__":
    main()
