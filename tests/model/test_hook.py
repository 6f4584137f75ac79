"""How attention calls find their way to our caches, and leave mlx-lm's own alone."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama, qwen3_next
from mlx_lm.models.cache import KVCache, make_prompt_cache

from amem.model.hook import CarriedCache, gated, install, spy
from tests.architectures import ARCHITECTURES

TOKENS = mx.array([[5, 6, 7, 8]])


class Recording(KVCache):
    """A cache that answers itself, with the exact attention that mlx-lm would have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[float, object, object]] = []

    def attend(self, queries, *, scale, mask, sinks):
        self.asked.append((scale, mask, sinks))
        keys, values = self.keys_and_values()
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def test_a_stock_cache_still_gets_what_mlx_lm_computes():
    """The hook changes no bit of a model that runs on its own caches."""
    model = ARCHITECTURES["llama"]()
    dispatch = vars(llama)["scaled_dot_product_attention"]
    vars(llama)["scaled_dot_product_attention"] = getattr(dispatch, "original", dispatch)
    without = model(TOKENS, cache=make_prompt_cache(model))
    mx.eval(without)
    install(model)
    assert mx.array_equal(without, model(TOKENS, cache=make_prompt_cache(model)))
    assert mx.array_equal(without, model(TOKENS))


def test_a_carried_cache_is_asked_with_scale_mask_and_sinks():
    """A cache with `attend` answers for its layer; it gets what the model passes, positionally or by keyword."""
    model = ARCHITECTURES["gpt_oss"]()
    install(model)
    caches = [Recording() for _ in model.layers]
    assert all(isinstance(cache, CarriedCache) for cache in caches)
    stock = model(TOKENS, cache=[KVCache() for _ in model.layers])
    assert mx.allclose(stock, model(TOKENS, cache=caches), atol=1e-5)
    for cache, layer in zip(caches, model.layers, strict=True):
        [(scale, mask, sinks)] = cache.asked
        assert scale == 0.125
        assert mask is not None
        assert mx.array_equal(layer.self_attn.sinks, sinks)


def test_mixed_caches_in_one_model_go_each_their_own_way():
    """Only the layers whose cache can attend are carried."""
    model = ARCHITECTURES["llama"]()
    install(model)
    carried = Recording()
    with spy() as calls:
        model(TOKENS, cache=[KVCache(), carried])
    assert len(calls) == 2
    assert len(carried.asked) == 1


def test_the_module_that_defines_the_attention_is_hooked():
    """qwen3_5 takes its attention from qwen3_next, so that is where the function is rebound."""
    assert "mlx_lm.models.qwen3_next" in install(ARCHITECTURES["qwen3_5"]())
    assert hasattr(qwen3_next.scaled_dot_product_attention, "original")


def test_a_model_without_attention_has_nothing_to_hook():
    """mamba2 has no attention at all."""
    assert install(ARCHITECTURES["mamba2"]()) == ()


def test_a_model_file_outside_sys_modules_is_hooked(monkeypatch):
    """A class whose module is not registered still leads to its globals, through its `__call__`."""
    model = ARCHITECTURES["mixtral"]()
    from mlx_lm.models import mixtral

    monkeypatch.setattr(mixtral, "scaled_dot_product_attention", lambda *args, **kwargs: None)
    monkeypatch.delitem(sys.modules, "mlx_lm.models.mixtral")
    install(model)
    assert hasattr(mixtral.scaled_dot_product_attention, "original")


def test_installing_again_changes_nothing_from_any_thread():
    """The function is wrapped once, however many models and threads ask for it."""
    model = ARCHITECTURES["qwen3"]()
    install(model)
    namespace = vars(sys.modules["mlx_lm.models.qwen3"])
    once = namespace["scaled_dot_product_attention"]
    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(lambda _: install(model), range(32)))
    assert {("mlx_lm.models.qwen3",)} == set(names)
    assert once is namespace["scaled_dot_product_attention"]
    assert not hasattr(once.original, "original")


def test_a_spy_sees_only_its_own_thread_and_only_while_it_watches():
    """Another engine's calls do not end up in this one's self-check."""
    model = ARCHITECTURES["llama"]()
    install(model)
    with spy() as calls, ThreadPoolExecutor(1) as other:
        other.submit(lambda: mx.eval(model(mx.array([[1, 2]])))).result()
    model(TOKENS)
    assert calls == []


def test_spies_nest():
    """The inner spy has its calls for itself; the outer one goes on afterwards."""
    model = ARCHITECTURES["llama"]()
    install(model)
    with spy() as outer:
        with spy() as inner:
            model(TOKENS)
        model(TOKENS)
    assert (len(inner), len(outer)) == (2, 2)


def test_an_error_in_the_cache_reaches_the_caller():
    """Nothing falls back to mlx-lm's function when ours fails."""

    class Failing(Recording):
        def attend(self, queries, **_):
            raise RuntimeError("no such block")

    model = ARCHITECTURES["llama"]()
    install(model)
    with pytest.raises(RuntimeError, match="no such block"):
        model(TOKENS, cache=[Failing(), Failing()])


def test_gates_are_computed_by_whoever_is_asked():
    """Inside the block the model's gates are the given function's, outside mlx-lm's own; another thread's stay."""
    model = ARCHITECTURES["llama"]()
    install(model)
    plain = model(TOKENS)
    mx.eval(plain)
    shapes = []

    def gate(given, x):
        shapes.append(given.shape)
        return mx.zeros_like(x)

    with gated(gate):
        without_mlps = model(TOKENS)
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(lambda: np.array(model(TOKENS))).result()
    assert len(model.layers) == len(shapes)
    assert not mx.allclose(plain, without_mlps)
    assert np.allclose(np.array(plain), elsewhere, atol=1e-6)
    assert mx.array_equal(plain, model(TOKENS))


def test_a_gate_that_declines_leaves_it_to_the_model():
    """None means: not for these arrays."""
    model = ARCHITECTURES["llama"]()
    install(model)
    with gated(lambda _gate, _x: None):
        assert mx.array_equal(model(TOKENS), model(TOKENS))
        with gated(None):
            found = model(TOKENS)
    assert mx.array_equal(found, model(TOKENS))
