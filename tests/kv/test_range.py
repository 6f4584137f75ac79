"""Models whose keys or values are too large for float16."""

import mlx.core as mx
import numpy as np
import pytest

from amem import Engine
from amem.errors import InputError, UnsupportedModel
from amem.kv.codec import codec_for, make_codec
from amem.kv.sequence import StateLayout
from amem.model.spec import CODECS, ModelCacheSpec
from tests.kv import reference, states
from tests.tiny import write_tiny_model

LAYER = states.layer()


def spec(peak):
    return ModelCacheSpec((LAYER,), "float32", peak)


def large(n_tokens, factor):
    """Float32 q, k, v whose keys and values are large; queries small, so that the softmax is not all in one place."""
    q, k, v = states.random_qkv(LAYER, n_tokens)
    return q / factor, k * factor, v * factor


@pytest.mark.parametrize("codec", CODECS)
def test_the_codec_follows_the_range_that_the_self_check_saw(codec):
    """Up to a sixteenth of float16's range it is kept; beyond, the name says that bfloat16 took its place."""
    assert codec == codec_for(codec, spec(4000.0)).name
    wide = codec_for(codec, spec(5000.0))
    assert f"{codec}/bf16" == wide.name == codec_for(wide.name, spec(5000.0)).name
    narrow, wider = (c.part_shapes(states.layout(LAYER).shape(0)) for c in (make_codec(codec), wide))
    assert {name: dims for name, (dims, _) in narrow.items()} == {name: dims for name, (dims, _) in wider.items()}
    assert mx.float16 not in {dtype for _, dtype in wider.values()}
    for unknown in ("q4/bf17", "exact/bf16", "auto/bf16"):
        with pytest.raises(InputError, match="unknown codec"):
            codec_for(unknown, spec(0.0))


@pytest.mark.parametrize("codec", ["q4", "q4-affine"])
def test_large_values_are_attended_to_as_well_as_small_ones(codec):
    """Against float64, the error of bfloat16 scales does not grow with the range, and is near that of float16 ones."""
    apart = []
    for name, factor in ((codec, 1.0), (f"{codec}/bf16", 1.0), (f"{codec}/bf16", 1e5)):
        q, k, v = large(300, factor)
        sequence = states.new_sequence(StateLayout(spec(0.0), make_codec(name)))
        got = states.feed(sequence, {0: (q, k, v)}, [299, 1])[0] / factor
        exact = reference.attention(q, k, v, k, v, scale=0.1) / factor
        apart.append(np.abs(got - exact).mean() / np.abs(exact).mean())
    assert apart[1] < apart[0] + 0.01
    assert apart[2] < apart[1] * 1.01


@pytest.mark.parametrize("codec", CODECS)
def test_what_float16_cannot_hold_is_never_stored(codec):
    """Where no check foresaw it, the turn ends with an error that names the codec to use."""
    _, k, v = large(300, 1e5)
    sequence = states.new_sequence(states.layout(LAYER, codec=codec))
    sequence.begin_step(300)
    sequence.append(0, mx.array(k), mx.array(v))
    sequence.end_step(300)
    with pytest.raises(UnsupportedModel, match=f"{codec}/bf16"):
        sequence.export_block(0, 4)


def test_an_engine_takes_the_wide_codec_for_a_model_that_needs_it(tmp_path):
    """Found by the self-check; what is stored carries the codec's name, and a restart goes on from it."""
    folder = write_tiny_model(tmp_path / "tiny-llama")
    weights = mx.load(str(folder / "model.safetensors"))
    for name in weights:
        if name.endswith("v_proj.weight"):
            weights[name] = weights[name] * 1e7
        if name.endswith("o_proj.weight"):
            weights[name] = weights[name] * 1e-7
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    message = "a list of many words " * 30
    replies = []
    for turn in range(2):
        with Engine(folder, tmp_path / "store", memory="200MB") as engine:
            assert "q4/bf16" == engine.status().codec
            replies.append(engine.agent("planner").ask(message, max_tokens=8))
            assert bool(turn) == bool(replies[-1].metrics.reused_tokens)
    with Engine(folder, tmp_path / "other", memory="200MB") as engine:
        assert [reply.token_ids for reply in replies] == [
            engine.agent("planner").ask(message, max_tokens=8).token_ids for _ in range(2)
        ]
