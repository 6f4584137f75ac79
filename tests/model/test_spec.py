"""What the probe finds out about each architecture, and why it refuses some."""

from __future__ import annotations

import json
from dataclasses import asdict

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache, make_prompt_cache

from amem.errors import InputError, UnsupportedModel
from amem.kv.codec import make_codec
from amem.model.probe import flatten_caches, probe
from amem.model.spec import (
    CODECS,
    LayerGroup,
    LayerKind,
    LayerSpec,
    ModelCacheSpec,
    can_rotate,
    group_nbytes,
    packing_group,
)
from tests.architectures import ARCHITECTURES, CARRIED, REFUSED, build

FULL, WINDOW, RECURRENT = LayerKind.FULL, LayerKind.WINDOW, LayerKind.RECURRENT

#: For each architecture: the kind of each cache slot, and (KV heads, K dim, V dim, query heads, sinks) of attention.
FOUND = {
    "llama": ([FULL, FULL], (2, 64, 64, 4, False)),
    "gemma3_text": ([WINDOW, WINDOW, FULL, WINDOW], (2, 64, 64, 4, False)),
    "deepseek_v2": ([FULL, FULL], (4, 192, 128, 4, False)),
    "qwen2": ([FULL, FULL], (2, 32, 32, 4, False)),
    "qwen3": ([FULL, FULL], (2, 64, 64, 4, False)),
    "qwen3_moe": ([FULL, FULL], (2, 64, 64, 4, False)),
    "mixtral": ([FULL, FULL], (2, 32, 32, 4, False)),
    "phi3": ([FULL, FULL], (2, 96, 96, 2, False)),
    "gpt_oss": ([WINDOW, FULL, WINDOW, FULL], (2, 64, 64, 4, True)),
    "qwen3_next": ([RECURRENT, FULL, RECURRENT, FULL], (2, 64, 64, 4, False)),
    "qwen3_5": ([RECURRENT, FULL, RECURRENT, FULL], (2, 64, 64, 4, False)),
    "falcon_h1": ([RECURRENT, FULL, RECURRENT, FULL], (2, 64, 64, 4, False)),
    "mamba2": ([RECURRENT, RECURRENT], None),
    "llama4_text": ([FULL, FULL], (2, 64, 64, 4, False)),
}

WHY_REFUSED = {
    "gemma2": "computes its attention itself",
    "gemma3n": "2 attention layers read cache slot 0",
    "deepseek_v3": "adds scores of its own to the attention mask",
    "llama4": "is a ChunkedKVCache",
    "phi3small": "computes its attention itself",
}


def test_every_architecture_is_spoken_of():
    """A new tiny model needs its line in one of the tables above."""
    assert set(CARRIED) == set(FOUND)
    assert set(REFUSED) == set(WHY_REFUSED)


@pytest.mark.parametrize("name", CARRIED)
def test_the_probe_finds_what_a_model_caches(name):
    """Kinds, heads, dims and sinks, without knowing the model's name."""
    kinds, shape = FOUND[name]
    spec = probe(ARCHITECTURES[name]())
    assert spec.dtype == "float32"
    assert kinds == [layer.kind for layer in spec.layers]
    assert list(range(len(kinds))) == [layer.index for layer in spec.layers]
    attention = [layer for layer in spec.layers if layer.kind is not RECURRENT]
    found = {(at.n_kv_heads, at.k_dim, at.v_dim, at.n_q_heads, at.has_sinks) for at in attention}
    assert ({shape} if shape else set()) == found


@pytest.mark.parametrize(("name", "window"), [("gemma3_text", 96), ("gpt_oss", 128)])
def test_windowed_layers_know_their_window(name, window):
    """Full layers have none."""
    spec = probe(ARCHITECTURES[name]())
    assert {window} == {layer.window for layer in spec.layers if layer.kind is WINDOW}
    assert {None} == {layer.window for layer in spec.layers if layer.kind is FULL}
    assert {(WINDOW, window), (FULL, None)} == {(group.kind, group.window) for group in spec.groups}


