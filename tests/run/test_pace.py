"""What steps took, and what is concluded from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem.run.pace import Gaps, PrefillRate

times = st.floats(1e-6, 1e3)


def seconds_of(a, b, start, n):
    """Of a chunk, where a token at position p costs a + b * p."""
    return sum(a + b * position for position in range(start, start + n))


@pytest.mark.parametrize(("a", "b"), [(0.01, 0.0), (0.008, 2e-6), (1e-4, 1e-7)])
def test_the_cost_of_places_that_were_not_measured_follows_from_those_that_were(a, b):
    """Attention makes later tokens dearer, and that is seen in chunks of any size."""
    rate = PrefillRate()
    for start in range(0, 1024, 128):
        rate.record(start, 128, seconds_of(a, b, start, 128))
    assert pytest.approx(seconds_of(a, b, 0, 4096), rel=0.01) == rate.seconds(0, 4096)
    assert pytest.approx(seconds_of(a, b, 512, 1), rel=0.01) == rate.seconds(512, 513)
    assert 0 == rate.seconds(100, 100)


def test_nothing_is_said_before_anything_was_measured():
    """Rather than a guess."""
    assert PrefillRate().seconds(0, 100) is None


def test_a_short_chunk_does_not_outweigh_a_long_one():
    """Its tokens are dearer each, for the costs of a step."""
    rate = PrefillRate()
    rate.record(0, 512, 5.12)
    rate.record(512, 4, 0.4)
    assert rate.seconds(0, 512) < 1.1 * 5.12


def test_old_chunks_are_forgotten():
    """The figure follows the machine's load."""
    rate = PrefillRate()
    for _ in range(128):
        rate.record(0, 64, 64.0)
    for _ in range(128):
        rate.record(0, 64, 0.64)
    assert pytest.approx(1.0) == rate.seconds(0, 100)


@given(chunks=st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 512), times), min_size=1, max_size=200))
def test_the_cost_is_never_negative_and_grows_with_the_tokens(chunks):
    """Whatever noise was measured."""
    rate = PrefillRate()
    for chunk in chunks:
        rate.record(*chunk)
    costs = [rate.seconds(0, n) for n in (0, 1, 10, 1000, 10**5)]
    assert costs[0] == 0
    assert costs == sorted(costs)


def test_what_was_measured_outlives_the_process(tmp_path):
    """The first request after a restart has a figure too; a broken file costs only that."""
    path = tmp_path / "rates" / "model.json"
    rate = PrefillRate(path)
    assert rate.seconds(0, 1) is None
    rate.record(0, 64, 0.64)
    rate.save()
    assert pytest.approx(1.0) == PrefillRate(path).seconds(0, 100)
    for broken in ("", "{}", "[[1, 2]]", '[["a", 1, 2]]', "[[0, 0, 1.0]]", "[[0, 64, NaN]]"):
        path.write_text(broken, encoding="utf-8")
        assert PrefillRate(path).seconds(0, 100) is None


def test_a_killed_process_leaves_what_it_measured_before(tmp_path):
    """It is written now and then, not only at the end."""
    rate = PrefillRate(tmp_path / "model.json")
    for start in range(0, 2048, 64):
        rate.record(start, 64, 0.64)
    assert PrefillRate(tmp_path / "model.json").seconds(0, 100) is not None


def test_gaps_between_tokens_as_percentiles():
    """Of the last 4096, in milliseconds."""
    gaps = Gaps()
    assert gaps.percentiles() is None
    for ms in range(1, 1001):
        gaps.record(ms / 1e3)
    found = gaps.percentiles()
    assert 1000 == found.n
    assert (500.5, 950.05, 990.01, 1000) == pytest.approx((found.p50_ms, found.p95_ms, found.p99_ms, found.max_ms))
    for _ in range(5000):
        gaps.record(0.001)
    assert pytest.approx(1) == gaps.percentiles().max_ms
