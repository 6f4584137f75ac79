"""Both attentions against float64, over shapes, codecs, windows, sinks, chunkings, batches, restores and forks."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from amem.kv.backend import choose
from amem.kv.cache import BatchQuantizedKVCache
from amem.kv.pool import Pool
from amem.kv.sequence import SequenceState
from amem.model.spec import CODECS
from tests.kv import reference, states
from tests.kv.models import CPU

SHAPES = {
    "gqa": {"heads": 2, "heads_q": 6},
    "mqa": {"heads": 1, "heads_q": 4},
    "mha": {"heads": 3, "heads_q": 3},
    "mla": {"heads": 2, "heads_q": 2, "k_dim": 192, "v_dim": 128},
    "narrow": {"heads": 2, "heads_q": 4, "k_dim": 32, "v_dim": 32},
    "odd": {"heads": 1, "heads_q": 5, "k_dim": 96, "v_dim": 160},
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
    np.testing.assert_allclose(got, in_float64(shape, codec, (q, k, v), window, sinks), atol=3e-4, rtol=3e-3)


def in_float64(shape, codec, qkv, window=None, sinks=None):
    """What the rule says, with groups as the codec stores them: fed at once, without a window, and read from there."""
    _, k, v = qkv
    n_groups = k.shape[1] // 64
    whole = states.new_sequence(states.layout(states.layer(**SHAPES[shape]), codec=codec))
    states.feed(whole, {0: qkv}, [k.shape[1]])
    whole.close_turn()
    if n_groups:
        k_seen, v_seen = reference.stored_form(codec, k, v, stored_parts(whole, n_groups))
    else:
        k_seen, v_seen = k[:, :0].astype(np.float64), v[:, :0].astype(np.float64)
    wide = [x.astype(np.float64) for x in qkv]
    return reference.attention(*wide, k_seen, v_seen, scale=0.1, window=window, sinks=sinks)


@backends
@settings(deadline=None, max_examples=25)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    codec=st.sampled_from(CODECS),
    window=st.sampled_from([None, 96, 300, 512]),
    turns=st.lists(st.tuples(chunkings(), st.sampled_from(["stay", "restore", "fork"])), min_size=2, max_size=5),
    seed=st.integers(0, 1000),
)
def test_long_histories_of_many_runs_agree_with_float64(backend, shape, codec, window, turns, seed):
    """Over several blocks: what a window left behind is dropped, and a turn's end is restored or forked on the way."""
    layer = states.layer(window=window, **SHAPES[shape])
    n_tokens = sum(sum(lengths) for lengths, _ in turns)
    qkv = states.random_qkv(layer, n_tokens, seed)
    attend, pool = choose(backend).result().attend, Pool(10**9)
    sequence = SequenceState(states.layout(layer, codec=codec), pool)
    outs, blocks = [], []
    for lengths, then in turns:
        sequence.reserve(sequence.n_tokens + sum(lengths))
        for length in lengths:
            outs.append(states.step(sequence, {0: qkv}, sequence.n_tokens, length, attend=attend)[0])
            states.export_full(sequence, blocks)
        sequence.close_turn()
        states.export_full(sequence, blocks)
        sequence.settle()
        if then != "stay":
            before = sequence
            sequence = states.twin(sequence, blocks, pool) if then == "restore" else sequence.fork()
            before.release()
    wanted = in_float64(shape, codec, qkv, window)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), wanted, atol=3e-4, rtol=3e-3)
    sequence.release()
    assert 0 == pool.used


@backends
@settings(deadline=None, max_examples=15)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    codec=st.sampled_from(CODECS),
    window=st.sampled_from([None, 96]),
    lengths=st.lists(st.integers(1, 200), min_size=2, max_size=4),
    steps=st.integers(1, 4),
)
def test_each_row_of_a_ragged_batch_agrees_with_float64(backend, shape, codec, window, lengths, steps):
    """As models call it: one cache of several sequences, one K and V for each, and offsets that differ."""
    layer = states.layer(window=window, **SHAPES[shape])
    data = [states.random_qkv(layer, n + steps, seed) for seed, n in enumerate(lengths)]
    sequences = [states.new_sequence(states.layout(layer, codec=codec)) for _ in lengths]
    attend = choose(backend).result().attend
    for sequence, qkv, n in zip(sequences, data, lengths, strict=True):
        states.feed(sequence, {0: qkv}, [n], attend=attend)
    rows = []
    for step in range(steps):
        batch = BatchQuantizedKVCache(sequences, lambda: [KVCache()], attend)
        (cache,) = batch.layers
        assert [n + step for n in lengths] == cache.offset.tolist()
        batch.begin(1)
        q, k, v = (mx.array(np.stack([x[:, n + step :][:, :1] for x, n in zip(each, lengths, strict=True)]))
                   for each in zip(*data, strict=True))  # fmt: skip
        cache.update_and_fetch(k, v)
        rows.append(np.array(cache.attend(q, scale=0.1, mask=None, sinks=None)))
        mx.eval(batch.end(1))
    for row, (qkv, n) in enumerate(zip(data, lengths, strict=True)):
        got = np.concatenate([out[row] for out in rows], axis=1)
        np.testing.assert_allclose(got, in_float64(shape, codec, qkv, window)[:, n:], atol=3e-4, rtol=3e-3)


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
