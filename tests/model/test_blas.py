"""Which BLAS MLX's products go to."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest

from amem.model import blas, elf

on_linux_cpu = pytest.mark.skipif(
    not elf.supported() or mx.default_device() != mx.Device(mx.cpu), reason="MLX's CPU backend on Linux alone"
)


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@on_linux_cpu
def test_an_optimized_library_is_in_use():
    """The library itself says what it is, and there is nothing to warn of."""
    assert blas.ensure() == blas.in_use()
    assert blas.in_use().startswith(("OpenBLAS", "Intel"))
    assert blas.warning() is None


@on_linux_cpu
@pytest.mark.parametrize(
    "imports", ["", "import mlx.core; ", "import mlx.core as mx; mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8))); "]
)
def test_the_order_of_imports_does_not_matter(imports):
    """MLX may have been imported, and may have multiplied, before the library is bound."""
    code = f"{imports}from amem.model import blas; print(blas.ensure()); import mlx.core; print(blas.in_use())"

    before, after = _run(code).splitlines()

    assert before == after == blas.in_use()


@on_linux_cpu
def test_without_binding_the_reference_library_is_named():
    """What is reported is asked of the library, not assumed from what is installed."""
    assert "reference BLAS" in _run("from amem.model import blas; print(blas.in_use())")


@on_linux_cpu
def test_a_missing_library_is_warned_of_with_the_remedy():
    """Where no optimized library is installed, MLX is left as it is."""
    code = "from amem.model import blas; blas._candidates = list; print(blas.warning())"

    warning = _run(code)

    assert "reference BLAS" in warning
    assert "pip install scipy-openblas32" in warning


@on_linux_cpu
def test_a_library_that_cannot_be_loaded_is_passed_over(tmp_path):
    """A broken file among the candidates does not stop the next one."""
    broken = tmp_path / "libmkl_rt.so.2"
    broken.write_bytes(b"no library")
    code = (
        "from pathlib import Path; from amem.model import blas; real = blas._candidates; "
        f"blas._candidates = lambda: [Path({str(broken)!r}), *real()]; print(blas.ensure())"
    )

    assert _run(code) == blas.in_use()


def test_importing_it_imports_no_mlx():
    """The engine's package binds BLAS first of all, so this module must be light."""
    assert _run("import sys; import amem.model.blas; print([m for m in sys.modules if m.startswith('mlx')])") == "[]"


def test_elsewhere_there_is_nothing_to_do(monkeypatch):
    """On a system that is not supported MLX is left alone, and no BLAS is named."""
    monkeypatch.setattr(blas, "_mlx", lambda: None)

    assert blas.in_use() == ""
    assert blas.warning() is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_products_are_right(dtype):
    """Every function that was bound computes what it computed before, transposed or not."""
    blas.ensure()
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((33, 65), (65, 17)))
    with mx.stream(mx.cpu):
        product = mx.array(a) @ mx.array(b)
        transposed = mx.array(b.T.copy()) @ mx.array(a.T.copy())
        mx.eval(product, transposed)

    np.testing.assert_allclose(np.array(product), a @ b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.array(transposed), (a @ b).T, rtol=1e-4, atol=1e-4)


def test_several_threads_multiply_at_once():
    """The library takes calls from several threads."""
    blas.ensure()
    results: list[float] = []

    def multiply():
        with mx.stream(mx.new_stream(mx.cpu)):
            results.append(float((mx.ones((64, 64)) @ mx.ones((64, 64))).sum().item()))

    threads = [threading.Thread(target=multiply) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [64.0**3] * 4


@on_linux_cpu
def test_only_functions_that_are_called_have_slots():
    """A name that the library does not call is not found in it."""
    mlx = blas._mlx()

    assert mlx is not None
    assert elf.call_slots(mlx.library, ["cblas_sgemm", "no_such_function"]).keys() == {"cblas_sgemm"}


@pytest.mark.skipif(not elf.supported(), reason="reads ELF")
def test_read_only_memory_is_not_written():
    """A slot in a page that was made read-only is left as it is."""
    constant = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
    assert constant is not None
    before = elf.read_slot(constant)

    assert not elf.write_slot(constant, 0)
    assert elf.read_slot(constant) == before
    assert "libc" in elf.file_of(constant)


def test_the_name_of_the_library_does_not_change_with_its_threads():
    """Decoding changes the number of threads from step to step."""
    name = blas.ensure()
    blas.set_threads(1)
    try:
        assert name == blas.in_use()
    finally:
        blas.set_threads(0)
