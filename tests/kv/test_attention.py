"""The reference attention against float64, over shapes, codecs, windows, sinks and chunkings."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amem.kv.backend import choose
from amem.model.spec import CODECS
from tests.kv import reference, states
from tests.kv.models import CPU

SHAPES = {
    "gqa": {"heads": 2, "heads_q": 6},
    "mqa": {"heads": 1, "heads_q": 4},
    "mha": {"heads": 3, "heads_q": 3},
    "mla": {"heads": 2, "heads_q": 2, "k_dim": 192, "v_dim": 128},
    "narrow": {"heads": 2, "heads_q": 4, "k_dim": 32, "v_dim": 32},
}


def stored_parts(sequence, n_groups):
    exported = sequence.export_block(0, n_groups)
    names = sequence.layout.codec.part_shapes(sequence.layout.shape(0))
    return {name: exported[f"0.{name}"][0] for name in names}


@st.composite
def chunkings(draw, most=230):
    """Step lengths; a step of several tokens may start and end anywhere."""
    total = draw(st.integers(1, most))
    lengths = []
    while sum(lengths) < total:
        length = draw(st.one_of(st.just(1), st.integers(1, 140)))
        lengths.append(min(length, total - sum(lengths)))
    return lengths


backends = pytest.mark.parametrize(
    "backend",
    ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not CPU, reason="needs numba, and MLX on the CPU"))],
)


@backends
@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    codec=st.sampled_from([*CODECS, "exact"]),
    lengths=chunkings(),
    window=st.sampled_from([None, None, 40, 96, 128]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_shape_codec_window_and_chunking_agrees_with_float64(
    backend, shape, codec, lengths, window, with_sinks, seed
):
    """What a query sees depends on positions alone, and the sums are right."""
    layer = states.layer(window=window, **SHAPES[shape])
    n_tokens = sum(lengths)
    q, k, v = states.random_qkv(layer, n_tokens, seed)
    sinks = np.random.default_rng(seed).normal(size=layer.n_q_heads).astype(np.float32) if with_sinks else None
    sequence, attend = states.new_sequence(states.layout(layer, codec=codec)), choose(backend).result().attend
    given_sinks = None if sinks is None else mx.array(sinks)
    got = states.feed(sequence, {0: (q, k, v)}, lengths, sinks=given_sinks, attend=attend)[0]
    n_groups = n_tokens // 64
    whole = states.new_sequence(states.layout(states.layer(**SHAPES[shape]), codec=codec))
    states.feed(whole, {0: (q, k, v)}, [n_tokens])
    whole.close_turn()
    if n_groups:
        k_seen, v_seen = reference.stored_form(codec, k, v, stored_parts(whole, n_groups))
    else:
        k_seen, v_seen = k[:, :0].astype(np.float64), v[:, :0].astype(np.float64)
    wanted = reference.attention(
        q.astype(np.float64), k.astype(np.float64), v.astype(np.float64), k_seen, v_seen,
        scale=0.1, window=window, sinks=sinks,
    )  # fmt: skip
    np.testing.assert_allclose(got, wanted, atol=3e-4, rtol=3e-3)


@backends
@pytest.mark.parametrize("codec", CODECS)
def test_16_bit_compute_gives_the_queries_dtype_and_close_values(backend, codec):
    """A float16 model's queries come back as float16, near what float32 gives."""
    layer, attend = states.layer(), choose(backend).result().attend
    q, k, v = states.random_qkv(layer, 150)
    wide = states.new_sequence(states.layout(layer, codec=codec))
    narrow = states.new_sequence(states.layout(layer, codec=codec, dtype="float16"))
    wanted = states.feed(wide, {0: (q, k, v)}, [149, 1], attend=attend)[0]
    got = states.feed(narrow, {0: tuple(x.astype(np.float16) for x in (q, k, v))}, [149, 1], attend=attend)[0]
    assert np.float16 == got.dtype
    assert np.abs(got.astype(np.float32) - wanted).mean() < 2e-3 * np.abs(wanted).mean() + 1e-3