@pytest.mark.parametrize("name", CARRIED)
def test_recurrent_state_is_what_the_model_keeps_after_any_length(name):
    """Its bytes do not grow with the text, so three tokens tell all."""
    model = ARCHITECTURES[name]()
    spec = probe(model)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[7] * 40]), cache=caches))
    slots = flatten_caches(caches)
    for layer in spec.recurrent:
        held = slots[layer.index].cache
        assert layer.state_shapes == tuple(array.shape for array in held)
        assert layer.state_nbytes == sum(array.nbytes for array in held)
    assert spec.state_nbytes == sum(layer.state_nbytes for layer in spec.layers)


def test_the_scale_is_the_models_own():
    """Yarn in deepseek_v2 changes it, so it is not simply the root of the dim."""
    model = ARCHITECTURES["deepseek_v2"]()
    assert {layer.self_attn.scale for layer in model.layers} == {layer.scale for layer in probe(model).layers}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_dtype_is_that_of_keys_and_values(dtype):
    """A half-precision model has half-precision K and V."""
    model = ARCHITECTURES["llama"]()
    model.set_dtype(dtype)
    assert str(dtype).removeprefix("mlx.core.") == probe(model).dtype


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_carried_is_refused_with_the_reason(name):
    """Never run wrongly."""
    with pytest.raises(UnsupportedModel, match=WHY_REFUSED[name]):
        probe(ARCHITECTURES[name]())


@pytest.mark.parametrize("head_dim", [40, 72, 80, 112])
def test_a_head_dim_that_no_group_divides_is_refused(head_dim):
    """Also dims on which mlx's Hadamard transform corrupts memory."""
    with pytest.raises(UnsupportedModel, match=f"head dim {head_dim} of cache slot 0 is not a multiple of 32"):
        probe(build("llama", head_dim=head_dim))


class Windowless(llama.Model):
    """Keeps everything, but lets its mask hide what is older than the window."""

    def make_cache(self):
        return [KVCache() for _ in self.layers]


class TooWide(llama.Model):
    """Holds another number of tokens than its mask shows."""

    def make_cache(self):
        return [RotatingKVCache(max_size=64) for _ in self.layers]


class KeepsFirst(llama.Model):
    """Rotates, but never forgets the first tokens."""

    def make_cache(self):
        return [RotatingKVCache(max_size=64, keep=4) for _ in self.layers]


class OtherCache(llama.Model):
    """Brings a cache that is not one of the known ones."""

    def make_cache(self):
        return [ConcatenateKVCache() for _ in self.layers]


class Unused(llama.Model):
    """Makes more caches than it has layers."""

    def make_cache(self):
        return [KVCache() for _ in range(3)]


class Failing(llama.Model):
    """Cannot run."""

    def __call__(self, inputs, cache=None, input_embeddings=None):
        raise ValueError("wrong shape")


def _windowed(cls):
    template = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100, "head_dim": 32}
    base = build("llama")
    args = llama.ModelArgs(**{**asdict(base.args), **template})
    return cls(args)


def test_a_window_that_only_the_mask_knows_is_found():
    """Three tokens fit any window: the mask is asked for with it, and that is what counts."""
    spec = probe(_windowed(Windowless))
    assert [(layer.kind, layer.window) for layer in spec.layers] == [(WINDOW, 100), (FULL, None)]


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (TooWide, "holds the last 64 tokens, but its mask shows 100"),
        (KeepsFirst, "keeps its first 4 tokens"),
        (OtherCache, "is a ConcatenateKVCache"),
        (Unused, r"cache slot 2 \(KVCache\) is never filled"),
        (Failing, "cannot run 3 tokens on its own cache: wrong shape"),
    ],
)
def test_caches_that_we_would_get_wrong_are_refused(cls, reason):
    """Each would pass a short test and fail in a long text, or hide what it does."""
    with pytest.raises(UnsupportedModel, match=reason):
        probe(_windowed(cls))


def test_a_mask_that_the_model_changes_is_refused():
    """Only a mask as a cache made it says which keys are visible."""

    class OwnMask(llama.Attention):
        def __call__(self, x, mask=None, cache=None):
            return super().__call__(x, create_attention_mask(x, None, return_array=True), cache)

    model = build("llama")
    for layer in model.layers:
        layer.self_attn.__class__ = OwnMask
    with pytest.raises(UnsupportedModel, match="masks attention in a way of its own"):
        probe(model)


