"""What is captured is what the model computed with: checked against its own attention and its own logits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from amem import InputError, UnsupportedModel, capture_attention
from amem.model.hook import install, spy
from amem.model.probe import probe
from tests.architectures import build

TOKENS = [(7 * i + 3) % 120 for i in range(130)]


def attended(model, tokens):
    """Each attention layer's output as MLX's own fused function gives it: [Hq, T, Dv]."""
    install(model)
    with spy() as calls:
        mx.eval(model(mx.array([tokens]), cache=make_prompt_cache(model)))
    found = []
    for call in calls:
        out = mx.fast.scaled_dot_product_attention(
            call.queries, call.keys, call.values, scale=call.scale, mask=call.mask, sinks=call.sinks
        )
        found.append(np.array(out[0]))
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v2", "qwen3_next", "falcon_h1"])
def test_weights_times_values_is_what_the_layers_attention_gave(name):
    """Groups of query heads, windows, sinks, unequal head dims, and models with recurrent layers between."""
    model = build(name)
    found = capture_attention(model, TOKENS)
    for layer, expected in zip(found.layers, attended(model, TOKENS), strict=True):
        repeats = layer.queries.shape[0] // layer.values.shape[0]
        ours = layer.weights() @ np.repeat(layer.values, repeats, axis=0)
        np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_shapes_are_those_that_the_models_spec_tells(name):
    model = build(name)
    spec = {layer.index: layer for layer in probe(model).layers}
    for layer in capture_attention(model, TOKENS).layers:
        known = spec[layer.slot]
        assert layer.keys.shape == (known.n_kv_heads, len(TOKENS), known.k_dim)
        assert layer.values.shape == (known.n_kv_heads, len(TOKENS), known.v_dim)
        assert len(layer.queries) == known.n_q_heads
        assert layer.mask.sum(axis=1).max() == (known.window or len(TOKENS))


def test_a_row_of_weights_sums_to_one_and_to_less_with_sinks():
    assert np.allclose(capture_attention(build("llama"), TOKENS).layers[0].weights().sum(axis=-1), 1, atol=1e-5)
    assert (capture_attention(build("gpt_oss"), TOKENS).layers[0].weights().sum(axis=-1) < 1).all()


def test_no_query_takes_from_a_later_token_or_one_before_its_window():
    for layer in capture_attention(build("gemma3_text"), TOKENS).layers:
        assert (layer.weights()[:, ~layer.mask] == 0).all()


def test_logits_are_the_models_own_and_a_full_mask_changes_nothing():
    model = build("llama")
    expected = np.array(model(mx.array([TOKENS]))[0])
    everything = np.ones((len(TOKENS), len(TOKENS)), dtype=bool)
    np.testing.assert_allclose(capture_attention(model, TOKENS).logits, expected, atol=1e-5)
    np.testing.assert_allclose(capture_attention(model, TOKENS, visible=everything).logits, expected, atol=1e-5)


def test_a_token_that_sees_only_a_part_is_as_if_the_rest_had_not_been_said():
    """The second half of a text that may not see the first half, read by a model without positions between them."""
    model = build("llama")
    half = len(TOKENS) // 2
    visible = np.zeros((len(TOKENS), len(TOKENS)), dtype=bool)
    visible[:half, :half] = visible[half:, half:] = True
    found = capture_attention(model, TOKENS, visible=visible)
    # rotary positions are relative, so where the second half starts makes no difference
    np.testing.assert_allclose(found.logits[half:], np.array(model(mx.array([TOKENS[half:]]))[0]), atol=1e-4)
    assert not found.layers[0].mask[half:, :half].any()


def test_only_the_wanted_layers_are_kept():
    model = build("gemma3_text")
    everything = {layer.slot: layer for layer in capture_attention(model, TOKENS).layers}
    (layer,) = capture_attention(model, TOKENS, slots=[2]).layers
    assert layer.slot == 2
    np.testing.assert_array_equal(layer.keys, everything[2].keys)


def test_one_token_sees_itself():
    (layer, *_) = capture_attention(build("llama"), [5]).layers
    assert (layer.weights() == 1).all()


def test_a_cache_that_was_filled_before_is_not_touched():
    """The capture reads with caches of its own."""
    model = build("llama")
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([TOKENS]), cache=cache))
    capture_attention(model, TOKENS)
    assert cache[0].offset == len(TOKENS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"token_ids": []}, "no tokens"),
        ({"slots": [17]}, "cache slot 17"),
        ({"visible": np.ones((3, 3), dtype=bool)}, r"\[130, 130\]"),
        ({"visible": np.ones((130, 130))}, "float64"),
        ({"visible": np.tri(130, k=-1, dtype=bool)}, "token 0 does not see itself"),
    ],
)
def test_bad_input_is_refused_by_name(options, says):
    with pytest.raises(InputError, match=says):
        capture_attention(build("llama"), **{"token_ids": TOKENS, **options})


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2"])
def test_attention_that_cannot_be_seen_is_refused(name):
    """Latent attention puts scores into its mask; a softcap is computed in the layer."""
    with pytest.raises(UnsupportedModel):
        capture_attention(build(name), TOKENS)


def test_a_recurrent_layers_slot_is_refused():
    model = build("mamba2")
    with pytest.raises(InputError, match="cache slot 0"):
        capture_attention(model, TOKENS, slots=[0])
    assert capture_attention(model, TOKENS).layers == ()
