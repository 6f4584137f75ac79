"""The kernels for Linux on a CPU: what holds beyond the agreement with float64 (test_attention) and rules 1 to 5."""

import importlib.util
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amem.errors import InputError
from amem.kv import attention as reference
from amem.kv import backend
from amem.model.spec import CODECS
from tests.kv import states
from tests.kv.models import CPU

needs_kernels = pytest.mark.skipif(not CPU, reason="needs numba, and MLX on the CPU")


@st.composite
def chunkings(draw, total):
    lengths = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, draw(st.sampled_from([1, 2, 3, 17, 63, 64, 65, 100, 200]))))
    return lengths


@needs_kernels
@settings(deadline=None, max_examples=40)
@given(
    codec=st.sampled_from([*CODECS, "exact"]),
    window=st.sampled_from([None, 40, 96, 130]),
    repeats=st.integers(1, 3),
    n_tokens=st.integers(1, 400),
    data=st.data(),
)
def test_no_bit_of_a_query_depends_on_its_chunk(codec, window, repeats, n_tokens, data):
    """Given the same K and V, a query alone and the same one among others get the same bits."""
    layer = states.layer(heads=2, heads_q=2 * repeats, window=window)
    qkv, attend = states.random_qkv(layer, n_tokens, 3), backend.choose("cpu").result().attend
    one, other = (
        states.feed(states.new_sequence(states.layout(layer, codec=codec)), {0: qkv}, lengths, attend=attend)[0]
        for lengths in (data.draw(chunkings(n_tokens)), data.draw(chunkings(n_tokens)))
    )
    assert np.array_equal(one, other)


@needs_kernels
@settings(deadline=None, max_examples=20)
@given(
    codec=st.sampled_from(CODECS),
    n_tokens=st.integers(65, 700),
    cuts=st.lists(st.integers(1, 10), max_size=4),
)
def test_no_bit_depends_on_how_groups_lie_in_runs(codec, n_tokens, cuts):
    """The stretches of a view cut into shorter ones, as forks, merges and restores do, change nothing."""
    layer, attend = states.layer(), backend.choose("cpu").result().attend
    q, k, v = states.random_qkv(layer, n_tokens)
    sequence = states.new_sequence(states.layout(layer, codec=codec))
    states.feed(sequence, {0: (q, k, v)}, [n_tokens - 1])
    sequence.begin_step(1)
    view = sequence.append(0, mx.array(k[:, -1:]), mx.array(v[:, -1:]))
    pieces = [piece for stretch in view.stretches for piece in cut(stretch, cuts)]
    whole, parted = (
        attend(
            mx.array(q[:, -1:]),
            reference.LayerView(stretches, view.first, view.k_exact, view.v_exact, view.exact_start, None),
            start=n_tokens - 1,
            scale=0.1,
            codec=sequence.layout.codec,
        )
        for stretches in (view.stretches, pieces)
    )
    assert np.array_equal(np.array(whole), np.array(parted))


def cut(stretch, lengths):
    """A stretch in pieces of these many groups, the rest as the last."""
    n_groups, at = stretch.n_tokens // 64, 0
    for n in [*lengths, n_groups]:
        end = min(n_groups, at + n)
        if end > at:
            parts = {name: array[at:end] for name, array in stretch.parts.items()}
            yield reference.Stretch(parts, stretch.start + at * 64, (end - at) * 64)
        at = end


@needs_kernels
@pytest.mark.parametrize("codec", ["fp16", "fp16/bf16", "exact", "q3", "q3/bf16", "q8"])
@pytest.mark.parametrize("dims", [(20, 32), (100, 64)])
def test_dims_that_are_no_whole_vectors_agree_with_the_reference(codec, dims):
    """Keys whose dims do not fill the last vector; and scales and numbers of either 16 bits."""
    layer, attend = states.layer(k_dim=dims[0], v_dim=dims[1]), backend.choose("cpu").result().attend
    qkv = states.random_qkv(layer, 140)
    one, other = (
        states.feed(states.new_sequence(states.layout(layer, codec=codec)), {0: qkv}, [129, 11], attend=each)[0]
        for each in (attend, reference.attend)
    )
    np.testing.assert_allclose(one, other, atol=3e-4, rtol=3e-3)


@needs_kernels
@settings(deadline=None, max_examples=10)
@given(n_tokens=st.integers(1, 400), length=st.integers(1, 200), heads=st.integers(1, 3), n_threads=st.integers(2, 5))
def test_no_bit_depends_on_threads(n_tokens, length, heads, n_threads):
    """Divided among any number of threads, every row is computed, and with the same bits."""
    layer, attend = states.layer(heads=heads, heads_q=2 * heads), backend.choose("cpu").result().attend
    qkv, lengths = states.random_qkv(layer, n_tokens + length), [n_tokens, length]
    from amem.kv import cpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "WORTH", 1)
        outs = []
        for n in (1, n_threads):
            patch.setattr(cpu, "n_threads", lambda n=n: n)
            outs.append(states.feed(states.new_sequence(states.layout(layer)), {0: qkv}, lengths, attend=attend)[0])
    assert np.array_equal(*outs)


