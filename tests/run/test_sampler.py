"""The next token: greedy, or drawn with the request's own key."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from amem.errors import InputError
from amem.run.sampler import Sampler, derive_seed

LOGITS = mx.log(mx.array([0.5, 0.25, 0.15, 0.1]))


def _draw(sampler, n, logits=LOGITS):
    tokens = [sampler(logits) for _ in range(n)]
    mx.eval(tokens)
    return [int(token.item()) for token in tokens]


def test_temperature_zero_is_greedy():
    """The most likely token, whatever the seed."""
    assert _draw(Sampler(0.0, 0.1, seed=9), 3) == [0, 0, 0]


def test_the_same_seed_repeats_itself():
    """Other requests in between, and MLX's own random state, change nothing."""
    first = _draw(Sampler(1.0, seed=7), 50)
    mx.random.seed(1)
    one, other = Sampler(1.0, seed=7), Sampler(1.0, seed=8)
    interleaved = [(_draw(one, 1)[0], _draw(other, 1)[0]) for _ in range(50)]

    assert [a for a, _ in interleaved] == first
    assert [b for _, b in interleaved] != first


def test_the_global_random_state_is_left_alone():
    """A notebook's own random numbers do not depend on how many tokens were sampled."""
    mx.random.seed(3)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(3)

    _draw(Sampler(0.8, 0.9, seed=1), 10)

    assert mx.random.uniform(shape=(4,)).tolist() == expected


def test_frequencies_follow_the_probabilities():
    """At temperature 1 as the model says; at 0.5 their squares, normalized."""
    counts = Counter(_draw(Sampler(1.0, seed=1), 1000))
    sharp = Counter(_draw(Sampler(0.5, seed=1), 1000))

    np.testing.assert_allclose([counts[n] / 1000 for n in range(4)], [0.5, 0.25, 0.15, 0.1], atol=0.06)
    np.testing.assert_allclose([sharp[n] / 1000 for n in range(4)], np.array([25, 6.25, 2.25, 1]) / 34.5, atol=0.06)


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.8, {0, 1, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_nucleus(top_p, expected):
    """The smallest set of most likely tokens that reaches top_p."""
    assert set(_draw(Sampler(1.0, top_p, seed=1), 300)) == expected


@given(
    logits=st.lists(st.floats(-20, 20), min_size=1, max_size=30),
    top_p=st.floats(0.01, 1),
    temperature=st.floats(0.1, 3),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_drawn_token_is_in_the_nucleus(logits, top_p, temperature, seed):
    """The tokens that are more likely than it sum to less than top_p."""
    token = _draw(Sampler(temperature, top_p, seed), 1, mx.array(logits))[0]

    scaled = np.array(logits, np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    above = probabilities[probabilities > probabilities[token] * (1 + 1e-5)].sum()
    assert above < top_p + 1e-4


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-39, 1e-8, 1e-7, 1e-5])
def test_a_temperature_near_zero_is_as_zero(temperature):
    """Nothing overflows on the way: the likeliest token, not one that a NaN chose."""
    logits = mx.array([-80.0, 12.5, 0.0, 12.25])
    assert _draw(Sampler(temperature, 0.9, seed=1), 20, logits) == [1] * 20


def test_half_precision_logits_are_sampled_in_full_precision():
    """Sums over a vocabulary are not made in 16 bits."""
    logits = mx.zeros(50_000, mx.float16)

    assert len(set(_draw(Sampler(1.0, 0.99, seed=1), 50, logits))) > 45


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, not -0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_settings_out_of_range(settings, error):
    """Refused before anything is computed."""
    with pytest.raises(InputError, match=error):
        Sampler(**settings)


def test_a_derived_seed_is_the_same_in_every_process():
    """So that Run All repeats itself after a restart."""
    arguments = ("planner", 3, "Plan a launch. é", {"top_p": 0.9, "temperature": 0.7})
    code = f"from amem.run.sampler import derive_seed; print(derive_seed(*{arguments!r}))"

    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert int(printed) == derive_seed(*arguments)


def test_a_derived_seed_depends_on_all_that_makes_the_request():
    """Agent, place in the tree, prompt, settings; not on the order of the settings."""
    base = ("planner", 3, "Plan.", {"temperature": 0.7, "top_p": 0.9})
    others = [
        ("critic", *base[1:]),
        ("planner", None, *base[2:]),
        ("planner", 3, "Plan", base[3]),
        (*base[:3], {"temperature": 0.8, "top_p": 0.9}),
    ]

    assert derive_seed(*base) == derive_seed(*base[:3], {"top_p": 0.9, "temperature": 0.7})
    assert len({derive_seed(*arguments) for arguments in [base, *others]}) == 5
    assert all(0 <= derive_seed(*arguments) < 2**63 for arguments in others)
