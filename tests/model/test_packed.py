"""Products of a few rows, computed by the kernel and from packed weights."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import dequantize_model

from amem.model import blas, elf, packed

pytestmark = pytest.mark.skipif(
    not elf.supported() or mx.default_device() != mx.Device(mx.cpu) or importlib.util.find_spec("numba") is None,
    reason="needs numba, and MLX's CPU backend on Linux",
)


@pytest.fixture(scope="module")
def products():
    blas.ensure()
    future = packed.prepare()
    assert future is not None
    found = future.result()
    assert found is not None
    assert blas.rows_sent()
    return found


def counts(products):
    """Products with packed weights and with float32 ones so far."""
    return products.table[-1, :2].tolist()


class Layers(nn.Module):
    """An embedding that is the output's matrix too, and a linear layer with a bias."""

    def __init__(self, rows, columns):
        super().__init__()
        self.embedding = nn.Embedding(rows, columns)
        self.linear = nn.Linear(columns, rows)

    def __call__(self, x):
        return self.linear(x), self.embedding.as_linear(x)


def quantized(rows=96, columns=256, group_size=32, bits=4, seed=0):
    mx.random.seed(seed)
    model = Layers(rows, columns)
    nn.quantize(model, group_size=group_size, bits=bits)
    model.set_dtype(mx.float16)
    return model


def widened(model, products):
    """What loading does with a quantized model; how many of its matrices were entered."""
    matrices = packed.collect(model)
    model.set_dtype(mx.float32)
    dequantize_model(model)
    mx.eval(model.parameters())
    return packed.register(model, matrices, products)


def in_float64(model, x):
    x = np.array(x).astype(np.float64)
    linear, embedding = (np.array(module.weight).astype(np.float64) for module in (model.linear, model.embedding))
    return x @ linear.T + np.array(model.linear.bias).astype(np.float64), x @ embedding.T


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    group_size=st.sampled_from([32, 64, 128]),
    bits=st.sampled_from([4, 8]),
    n=st.integers(1, 7),
    seed=st.integers(0, 100),
)
def test_packed_products_agree_with_float64(products, rows, groups, group_size, bits, n, seed):
    """Codes, scales and biases of any layout that is entered give the product of the matrix that they stand for."""
    model = quantized(rows, 64 * groups * group_size // 32, group_size, bits, seed)
    n_entered = widened(model, products)
    x = mx.random.normal((1, n, model.linear.weight.shape[1]))
    before = counts(products)
    found = model(x)
    mx.eval(found)
    assert [before[0] + n_entered, before[1] + 2 - n_entered] == counts(products)
    assert 2 == n_entered
    for got, wanted in zip(found, in_float64(model, x), strict=True):
        np.testing.assert_allclose(np.array(got), wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 70), columns=st.integers(1, 200), n=st.integers(1, 4), seed=st.integers(0, 100))
def test_float_products_agree_with_float64(products, rows, columns, n, seed):
    """A matrix that is not packed, of any shape."""
    rng = np.random.default_rng(seed)
    x, matrix = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, columns), (rows, columns)))
    got = np.array(mx.array(x) @ mx.array(matrix).T)
    wanted = x.astype(np.float64) @ matrix.astype(np.float64).T
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 12])
def test_a_few_rows_are_each_what_they_are_alone(products, n, bits):
    """A batch changes no bit of its products, with packed weights and with others."""
    model = quantized(bits=bits)
    x = mx.random.normal((n, 1, 256))
    for n_packed in (2, 0):
        if n_packed:
            assert n_packed == widened(model, products)
        else:
            model = Layers(96, 250)
            x = x[:, :, :250]
        before = counts(products)
        together = [np.array(y) for y in model(x)]
        if n_packed:
            assert [before[0] + n_packed, before[1]] == counts(products)
        for row in range(n):
            for one, all_rows in zip(model(x[row : row + 1]), together, strict=True):
                if n_packed or n <= products.MOST_FLOATS:
                    assert np.array_equal(np.array(one)[0], all_rows[row])


