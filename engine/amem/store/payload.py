"""Named numpy buffers as one safetensors file whose every bit is covered by checksums, and back.

The header is the layout (names, dtypes, shapes, offsets) followed by ``__metadata__``. Each tensor has an xxh3_64 in
the metadata's ``sums``; the file's checksum is the xxh3_128 of layout and sums. So a part of the tensors can be read
and verified alone, and equal layouts are parsed once.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from amem.errors import InputError
from amem.store.records import Tensors

DTYPES = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "U32": "<u4", "I32": "<i4",
    "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = b'"__metadata__":'
_ALIGNMENT = 64
_MAX_HEADER = 100_000_000
_CHUNK = 1 << 18  # bytes read before they are hashed: small enough to be hashed while still in the CPU's cache


class Damaged(Exception):
    """A file that is not what was written; its text is the reason, for an error message."""


@dataclass(frozen=True)
class Encoded:
    """A file about to be written."""

    header: bytes
    buffers: tuple[memoryview, ...]
    checksum: str
    nbytes: int


@dataclass(frozen=True)
class TensorLayout:
    name: str
    dtype: str  #: numpy's name of it
    shape: tuple[int, ...]
    begin: int  #: bytes from the start of the payload
    end: int


@dataclass(frozen=True)
class Header:
    layout: tuple[TensorLayout, ...]
    metadata: dict[str, str]
    checksum: str  #: as computed from layout and sums
    payload_offset: int  #: bytes from the start of the file


def encode(metadata: Mapping[str, str], tensors: Tensors) -> Encoded:
    """Lay tensors out in the order given. No bytes are copied for C-contiguous little-endian arrays."""
    entries, buffers, sums = [], [], []
    position = 0
    for name, given in tensors.items():
        if name == "__metadata__" or not isinstance(given, np.ndarray):
            raise InputError(f"tensor {name!r} cannot be stored: give a numpy array under another name")
        dtype = given.dtype.newbyteorder("<")
        if dtype.str not in _NAMES:
            raise InputError(f"tensor {name!r} has dtype {given.dtype}; the store keeps {', '.join(DTYPES)}")
        array = given if given.dtype == dtype and given.flags.c_contiguous else given.astype(dtype, order="C")
        flat = array.reshape(-1).view(np.uint8).data
        span = [position, position + flat.nbytes]
        entry = {"dtype": _NAMES[dtype.str], "shape": list(array.shape), "data_offsets": span}
        entries.append(f"{json.dumps(name)}:{_compact(entry)},")
        buffers.append(flat)
        sums.append(xxhash.xxh3_64_hexdigest(flat))
        position += flat.nbytes
    layout = ("{" + "".join(entries)).encode()
    joined = "".join(sums)
    checksum = _checksum(layout, joined)
    full = dict(metadata) | {"checksum": checksum, "sums": joined}
    body = layout + _METADATA + _compact(full).encode() + b"}"
    body += b" " * (-(8 + len(body)) % _ALIGNMENT)
    header = struct.pack("<Q", len(body)) + body
    return Encoded(header, tuple(buffers), checksum, len(header) + position)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _checksum(layout: bytes, sums: str) -> str:
    return xxhash.xxh3_128_hexdigest(layout + sums.encode())


def read_header(descriptor: int) -> Header:
    """Read and check a file's header, and that the file is as long as it says. Raises Damaged."""
    size = os.fstat(descriptor).st_size
    start = os.pread(descriptor, 1 << 16, 0)
    if len(start) < 8:
        raise Damaged("the file is cut short")
    (length,) = struct.unpack("<Q", start[:8])
    if length > min(size - 8, _MAX_HEADER):
        raise Damaged("the file is cut short")
    body = start[8 : 8 + length]
    if len(body) < length:
        body += os.pread(descriptor, length - len(body), 8 + len(body))
    split = body.rfind(_METADATA)
    if split < 0:
        raise Damaged("its header cannot be read")
    try:
        layout = _parse_layout(body[:split])
        metadata = json.loads(body[split + len(_METADATA) :].rstrip(b" ")[:-1])
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise Damaged("its header cannot be read")
        checksum = _checksum(body[:split], metadata["sums"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged("its header cannot be read") from error
    end = layout[-1].end if layout else 0
    if size != 8 + length + end:
        raise Damaged("its length differs from its header's")
    return Header(layout, metadata, checksum, 8 + length)


@functools.lru_cache(maxsize=64)
def _parse_layout(raw: bytes) -> tuple[TensorLayout, ...]:
    entries = json.loads(raw.removesuffix(b",") + b"}")
    layout = []
    position = 0
    for name, entry in entries.items():
        dtype, shape = DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
        begin, end = entry["data_offsets"]
        if begin != position or min(shape, default=0) < 0 or end - begin != math.prod(shape) * np.dtype(dtype).itemsize:
            raise ValueError("offsets")
        layout.append(TensorLayout(name, dtype, shape, begin, end))
        position = end
    return tuple(layout)


def read_tensors(
    descriptor: int, header: Header, names: Collection[str] | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Read all tensors, or those named, and verify each against its sum. Raises Damaged, KeyError.

    Each byte is copied once, from the system into memory of our own: a mapped file could change after it was verified.
    """
    sums = header.metadata["sums"]
    if len(sums) != 16 * len(header.layout):
        raise Damaged("its checksums are incomplete")
    numbered = list(enumerate(header.layout))
    if names is not None:
        wanted = set(names)
        if missing := wanted - {tensor.name for tensor in header.layout}:
            raise KeyError(min(missing))
        numbered = [(i, tensor) for i, tensor in numbered if tensor.name in wanted]
    memory = np.empty(sum(tensor.end - tensor.begin for _, tensor in numbered), np.uint8)
    view = memory.data
    arrays: dict[str, npt.NDArray[Any]] = {}
    position = first = 0
    while first < len(numbered):
        begin = numbered[first][1].begin
        last, end = first, begin
        while last < len(numbered) and numbered[last][1].begin == end and (last == first or end - begin < _CHUNK):
            end = numbered[last][1].end
            last += 1
        _fill(descriptor, view[position : position + end - begin], header.payload_offset + begin)
        for i, tensor in numbered[first:last]:
            stop = position + tensor.end - tensor.begin
            piece = view[position:stop]
            if xxhash.xxh3_64_hexdigest(piece) != sums[16 * i : 16 * i + 16]:
                raise Damaged(f"tensor {tensor.name!r} does not match its checksum")
            arrays[tensor.name] = memory[position:stop].view(tensor.dtype).reshape(tensor.shape)
            position = stop
        first = last
    return arrays


def _fill(descriptor: int, target: memoryview, offset: int) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise Damaged("the file is cut short")
        done += count
