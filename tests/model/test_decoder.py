"""Decode steps of decoder layers by the kernels, beside the same layers by MLX."""

from __future__ import annotations

import importlib.util

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.utils import dequantize_model

from amem.kv.backend import choose
from amem.kv.cache import BatchQuantizedKVCache
from amem.kv.codec import make_codec
from amem.kv.pool import Pool
from amem.kv.sequence import SequenceState, StateLayout
from amem.model import blas, elf, packed
from amem.model.hook import install, spy
from amem.model.probe import probe
from amem.run.runner import Runner
from amem.run.selfcheck import self_check
from tests.architectures import build

pytestmark = pytest.mark.skipif(
    not elf.supported() or mx.default_device() != mx.Device(mx.cpu) or importlib.util.find_spec("numba") is None,
    reason="needs numba, and MLX's CPU backend on Linux",
)

KNOWN = ("llama", "qwen2", "qwen3")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


@pytest.fixture(scope="module")
def decoder():
    blas.ensure()
    future = packed.prepare()
    assert future is not None
    assert future.result() is not None
    from amem.model import decoder

    return decoder


def layers_of(model):
    return model.model.layers


def unused(model):
    """Its layers compute everything by MLX again."""
    for layer in layers_of(model):
        layer.__class__ = type(layer).__mro__[1]


def layout_of(model):
    """At full precision: a code of four bits that rounds to its neighbour would hide what is compared."""
    return StateLayout(probe(model), make_codec("exact"))


def steps(model, n_sequences=1, n_steps=3):
    """Logits ``[n_steps, B, V]`` of a few decode steps after a prompt."""
    install(model)
    backend = choose("cpu").result()
    layout = layout_of(model)
    sequences = [SequenceState(layout, Pool(1 << 40)) for _ in range(n_sequences)]
    for at, sequence in enumerate(sequences):
        prompt = PROMPT * (2 + 3 * at)
        cache = BatchQuantizedKVCache([sequence], lambda: make_prompt_cache(model), backend.attend, backend.evaluated)
        cache.begin(len(prompt))
        mx.eval(model(mx.array([prompt]), cache=cache.layers), cache.end(len(prompt)))
    found = []
    for step in range(n_steps):
        cache = BatchQuantizedKVCache(sequences, lambda: make_prompt_cache(model), backend.attend, backend.evaluated)
        cache.begin(1)
        logits = model(mx.array([[7 + step + row] for row in range(n_sequences)]), cache=cache.layers)[:, -1]
        mx.eval(logits, cache.end(1))
        found.append(np.array(logits))
    return np.stack(found)


def apart(one, other):
    return np.abs(one - other).max() / np.ptp(other)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("n_sequences", [1, 3])
def test_steps_agree_with_mlx(decoder, name, n_sequences):
    """One sequence and a ragged batch of float32 weights, with the biases and norms that a model file has."""
    for tied in (False, True):
        model = build(name, tie_word_embeddings=tied)
        assert decoder.adopt(model) == len(layers_of(model))
        own_steps_agree(model, n_sequences)


def own_steps_agree(model, n_sequences=1):
    found = steps(model, n_sequences)
    unused(model)
    expected = steps(model, n_sequences)
    assert apart(found, expected) < 1e-5
    assert not np.array_equal(found, expected)  # it was computed otherwise


@pytest.mark.parametrize("name", KNOWN)
def test_the_self_check_sees_the_steps(decoder, name):
    """It runs them, counts their attention, and finds what is wrong with them."""
    model = build(name)
    assert decoder.adopt(model)
    self_check(model, probe(model), choose("cpu").result())
    for layer in layers_of(model):
        layer.step._norms[0][:] += 0.1
    with pytest.raises(Exception, match="differ"):
        self_check(model, probe(model), choose("cpu").result())