def test_many_rows_go_to_the_library(products):
    """A prompt's products are not touched, and agree with the single rows up to rounding."""
    model = quantized()
    widened(model, products)
    x = mx.random.normal((1, products.MOST_PACKED + 1, 256))
    before = counts(products)
    together = model(x)
    mx.eval(together)
    assert before == counts(products)
    for row in range(x.shape[1]):
        for one, all_rows in zip(model(x[:, row : row + 1]), together, strict=True):
            np.testing.assert_allclose(np.array(one[0, 0]), np.array(all_rows[0, row]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("n", [1, 12, 42, 128])
@pytest.mark.parametrize(("word", "value"), [("_N_WORKERS", 0), ("_RESTING", 9)])
def test_no_bit_depends_on_who_computes_a_part(products, n, word, value):
    """Products give the same bits on one core and on all, and whether a worker comes in time or not."""
    from amem.kernels import team

    model = quantized(1600, 1536)
    assert widened(model, products)
    x = mx.random.normal((1, n, 1536))
    place = team._state[0, getattr(team, word) :][:1]
    before = place.copy()
    try:
        place[:] = team.start() if word == "_N_WORKERS" else 0
        together = [np.array(y) for y in model(x)]
        place[:] = value
        alone = [np.array(y) for y in model(x)]
    finally:
        place[:] = before
    assert all(np.array_equal(one, other) for one, other in zip(together, alone, strict=True))


def test_a_model_that_is_gone_leaves_nothing(products):
    """Its matrices are let go of, so that others at the same addresses are taken for what they are."""
    kept = len(packed._kept)
    model = quantized()
    assert 2 == widened(model, products)
    address = packed._address(np.asarray(model.linear.weight))
    assert products._find(products.table, address) >= 0
    del model
    gc.collect()
    assert kept == len(packed._kept)
    assert -1 == products._find(products.table, address)


def test_a_matrix_in_place_of_an_entered_one_is_read_itself(products):
    """New weights of a layer have another address, even if the old ones could have been freed."""
    model = quantized()
    widened(model, products)
    model.linear.weight = mx.random.normal((96, 256))
    mx.eval(model.linear.weight)
    x = mx.random.normal((1, 1, 256))
    np.testing.assert_allclose(np.array(model(x)[0]), in_float64(model, x)[0], rtol=1e-3, atol=1e-4)


def test_layouts_that_the_kernel_cannot_read_are_left_alone(products):
    """Other bits, and rows that are no whole number of blocks, are computed from float32."""
    assert {} == packed.collect(quantized(bits=3))
    assert {} == packed.collect(quantized(columns=96))
    wide = quantized()
    wide.set_dtype(mx.bfloat16)
    assert {} == packed.collect(wide)


def test_a_full_table_is_no_reason_to_fail(products, monkeypatch):
    """A model whose matrices find no slot computes from float32."""
    monkeypatch.setattr(products, "enter", lambda address, entry: False)
    assert 0 == widened(quantized(), products)


def test_slots_are_found_past_those_that_were_left(products):
    """Addresses that meet in one slot, entered and left in any order."""
    stride = products.SLOTS * 64
    addresses = [64 * 7 + stride * k for k in range(1, 5)]
    for address in addresses:
        assert products.enter(address, [1, 64, 4, 0, 0, 0])
    assert 4 == len({products._find(products.table, address) for address in addresses})
    products.leave(addresses[0])
    assert -1 == products._find(products.table, addresses[0])
    assert products._find(products.table, addresses[3]) >= 0
    assert products.enter(addresses[0], [1, 64, 4, 0, 0, 0])
    for address in addresses:
        products.leave(address)
        assert -1 == products._find(products.table, address)


def test_the_librarys_name_is_still_told(products):
    """What status says is the library that computes everything but single rows."""
    assert blas.in_use().startswith(("OpenBLAS", "Intel"))
    assert blas.warning() is None


def test_without_numba_nothing_is_sent_elsewhere():
    """In a process of its own: products stay with the library."""
    code = (
        "import importlib.util as u; real = u.find_spec; u.find_spec = lambda n, p=None: None if n == 'numba' else "
        "real(n, p); from amem.model import blas, packed; blas.ensure(); print(packed.prepare(), blas.rows_sent())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "None False" == done.stdout.strip()
