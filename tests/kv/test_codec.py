"""The codecs on their own: what they store, how far it is off, and what they cost."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amem.errors import InputError
from amem.kv.codec import Shape, make_codec
from amem.model.spec import CHANNEL_BITS, CODECS, exact_first_tokens
from tests.kv import reference, states

DIMS = st.sampled_from([(64, 64), (32, 32), (96, 32), (192, 128)])


def keys_and_values(groups, k_dim, v_dim, seed):
    layer = states.layer(k_dim=k_dim, v_dim=v_dim)
    _, k, v = states.random_qkv(layer, groups * 64, seed)
    return k, v


@settings(deadline=None, max_examples=40)
@given(codec=st.sampled_from(CODECS), dims=DIMS, groups=st.integers(1, 3), seed=st.integers(0, 99))
def test_parts_have_the_shapes_that_are_told_and_unpack_to_what_the_codec_reads(codec, dims, groups, seed):
    """Dense and packed forms are one: `dequantize` is what numpy reads from the bits, and products are with that."""
    k, v = keys_and_values(groups, *dims, seed)
    one = make_codec(codec)
    parts = one.quantize(mx.array(k), mx.array(v))
    told = one.part_shapes(Shape(2, *dims))
    assert {name: ((groups, *shape), dtype) for name, (shape, dtype) in told.items()} == {
        name: (part.shape, part.dtype) for name, part in parts.items()
    }
    k_read, v_read = (np.array(x) for x in one.dequantize(parts, mx.float32))
    arrays = {name: np.array(part) for name, part in parts.items()}
    k_seen, v_seen = reference.stored_form(codec, k, v, arrays)
    n = one.n_exact  # the reference puts these tokens' exact form in their place
    np.testing.assert_allclose(k_read[:, n:], k_seen[:, n:], atol=1e-4)
    np.testing.assert_allclose(np.array(one.from_value_space(mx.array(v_read)))[:, n:], v_seen[:, n:], atol=1e-4)
    q = np.random.default_rng(seed).normal(size=(2, 5, dims[0])).astype(np.float32)
    p = np.random.default_rng(seed).uniform(size=(2, 5, groups * 64)).astype(np.float32)
    np.testing.assert_allclose(
        np.array(one.scores(mx.array(q), parts)), q @ k_read.swapaxes(-1, -2), rtol=1e-3, atol=1e-2
    )
    np.testing.assert_allclose(
        np.array(one.weighted_values(mx.array(p), parts)).sum(0), p @ v_read, rtol=1e-3, atol=1e-2
    )


@settings(deadline=None, max_examples=20)
@given(groups=st.integers(2, 4), seed=st.integers(0, 99), codec=st.sampled_from(CODECS))
def test_a_group_is_stored_alike_whatever_comes_with_it(groups, seed, codec):
    """Bit for bit: so chunks and steps cannot matter."""
    k, v = keys_and_values(groups, 64, 64, seed)
    one = make_codec(codec)
    whole = one.quantize(mx.array(k), mx.array(v))
    for at in range(groups):
        alone = one.quantize(mx.array(k[:, at * 64 : at * 64 + 64]), mx.array(v[:, at * 64 : at * 64 + 64]))
        assert all(mx.array_equal(alone[name][0], part[at]).item() for name, part in whole.items())


@settings(deadline=None, max_examples=20)
@given(dims=DIMS, seed=st.integers(0, 99))
def test_a_key_is_off_by_a_step_at_most_and_by_less_than_half_on_average(dims, seed):
    """A step is a key channel's range over 2^bits - 1; rounded scales and biases add a little."""
    k, v = keys_and_values(1, *dims, seed)
    spread = k.max(1, keepdims=True) - k.min(1, keepdims=True)  # [H, 1, Dk]
    for codec, bits in CHANNEL_BITS.items():
        one = make_codec(codec)
        found = np.array(one.dequantize(one.quantize(mx.array(k), mx.array(v)), mx.float32)[0])
        step = spread / (2**bits - 1)
        # MLX puts the end of the range that lies farther from zero on a level, and zero on another: up to a step more
        assert (np.abs(found - k) <= step * 1.01 + np.abs(k).max() * 2**-9).all()
        assert np.abs(found - k).mean() <= step.mean() / 2


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 999))
def test_more_bits_are_nearer(seed):
    """q8 is nearer than q4 than q3 than q2, in keys and in values; each takes fewer bytes than the one before."""
    k, v = keys_and_values(2, 64, 64, seed)
    errors, sizes = [], []
    for codec in CHANNEL_BITS:
        one = make_codec(codec)
        parts = one.quantize(mx.array(k), mx.array(v))
        k_read, v_read = one.dequantize(parts, mx.float32)
        off = (np.array(k_read) - k, np.array(one.from_value_space(v_read)) - v)
        errors.append([np.square(x).mean() for x in off])
        sizes.append(sum(part.nbytes for part in parts.values()))
    assert (np.diff(errors, axis=0) > 0).all()
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("codec", CODECS)
def test_as_many_first_tokens_are_exact_as_are_counted(codec):
    """What the codec says of itself, and what capacity charges."""
    assert exact_first_tokens(codec) == make_codec(codec).n_exact


def test_an_unknown_codec_is_refused_with_those_that_there_are():
    """One line."""
    with pytest.raises(InputError, match=r"unknown codec 'q5': choose one of auto, q4, q4-affine, q3, q2, q8, fp16\."):
        make_codec("q5")
