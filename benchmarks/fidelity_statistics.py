"""Means over documents with bootstrap intervals (BCa), paired ratios, and a test of equivalence."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

Floats = npt.NDArray[np.float64]
Row = Mapping[str, Any]

LENGTHS = (768, 1024, 2048, 4096, 7168)
LEVEL = 0.90  #: of the intervals; inside the margins it is a test of equivalence at 5%
PERPLEXITY_MARGIN = 0.005
_RESAMPLES = 9999
_FEWEST = 5  #: documents; of fewer no interval is given


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """For each domain and length what its documents say, cut to that length.

    A length of 1024 is the mean over positions 0 to 1023, of all documents that are at least so long.
    """
    out = {}
    for domain in dict.fromkeys(row["domain"] for row in rows):
        for length in LENGTHS:
            some = _documents(row for row in rows if row["domain"] == domain and row["n_tokens"] >= length)
            if some:
                out[f"{domain}, {length} tokens"] = _part(some, length)
    return out


def _documents(rows: Iterable[Row]) -> list[Row]:
    """One row for each document: the first one, where it was measured in two lengths."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["document"], row)
    return list(first.values())


def _part(rows: Sequence[Row], length: int) -> dict[str, Any]:
    forms = list(dict.fromkeys(form for row in rows for form in row["forms"]))
    found = {form: _form([row for row in rows if form in row["forms"]], form, length) for form in forms}
    ratios = {}
    for form in ("q4", "q3"):
        for other in ("paper", "q4-affine"):
            both = [row for row in rows if form in row["forms"] and other in row["forms"]]
            kl, other_kl = (np.array([cut(row["forms"][name], length)[0] for row in both]) for name in (form, other))
            if both:
                ratio = _interval((other_kl, kl), _ratio)
                ratios[f"{other} / {form}"] = {"kl": float(other_kl.mean() / kl.mean()), "interval": ratio}
    return {"documents": len(rows), "forms": found, "ratios": ratios}


def _form(rows: Sequence[Row], form: str, length: int) -> dict[str, Any]:
    cuts = np.array([cut(row["forms"][form], length) for row in rows])  # [documents, 3]
    kl, more_nll, same = cuts.T
    perplexity = _interval((more_nll,), _mean)
    change = None if perplexity is None else [float(np.expm1(end)) for end in perplexity]
    greedy = [row["forms"][form]["greedy_divergence"] for row in rows if row["n_tokens"] == length]
    return {
        "documents": len(rows),
        "kl": float(kl.mean()),
        "kl_interval": _interval((kl,), _mean),
        "kl_p99": _mean_p99(rows, form, length),
        "perplexity_change": float(np.expm1(more_nll.mean())),
        "perplexity_interval": change,
        "equivalent": None if change is None else max(map(abs, change)) <= PERPLEXITY_MARGIN,
        "top1_agreement": float(same.mean()),
        "greedy_divergence_median": float(np.median(greedy)) if greedy else None,
    }


def _mean_p99(rows: Sequence[Row], form: str, length: int) -> float | None:
    """Of the documents that end there: a quantile cannot be put together from buckets."""
    found = [row["forms"][form]["kl_p99"] for row in rows if row["n_tokens"] == length]
    return float(np.mean(found)) if found else None


def cut(measured: Mapping[str, Any], length: int) -> tuple[float, float, float]:
    """KL, more NLL and top-1 agreement of one document over the positions before ``length``."""
    rows = [row for row in measured["by_position"] if row["start"] < length]
    weights = [row["n_predictions"] for row in rows]
    columns = [[row["kl_mean"], row["nll"] - row["nll_exact"], row["top1_agreement"]] for row in rows]
    kl, more_nll, same = np.average(np.array(columns), axis=0, weights=weights)
    return float(kl), float(more_nll), float(same)


def _mean(x: Floats, axis: int = -1) -> Floats:
    return np.mean(x, axis=axis)


def _ratio(x: Floats, y: Floats, axis: int = -1) -> Floats:
    return np.mean(x, axis=axis) / np.mean(y, axis=axis)


def _interval(data: tuple[Floats, ...], statistic: Callable[..., Floats]) -> list[float] | None:
    """A BCa interval over documents, which are resampled in pairs where there are two samples."""
    if len(data[0]) < _FEWEST:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples without variance, whose interval is not a number
        found = bootstrap(
            data,
            statistic,
            n_resamples=_RESAMPLES,
            paired=len(data) > 1,
            confidence_level=LEVEL,
            method="BCa",
            rng=np.random.default_rng(0),
        ).confidence_interval
    ends = [float(found.low), float(found.high)]
    return ends if np.isfinite(ends).all() else None
