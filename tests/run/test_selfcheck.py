"""The check at load: what is carried passes, and whatever would be run wrongly is refused."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from amem.errors import UnsupportedModel
from amem.kv.cache import LayerCache
from amem.model.probe import probe
from amem.run.selfcheck import self_check
from tests.architectures import ARCHITECTURES, CARRIED, build


@pytest.mark.parametrize("name", CARRIED)
def test_every_carried_architecture_passes(name):
    """Chunked prefill, decoding and a ragged batch give the logits of the model's own caches."""
    model = ARCHITECTURES[name]()
    self_check(model, probe(model))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_passes(name, dtype):
    """Rounding is not taken for a fault."""
    model = ARCHITECTURES[name]()
    model.set_dtype(dtype)
    self_check(model, probe(model))


def refuse(model, spec, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        self_check(model, spec)


@pytest.mark.parametrize("name", ["llama", "deepseek_v2", "gpt_oss", "qwen3_5"])
def test_a_slightly_wrong_scale_is_seen(name, monkeypatch):
    """Five per cent are far more than rounding, also in a layer out of two."""
    attend = LayerCache.attend
    monkeypatch.setattr(
        LayerCache, "attend", lambda self, q, *, scale, **rest: attend(self, q, scale=scale * 1.05, **rest)
    )
    model = ARCHITECTURES[name]()
    refuse(model, probe(model), "logits differ on amem's caches in prefill")


def test_forgotten_sinks_are_seen(monkeypatch):
    """gpt-oss without its sinks would still talk, but not as it was trained to."""
    attend = LayerCache.attend
    monkeypatch.setattr(LayerCache, "attend", lambda self, q, *, sinks, **rest: attend(self, q, sinks=None, **rest))
    model = ARCHITECTURES["gpt_oss"]()
    refuse(model, probe(model), "logits differ")


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("window", [lambda _: None, lambda window: window - 1, lambda window: window + 1])
def test_a_wrong_window_is_seen(name, window):
    """Also when it is off by one."""
    model = ARCHITECTURES[name]()
    spec = probe(model)
    layers = tuple(replace(at, window=window(at.window)) if at.window else at for at in spec.layers)
    refuse(model, replace(spec, layers=layers), "logits differ")


def test_a_fault_that_only_a_batch_shows_is_seen(monkeypatch):
    """Rows of a batch stand at different positions."""
    monkeypatch.setattr(
        LayerCache,
        "offset",
        property(lambda self: self._offset if isinstance(self._offset, int) else self._offset[0]),
    )
    model = ARCHITECTURES["llama"]()
    refuse(model, probe(model), "logits differ on amem's caches in a batch")


def test_not_a_number_is_no_agreement(monkeypatch):
    """NaN compares false with everything, so it must not pass by that."""
    attend = LayerCache.attend
    monkeypatch.setattr(LayerCache, "attend", lambda self, q, **rest: attend(self, q, **rest) * mx.nan)
    model = ARCHITECTURES["llama"]()
    refuse(model, probe(model), "logits differ")


def _with_attention(cls):
    model = build("llama")
    for layer in model.layers:
        layer.self_attn.__class__ = cls
    return model


def test_a_model_that_asks_more_of_its_cache_is_refused():
    """Something that ours does not offer."""

    class Curious(llama.Attention):
        def __call__(self, x, mask=None, cache=None):
            return super().__call__(x, mask, None if cache.size() < 0 else cache)

    model = _with_attention(Curious)
    refuse(model, probe(model), "does not run on amem's caches: .*size")


def test_a_model_that_takes_only_one_position_is_refused():
    """It cannot be decoded in a batch."""

    class OneOffset(llama.Attention):
        def __call__(self, x, mask=None, cache=None):
            assert isinstance(cache.offset, int), "one position for all rows"
            return super().__call__(x, mask, cache)

    model = _with_attention(OneOffset)
    refuse(model, probe(model), "does not run on amem's caches: one position for all rows")


def test_attention_that_passes_us_by_while_decoding_is_refused():
    """The probe sees a prompt alone; here every call is counted."""

    class Fast(llama.Attention):
        def __call__(self, x, mask=None, cache=None):
            if x.shape[1] > 1:
                return super().__call__(x, mask, cache)
            rows, length, _ = x.shape
            q, k, v = (
                proj(x).reshape(rows, length, -1, 64).transpose(0, 2, 1, 3)
                for proj in (self.q_proj, self.k_proj, self.v_proj)
            )
            k, v = cache.update_and_fetch(self.rope(k, offset=cache.offset), v)
            q = self.rope(q, offset=cache.offset)
            out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale)
            return self.o_proj(out.transpose(0, 2, 1, 3).reshape(rows, length, -1))

    model = _with_attention(Fast)
    refuse(model, probe(model), "8 attention calls were made .* 22 were expected")
