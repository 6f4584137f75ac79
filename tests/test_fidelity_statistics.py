"""The statistics of the fidelity benchmark, on rows whose answers are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="the extra `bench` is not installed: it has scipy")

from benchmarks.corpora import sample
from benchmarks.fidelity_statistics import summary


def row(document, kl, more_nll, n_tokens=1024, domain="prose", forms=("q4", "paper", "q4-affine", "q3")):
    """A document whose first 768 positions have twice the KL of those after."""

    def form(scale):
        stretches = [(0, 768, 2.0, 768), (768, 1024, 1.0, 256)][: 1 if n_tokens == 768 else 2]
        return {
            "kl_p99": 9.0,
            "greedy_divergence": 5,
            "by_position": [
                {
                    "start": start, "stop": stop, "n_predictions": n, "kl_mean": weight * kl * scale,
                    "nll": 3.0 + more_nll, "nll_exact": 3.0, "top1_agreement": 0.9,
                }
                for start, stop, weight, n in stretches
            ],
        }  # fmt: skip

    scales = {"q4": 1, "paper": 40, "q4-affine": 6, "q3": 5}
    return {"domain": domain, "document": document, "n_tokens": n_tokens, "forms": {f: form(scales[f]) for f in forms}}


def test_a_length_is_the_mean_over_its_positions():
    """Cut to 768 tokens the KL is higher here than over all 1024."""
    found = summary([row("a", 0.001, 0.01)])
    assert ["prose, 768 tokens", "prose, 1024 tokens"] == list(found)
    assert 0.002 == pytest.approx(found["prose, 768 tokens"]["forms"]["q4"]["kl"])
    assert 0.00175 == pytest.approx(found["prose, 1024 tokens"]["forms"]["q4"]["kl"])
    assert np.expm1(0.01) == pytest.approx(found["prose, 768 tokens"]["forms"]["q4"]["perplexity_change"])
    assert found["prose, 768 tokens"]["forms"]["q4"]["kl_interval"] is None  # of one document


def test_a_document_counts_once():
    """Measured at two lengths it is one document of the shorter one."""
    found = summary([row("a", 0.001, 0.01, 768), row("a", 0.9, 0.01), row("b", 0.003, 0.01)])
    assert 2 == found["prose, 768 tokens"]["documents"]
    assert 0.004 == pytest.approx(found["prose, 768 tokens"]["forms"]["q4"]["kl"])


def test_intervals_and_equivalence_are_over_documents():
    """An interval holds the mean; within half a percent of perplexity it is a finding of equivalence."""
    rng = np.random.default_rng(1)
    near = [row(str(i), 0.001 * (1 + rng.random()), 0.002 + 0.001 * rng.normal()) for i in range(32)]
    far = [row(str(i), 0.001 * (1 + rng.random()), 0.006 + 0.001 * rng.normal(), domain="code") for i in range(32)]
    wide = [row(str(i), 0.001 * (1 + rng.random()), 0.002 + 0.02 * rng.normal(), domain="wide") for i in range(32)]
    found = summary([*near, *far, *wide])
    for part in found.values():
        low, high = part["forms"]["q4"]["kl_interval"]
        assert low < part["forms"]["q4"]["kl"] < high
        low, high = part["forms"]["q4"]["perplexity_interval"]
        assert low < part["forms"]["q4"]["perplexity_change"] < high
    verdicts = {name.split(",")[0]: part["forms"]["q4"]["equivalent"] for name, part in found.items()}
    assert {"prose": True, "code": False, "wide": False} == verdicts


def test_ratios_are_of_the_same_documents():
    """Documents that only one of the two has are left out."""
    rows = [row(str(i), 0.001 + 0.0001 * i, 0.0) for i in range(8)]
    rows.append(row("only q4", 0.5, 0.0, forms=("q4",)))
    ratios = summary(rows)["prose, 1024 tokens"]["ratios"]
    assert 40 == pytest.approx(ratios["paper / q4"]["kl"])
    assert 6 == pytest.approx(ratios["q4-affine / q4"]["kl"])
    assert 8 == pytest.approx(ratios["paper / q3"]["kl"])


def test_the_figure_has_every_form(tmp_path):
    """One mark for each, from the figures alone; the same figures give the same file."""
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed: it has matplotlib")
    from benchmarks import figures

    forms = ("q2", "q3", "q4", "q8", "fp16", "q4-affine", "paper")
    found = {form: {"kl": 0.1 / (i + 1), "kl_interval": [0.05 / (i + 1), 0.2]} for i, form in enumerate(forms)}
    found["fp16"]["kl_interval"] = None  # of too few documents
    result = {
        "model": "some-model",
        "bytes": {form: {"effective_4k": 0.1 * (i + 1)} for i, form in enumerate(forms)},
        "summary": {figures.LENGTH: {"forms": found}},
    }
    files = [tmp_path / "one.svg", tmp_path / "other.svg"]
    for file in files:
        figures.fidelity(result, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    text = files[0].read_text(encoding="utf-8")
    assert all(f"<!-- {label}" in text for label in ("q2", "q3", "q4", "q8", "fp16", "q4-affine", "the paper"))
    assert "some-model" in text


@given(st.integers(1, 300), st.integers(1, 300))
def test_documents_are_spread_evenly_over_the_texts(n, n_documents):
    """Each once; the first few come from all parts; none is shorter than asked for."""
    texts = [(str(i), "word " * (1000 if i % 2 else 10)) for i in range(2 * n)]
    found = sample(texts, str.split, 100, n_documents)
    assert min(n, n_documents) == len(found) == len({name for name, _ in found})
    assert all(100 == len(ids) for _, ids in found)
    if n >= 40 and n_documents >= 8:
        parts = {int(name) * 4 // (2 * n) for name, _ in found[:8]}
        assert {0, 1, 2, 3} == parts