@needs_kernels
def test_what_was_cut_off_and_written_again_is_read_anew():
    """Where a run lies is remembered from one token to the next, and forgotten when other tokens take their place."""
    layer, attend = states.layer(), backend.choose("cpu").result().attend
    one, other = (states.random_qkv(layer, 200, seed) for seed in (1, 2))
    mixed = tuple(np.concatenate([x[:, :120], y[:, 120:]], axis=1) for x, y in zip(one, other, strict=True))
    cut_back, straight = states.new_sequence(states.layout(layer)), states.new_sequence(states.layout(layer))
    states.feed(cut_back, {0: one}, [130, 1], attend=attend)
    assert cut_back.cut(120)
    states.feed(straight, {0: mixed}, [120], attend=attend)
    outs = [states.feed(sequence, {0: mixed}, [12, 1], attend=attend)[0] for sequence in (cut_back, straight)]
    assert np.array_equal(*outs)


@needs_kernels
def test_gates_agree_with_float64():
    """SwiGLU over the whole range, infinities included; what is not a number stays one."""
    from amem.kv.cpu import swiglu

    rng = np.random.default_rng(0)
    gate = np.concatenate([np.linspace(-120, 120, 4000), rng.normal(size=1000)]).astype(np.float32).reshape(1, 2, -1)
    x = rng.normal(size=gate.shape).astype(np.float32)
    wide = gate.astype(np.float64)
    wanted = wide / (1 + np.exp(-wide)) * x
    np.testing.assert_allclose(np.array(swiglu(mx.array(gate), mx.array(x))), wanted, rtol=1e-6, atol=1e-35)
    odd = np.array(swiglu(mx.array([np.inf, np.nan, -87.5]), mx.array([2.0, 1.0, 1.0])))
    assert np.isposinf(odd[0])
    assert np.isnan(odd[1])
    assert 0.0 == odd[2]


@needs_kernels
def test_gates_of_other_kinds_are_left_to_mlx():
    """Half precision, and shapes that are not the same, are not this kernel's."""
    from amem.kv.cpu import swiglu

    assert swiglu(mx.zeros((2, 4), mx.float16), mx.zeros((2, 4), mx.float16)) is None
    assert swiglu(mx.zeros((2, 4)), mx.zeros((1, 4))) is None


@needs_kernels
def test_a_nan_in_the_own_group_is_not_lost():
    """What is not a number stays one: a broken state must not look like a good answer."""
    layer, attend = states.layer(), backend.choose("cpu").result().attend
    q, k, v = states.random_qkv(layer, 70)
    k[0, 66] = np.nan
    out = states.feed(states.new_sequence(states.layout(layer)), {0: (q, k, v)}, [70], attend=attend)[0]
    assert np.isfinite(out[:, :66]).all()
    assert np.isnan(out[:2, 66:]).all()
    assert np.isfinite(out[2:]).all()


@needs_kernels
def test_weights_are_right_far_from_zero():
    """The exponential is as good as float32 allows over its whole range, and exactly zero beyond."""
    from amem.kernels.exponential import exp_below_zero

    x = np.concatenate([np.linspace(-86.9, 0, 5000), [-87.5, -1e30, -np.inf]]).astype(np.float32)
    got = np.array([exp_below_zero(value) for value in x])
    wanted = np.exp(x.astype(np.float64))
    assert np.abs(got[:-3] / wanted[:-3] - 1).max() < 3e-7
    assert [0.0] * 3 == got[-3:].tolist()


@needs_kernels
def test_the_kernels_know_every_codec():
    """None is left to operations that are several times slower."""
    from amem.kv.cpu import _KINDS

    assert {*CODECS, "exact"} <= set(_KINDS)


class TestChoice:
    def test_an_unknown_backend_is_refused(self):
        with pytest.raises(InputError, match="unknown attention 'metal': choose one of auto, reference, cpu"):
            backend.choose("metal")

    @needs_kernels
    def test_auto_takes_the_kernels_on_linux(self, monkeypatch):
        monkeypatch.setattr(sys, "platform", "linux")
        chosen = backend.choose("auto").result()
        assert ("cpu", None) == (chosen.name, chosen.warning)

    def test_elsewhere_auto_is_the_reference(self, monkeypatch):
        monkeypatch.setattr(sys, "platform", "darwin")
        assert backend.choose("auto").result() == backend.Backend("reference", reference.attend)

    def test_without_numba_auto_is_the_reference_and_says_so(self, monkeypatch):
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        chosen = backend.choose("auto").result()
        assert "reference" == chosen.name
        assert "pip install numba" in chosen.warning

    def test_without_numba_the_kernels_cannot_be_asked_for(self, monkeypatch):
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(InputError, match="needs numba"):
            backend.choose("cpu")

    def test_on_a_gpu_the_kernels_cannot_be_asked_for(self, monkeypatch):
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        with pytest.raises(InputError, match="computes on a GPU"):
            backend.choose("cpu")

    @needs_kernels
    def test_kernels_that_cannot_be_compiled_are_no_reason_to_fail(self, monkeypatch):
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setitem(sys.modules, "amem.kv.cpu", None)  # importing it raises
        chosen = backend.choose("auto").result()
        assert "reference" == chosen.name
        assert "could not be compiled" in chosen.warning
