"""MLX arrays whose memory is still to be filled, and the numpy views through which I/O threads fill it."""

from __future__ import annotations

import ctypes
import functools
import io
import json
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_MOST_HUGE = 1 << 30
_NAMES = {mx.uint32: "U32", mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32"}


def unfilled(shapes: Mapping[str, tuple[tuple[int, ...], mx.Dtype]]) -> dict[str, mx.array]:
    """Evaluated arrays of these shapes and dtypes; what is in them is undefined. In the owner thread only.

    `mx.zeros` (and `mx.empty`, which is the same) would write every byte, in one thread, before the restore writes it
    again. `mx.load` of a file object only allocates and then asks the object for the bytes, so this one gives none.
    """
    if not shapes:
        return {}
    file = _NoFile({name: (_NAMES[dtype], shape, dtype.size) for name, (shape, dtype) in shapes.items()})
    arrays = mx.load(cast("BinaryIO", file), format="safetensors")
    assert isinstance(arrays, dict)
    return arrays


def give_back() -> None:
    """Return memory that was freed to the system, which glibc keeps for itself else; some ten milliseconds."""
    mx.clear_cache()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The C library's function; None where it has none (macOS, musl)."""
    try:
        return cast("Callable[[int], int]", ctypes.CDLL(None).malloc_trim)
    except (AttributeError, OSError, TypeError):
        return None


def view_of(array: mx.array) -> npt.NDArray[Any]:
    """The memory of an evaluated array, to be written; bfloat16, which numpy lacks, as uint16.

    It must not be used once the array was an operand of an in-place update: MLX may then have moved or reused it.
    """
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def views_of(arrays: Mapping[str, mx.array]) -> dict[str, npt.NDArray[Any]]:
    """The memory of arrays that are filled together; see `view_of`.

    Pages of 2 MB are filled in less than half of the time, as long as the system has them at hand. Where it must make
    them first (by compaction, or by its host, in a virtual machine) they took three times as long as small ones: so
    large states, which need many, are left to small ones.
    """
    views = {name: view_of(array) for name, array in arrays.items()}
    if sum(view.nbytes for view in views.values()) <= _MOST_HUGE:
        for view in views.values():
            _prefer_huge_pages(view)
    return views


def _prefer_huge_pages(view: npt.NDArray[Any]) -> None:
    """Let Linux back a large array with pages of 2 MB, as numpy does for its own. It is advice only, and may fail."""
    if view.nbytes < 1 << 22 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    start = -(-view.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (view.ctypes.data + view.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    _system().madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)


@functools.cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class _NoFile(io.RawIOBase):
    """A safetensors file of which only the header exists."""

    def __init__(self, tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> None:
        entries, end = {}, 0
        for name, (dtype, shape, size) in tensors.items():
            begin, end = end, end + math.prod(shape) * size
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        body = json.dumps(entries).encode()
        self._header = struct.pack("<Q", len(body)) + body
        self._length = len(self._header) + end
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._header[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(buffer)
        return len(buffer)