def test_attention_without_a_mask_is_refused():
    """A prompt that sees its own future is not a causal model."""

    class Open(llama.Attention):
        def __call__(self, x, mask=None, cache=None):
            return super().__call__(x, None, cache)

    model = build("llama")
    model.layers[1].self_attn.__class__ = Open
    with pytest.raises(UnsupportedModel, match="cache slot 1 masks attention in a way of its own"):
        probe(model)


def test_keys_that_differ_from_the_caches_are_refused():
    """What is stored must be what is attended to."""

    class Doubled(llama.Attention):
        def __call__(self, x, mask=None, cache=None):
            def doubled(keys, values):
                keys, values = KVCache.update_and_fetch(cache, keys, values)
                return keys * 2, values

            cache.update_and_fetch = doubled
            return super().__call__(x, mask, cache)

    model = build("llama")
    model.layers[0].self_attn.__class__ = Doubled
    with pytest.raises(UnsupportedModel, match="attends to other keys and values than its cache holds"):
        probe(model)


def test_attention_without_a_cache_is_refused():
    """It would reuse another layer's K and V (afm7), or keep none."""

    class Cacheless(llama.Attention):
        def __call__(self, x, mask=None, cache=None):
            return super().__call__(x, mask, None)

    model = build("llama")
    model.layers[1].self_attn.__class__ = Cacheless
    with pytest.raises(UnsupportedModel, match="attention with no cache instead of its own"):
        probe(model)


# -- bytes -----------------------------------------------------------------------------------------------------------

GROUP = LayerGroup((0, 1, 2), FULL, n_kv_heads=3, k_dim=64, v_dim=64, n_q_heads=9, window=None)


def test_group_bytes_by_hand():
    """3 layers of 3 heads: 64 * 128 codes of half a byte, 64 scales for K and 64 for V with a bias each, 2 bytes."""
    assert group_nbytes("q4", GROUP, "float32") == 3 * 3 * (4096 + (64 + 64) * 4)
    assert group_nbytes("q4-affine", GROUP, "float32") == 3 * 3 * (4096 + (64 + 64) * 4)
    for codec, bits in (("q2", 2), ("q3", 3), ("q8", 8)):
        assert group_nbytes(codec, GROUP, "float32") == 3 * 3 * (64 * 128 * bits // 8 + (64 + 64) * 4)
    assert group_nbytes("fp16", GROUP, "float32") == 3 * 3 * 64 * 128 * 2
    assert group_nbytes("exact", GROUP, "float32") == 3 * 3 * 64 * 128 * 4
    assert group_nbytes("exact", GROUP, "bfloat16") == 3 * 3 * 64 * 128 * 2


@pytest.mark.parametrize("codec", [*CODECS, "exact"])
@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (32, 32), (96, 96), (192, 128)])
def test_group_bytes_are_those_of_the_arrays(codec, k_dim, v_dim):
    """The codec's own arrays take exactly what is counted."""
    k, v = mx.random.normal((2, 64, k_dim)), mx.random.normal((2, 64, v_dim))
    parts = make_codec(codec, compute_dtype=mx.float32).quantize(k, v)
    group = LayerGroup((0,), FULL, 2, k_dim, v_dim, 2, None)
    assert group_nbytes(codec, group, "float32") == sum(part.nbytes for part in parts.values())


def test_a_head_dim_of_96_packs_values_in_groups_of_32():
    """One head of 96: 6144 bytes of codes; 96 channels of K and 64 * 3 groups of V, 4 bytes each."""
    group = LayerGroup((0,), FULL, 1, 96, 96, 1, None)
    assert group.value_group == 32
    assert group_nbytes("q4", group, "float16") == 6144 + (96 + 64 * 3) * 4
    assert group_nbytes("q4-affine", group, "float16") == 6144 + (64 * 3 + 64 * 3) * 4


