"""A sample of `make soak`: an engine that is killed at any instant, and at steps of its commits."""

import tempfile
from pathlib import Path

from benchmarks import kills
from tests.store.samples import SCRATCH


def test_an_engine_that_is_killed_twenty_times_loses_nothing_that_it_told_of(tiny_model_path):
    """After each kill the store is sound, and all conversations end as if nothing had happened."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        report = kills.Soak(tiny_model_path, Path(folder), seed=1).run(20)
    assert [] == report.failures
    assert 20 == report.n_kills == report.survived
    assert report.kills["a random instant"] >= 5
    assert report.turns_cut_off >= 5  # they did hit turns