@settings(deadline=None, max_examples=12)
@given(
    traditional=st.booleans(),
    dims=st.sampled_from([16, 32, 64]),
    base=st.sampled_from([10_000.0, 500_000.0]),
    scale=st.sampled_from([1.0, 0.25]),
    llama3=st.booleans(),
)
def test_all_kinds_of_rotary_positions(decoder, traditional, dims, base, scale, llama3):
    """Part of a head or all of it, in both orders, and with the frequencies of Llama 3."""
    model = build("llama")
    config = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    for layer in layers_of(model):
        layer.self_attn.rope = (
            initialize_rope(dims, base, traditional, config, 4096)
            if llama3
            else nn.RoPE(dims, traditional=traditional, base=base, scale=scale)
        )
    assert decoder.adopt(model)
    own_steps_agree(model)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_read(decoder, bits):
    """A quantized model that was widened, in a batch that is larger than float32 weights allow."""
    from amem.kernels import product

    model = build("llama", hidden_size=256, intermediate_size=512)
    nn.quantize(model, group_size=64, bits=bits)
    model.set_dtype(mx.float16)
    matrices = packed.collect(model)
    model.set_dtype(mx.float32)
    dequantize_model(model)
    mx.eval(model.parameters())
    packed.register(model, matrices, product)
    assert decoder.adopt(model)
    n = product.MOST_PACKED
    found = steps(model, n)
    alone = steps(model, 1)
    assert np.array_equal(found[:, 0], alone[:, 0])  # a batch changes no bit
    unused(model)
    assert apart(found, steps(model, n)) < 1e-5


def test_windowed_layers(decoder):
    """Steps see what their window holds."""
    model = build("llama", sliding_window=96, layer_types=["sliding_attention", "full_attention"])
    assert decoder.adopt(model)
    own_steps_agree(model, 4)


def test_more_rows_than_the_kernels_multiply(decoder):
    """Their products go to the library."""
    model = build("llama")
    assert decoder.adopt(model)
    own_steps_agree(model, 14)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("chunks", [[1, 2, 70, 64, 5], [130, 12, 1, 1]])
def test_prompts_agree_with_mlx(decoder, name, chunks):
    """Chunks of any length, across groups; their logits, too."""
    model = build(name)
    install(model)
    layout = layout_of(model)
    backend = choose("cpu").result()
    ids = [at * at % 101 for at in range(sum(chunks))]
    found = []
    for _ in range(2):
        sequence = SequenceState(layout, Pool(1 << 40))
        runner, rest, logits = Runner(model, lambda: make_prompt_cache(model), backend), ids, []
        for length in chunks:
            logits.append(np.array(runner.score(sequence, rest[:length])))
            rest = rest[length:]
        found.append(np.concatenate(logits))
        decoder.adopt(model)  # for the second time
    assert apart(*found) < 1e-5
    assert not np.array_equal(*found)


def test_what_is_seen_of_attention_is_the_same(decoder):
    """A spy gets the queries of each layer in a step, as from a layer that MLX computes."""
    model = build("qwen3")
    assert decoder.adopt(model)
    seen = []
    for _ in range(2):
        with spy() as calls:
            steps(model, n_steps=1)
            seen.append(calls[-len(layers_of(model)) :])
        unused(model)
    for own, stock in zip(*seen, strict=True):
        assert own.queries.shape == stock.queries.shape
        assert own.scale == stock.scale
        np.testing.assert_allclose(np.array(own.queries), np.array(stock.queries), rtol=1e-4, atol=1e-5)


def test_other_caches_and_models_are_left_alone(decoder):
    """Stock caches, and layers of another form or dtype."""
    model = build("llama")
    ids = mx.array([PROMPT])
    before = np.array(model(ids, cache=make_prompt_cache(model)))
    decoder.adopt(model)
    assert np.array_equal(before, np.array(model(ids, cache=make_prompt_cache(model))))
    cache = make_prompt_cache(model)
    one_by_one = [np.array(model(mx.array([[token]]), cache=cache)) for token in PROMPT]
    np.testing.assert_allclose(np.concatenate(one_by_one, axis=1), before, atol=1e-4)
    for name in ("gemma3_text", "qwen3_moe", "mamba2"):
        assert decoder.adopt(build(name)) == 0
    half = build("llama")
    half.set_dtype(mx.float16)
    assert decoder.adopt(half) == 0