def test_q4_is_four_and_a_half_bits_a_value():
    """0.28125 of FP16, what the paper rounds to 0.281."""
    for dim in (64, 128, 192, 256):
        group = LayerGroup((0,), FULL, 2, dim, dim, 2, None)
        assert group_nbytes("q4", group, "float16") / group_nbytes("fp16", group, "float16") == 0.28125


def test_an_unknown_codec_is_an_input_error():
    """With those that there are."""
    with pytest.raises(InputError, match="q4, q4-affine, q3, q2, q8, fp16"):
        group_nbytes("q7", GROUP, "float32")


@pytest.mark.parametrize(("dim", "size"), [(32, 32), (64, 64), (96, 32), (128, 64), (160, 32), (192, 64), (256, 64)])
def test_values_are_packed_in_the_widest_group_that_divides(dim, size):
    """64 where possible, else 32."""
    assert size == packing_group(dim)


def test_a_dim_that_neither_divides_is_an_input_error():
    """80 is phi-2's."""
    with pytest.raises(InputError, match="80"):
        packing_group(80)


@pytest.mark.parametrize("dim", [dim for dim in range(1, 600) if can_rotate(dim)])
def test_the_hadamard_transform_is_its_own_inverse_where_we_use_it(dim):
    """Orthogonal too: it keeps lengths."""
    x = mx.random.normal((7, dim), key=mx.random.key(dim))
    once = mx.hadamard_transform(x)
    assert mx.allclose(x, mx.hadamard_transform(once), atol=1e-5)
    assert mx.allclose(mx.linalg.norm(x, axis=-1), mx.linalg.norm(once, axis=-1), rtol=1e-4)


@pytest.mark.parametrize("dim", [72, 80, 112, 144, 160, 576])
def test_no_rotation_on_dims_where_it_is_wrong(dim):
    """Not self-inverse, or memory is corrupted."""
    assert not can_rotate(dim)


# -- the record ------------------------------------------------------------------------------------------------------

_dims = st.sampled_from([32, 64, 96, 128, 192, 256])


@st.composite
def layers(draw, index):
    kind = draw(st.sampled_from(list(LayerKind)))
    if kind is RECURRENT:
        shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=4).map(tuple), max_size=3).map(tuple))
        return LayerSpec(index, kind, state_shapes=shapes, state_nbytes=draw(st.integers(0, 10**6)))
    heads = draw(st.integers(1, 8))
    return LayerSpec(
        index,
        kind,
        n_kv_heads=heads,
        k_dim=draw(_dims),
        v_dim=draw(_dims),
        n_q_heads=heads * draw(st.integers(1, 4)),
        window=draw(st.integers(1, 4096)) if kind is WINDOW else None,
        has_sinks=draw(st.booleans()),
        scale=draw(st.none() | st.floats(0.01, 1.0)),
    )


@st.composite
def specs(draw):
    n = draw(st.integers(0, 8))
    return ModelCacheSpec(
        tuple(draw(layers(i)) for i in range(n)), draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    )


@given(specs())
def test_a_spec_survives_json(spec):
    """So it can be cached beside the model's fingerprint."""
    assert spec == ModelCacheSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert spec == ModelCacheSpec.from_dict(spec.to_dict())


@given(specs(), st.sampled_from([*CODECS, "exact"]))
def test_bytes_add_up(spec, codec):
    """Groups cover each attention layer once; a block is four groups, a group 64 tokens; quantized is smaller."""
    attention = [layer.index for layer in spec.layers if layer.kind is not RECURRENT]
    assert sorted(attention) == sorted(index for group in spec.groups for index in group.layers)
    sealed = sum(group_nbytes(codec, group, spec.dtype) for group in spec.groups)
    assert sealed * 4 == sum(spec.block_nbytes(codec).values())
    assert sealed == 64 * sum(spec.token_nbytes(codec).values())
    assert spec.exact_nbytes(64) == sum(group_nbytes("exact", group, spec.dtype) for group in spec.groups)
    if codec.startswith("q4"):
        assert sealed <= 0.32 * sum(group_nbytes("fp16", group, spec.dtype) for group in spec.groups)
