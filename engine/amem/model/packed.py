"""The weights of a quantized model as they were stored, beside the float32 ones that Linux's CPU computes with.

Products with many rows go to BLAS and need float32. A decode step has one row for each reply: it reads all weights for
a token of each, and the stored form is a fifth of the bytes or less. Both are the same numbers, so this changes no
result beyond the order of its sums.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from amem.kernels import can_compile, read_or_compile
from amem.model import blas

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn

_WORDS_PER_SCALE = 4  # in the kernel's form
_lock = threading.Lock()
_kept: dict[int, tuple[Any, ...]] = {}  # by address: the arrays that the table's entries point into


@dataclass(frozen=True)
class PackedMatrix:
    """Codes of one matrix ``[rows, columns]``, as `mx.quantize` packs them, with float16 scales."""

    codes: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int


def prepare() -> Future[ModuleType | None] | None:
    """Compile, or read from the disk, the products in a thread; None where they cannot be had."""
    if blas.library_address() is None or not can_compile():
        return None
    pool = ThreadPoolExecutor(1, "amem-compile")
    future = pool.submit(_compiled)
    pool.shutdown(wait=False)
    return future


def _compiled() -> ModuleType | None:
    with _lock:
        try:
            return read_or_compile(_products)
        except Exception:  # noqa: BLE001  # whatever numba does not like here, the library computes the same
            return None


def _products() -> ModuleType:
    from amem.kernels import product, team

    library = blas.library_address()
    assert library is not None
    team.start()
    # a library that keeps its own threads would only be in their way
    blas.send_rows(product.compiled_sgemm(library, divided=blas.can_set_threads()))
    return product


def collect(model: nn.Module) -> dict[str, PackedMatrix]:
    """The packed matrices of a quantized model that the kernel can read, by the path of their module."""
    import mlx.core as mx

    found = {}
    for path, module in model.named_modules():
        if getattr(module, "mode", "affine") != "affine" or "biases" not in module or "scales" not in module:
            continue
        matrix = PackedMatrix(module.weight, module.scales, module.biases, module.bits, module.group_size)
        words_per_scale = matrix.group_size * matrix.bits // 32
        if (
            matrix.bits in {4, 8}
            and matrix.codes.ndim == 2
            and matrix.codes.shape[1] % 8 == 0
            and words_per_scale % _WORDS_PER_SCALE == 0
            and matrix.scales.dtype == matrix.biases.dtype == mx.float16
        ):
            found[path] = matrix
    return found


def register(model: nn.Module, matrices: Mapping[str, PackedMatrix], products: ModuleType) -> int:
    """Let products with these float32 weights of a model read their packed form; how many there are.

    The arrays are kept, so that no other can come to lie at their addresses, until the model is let go.
    """
    modules = dict(model.named_modules())
    n = 0
    for path, matrix in matrices.items():
        module = modules[path]
        weight = module.weight
        scales, biases = (_spread(array, matrix) for array in (matrix.scales, matrix.biases))
        codes = np.asarray(matrix.codes)
        address = _address(np.asarray(weight))
        entry = [*weight.shape, matrix.bits, *(_address(array) for array in (codes, scales, biases))]
        with _lock:
            if address in _kept or not products.enter(address, entry):
                continue
            _kept[address] = (weight, codes, scales, biases)
        weakref.finalize(module, _forget, address, products).atexit = False
        n += 1
    return n


def entry(module: nn.Module, products: ModuleType) -> tuple[list[int], tuple[Any, ...]]:
    """A float32 linear layer as the kernels take it: its entry and its bias; and what must be kept alive meanwhile."""
    weight = np.asarray(module.weight)
    bias = np.asarray(module.bias) if "bias" in module else None
    at = products.find(_address(weight))
    values = products.table[at].tolist() if at >= 0 else [_address(weight), *weight.shape, 0, 0, 0, 0]
    return [*values, 0 if bias is None else _address(bias)], (module.weight, weight, bias)


def _forget(address: int, products: ModuleType) -> None:
    with _lock:
        products.leave(address)
        _kept.pop(address, None)


def _spread(scales: mx.array, matrix: PackedMatrix) -> npt.NDArray[np.float16]:
    """One scale for each four words."""
    repeats = matrix.group_size * matrix.bits // 32 // _WORDS_PER_SCALE
    array = np.asarray(scales)
    return np.ascontiguousarray(np.repeat(array, repeats, axis=1)) if repeats > 1 else np.ascontiguousarray(array)


def _address(array: npt.NDArray[Any]) -> int:
    return cast("int", array.__array_interface__["data"][0])
