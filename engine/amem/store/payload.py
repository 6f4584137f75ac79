"""Named numpy buffers as one safetensors file whose every bit is covered by checksums, and back.

The header is the layout (names, dtypes, shapes, offsets) followed by ``__metadata__``. Consecutive tensors of at least
256 KiB together form a *span*, and each span has an xxh3_64 in the metadata's ``sums``; the file's checksum is the
xxh3_128 of layout and sums. So a part of the tensors can be read and verified alone, a span is hashed while it is still
in the processor's cache, and equal layouts are parsed once.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
_SPAN = 1 << 18  # bytes; part of the format
_BATCH = 1 << 20  # bytes that are read at once and summed before they leave the processor's cache
_MOST_PIECES = 512  # of one call; systems allow 1024


class DamagedError(Exception):
    """A file that is not what was written; its text is the reason, for an error message."""


@dataclass(frozen=True)
class Encoded:
    """A file about to be written."""

    header: bytes
    buffers: tuple[memoryview, ...]
    checksum: str
    nbytes: int


@dataclass(frozen=True)
class Tensor:
    """One tensor's place in a file."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int  #: bytes from the start of the payload
    nbytes: int


@dataclass(frozen=True)
class Span:
    """Consecutive tensors that have one sum."""

    tensors: tuple[Tensor, ...]
    begin: int  #: bytes from the start of the payload
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    spans: tuple[Span, ...]
    metadata: dict[str, str]
    checksum: str  #: as computed from layout and sums
    payload_offset: int  #: bytes from the start of the file


def encode(metadata: Mapping[str, str], tensors: Tensors) -> Encoded:
    """Lay tensors out in the order given. No bytes are copied for C-contiguous little-endian arrays."""
    entries, buffers = [], []
    sizes: list[int] = []
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
        sizes.append(flat.nbytes)
        position += flat.nbytes
    layout = ("{" + "".join(entries)).encode()
    sums = "".join(_sum(buffers[first:last]) for first, last in _span_ranges(sizes))
    checksum = _checksum(layout, sums)
    full = dict(metadata) | {"checksum": checksum, "sums": sums}
    body = layout + _METADATA + _compact(full).encode() + b"}"
    body += b" " * (-(8 + len(body)) % _ALIGNMENT)
    header = struct.pack("<Q", len(body)) + body
    return Encoded(header, tuple(buffers), checksum, len(header) + position)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _checksum(layout: bytes, sums: str) -> str:
    return xxhash.xxh3_128_hexdigest(layout + sums.encode())


def _sum(buffers: Iterable[memoryview]) -> str:
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def _span_ranges(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) tensor of each span, for tensors of these bytes."""
    first = nbytes = 0
    for number, size in enumerate(sizes):
        nbytes += size
        if nbytes >= _SPAN:
            yield first, number + 1
            first, nbytes = number + 1, 0
    if first < len(sizes):
        yield first, len(sizes)


def read_header(descriptor: int) -> Header:
    """Read and check a file's header, and that the file is as long as it says. Raises DamagedError."""
    size = os.fstat(descriptor).st_size
    start = os.pread(descriptor, 1 << 16, 0)
    if len(start) < 8:
        raise DamagedError("the file is cut short")
    (length,) = struct.unpack("<Q", start[:8])
    if length > min(size - 8, _MAX_HEADER):
        raise DamagedError("the file is cut short")
    body = start[8 : 8 + length]
    if len(body) < length:
        body += os.pread(descriptor, length - len(body), 8 + len(body))
    split = body.rfind(_METADATA)
    if split < 0:
        raise DamagedError("its header cannot be read")
    try:
        spans = _parse_layout(body[:split])
        metadata = json.loads(b"{" + body[split:])["__metadata__"]
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise DamagedError("its header cannot be read")
        checksum = _checksum(body[:split], metadata["sums"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError("its header cannot be read") from error
    if size != 8 + length + sum(span.nbytes for span in spans):
        raise DamagedError("its length differs from its header's")
    return Header(spans, metadata, checksum, 8 + length)


@functools.lru_cache(maxsize=64)
def _parse_layout(raw: bytes) -> tuple[Span, ...]:
    entries = json.loads(raw.removesuffix(b",") + b"}")
    tensors = []
    position = 0
    for name, entry in entries.items():
        dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(int(n) for n in entry["shape"])
        begin, end = entry["data_offsets"]
        if begin != position or min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError("offsets")
        tensors.append(Tensor(name, dtype, shape, begin, end - begin))
        position = end
    return tuple(
        Span(tuple(tensors[first:last]), tensors[first].begin, sum(tensor.nbytes for tensor in tensors[first:last]))
        for first, last in _span_ranges([tensor.nbytes for tensor in tensors])
    )


def read_tensors(descriptor: int, header: Header, names: Collection[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """Read all tensors, or those named, and verify each span that is read. Raises DamagedError, KeyError."""
    known = {tensor.name: tensor for span in header.spans for tensor in span.tensors}
    chosen = known if names is None else {name: known[name] for name in names}
    arrays = {name: np.empty(tensor.shape, tensor.dtype) for name, tensor in chosen.items()}
    read_into(descriptor, header, arrays)
    return arrays


def read_into(descriptor: int, header: Header, targets: Tensors) -> None:
    """Read the tensors that ``targets`` names straight into its arrays, and verify each span that is read.

    An array may be a part of a larger one, as long as its last axes lie close together. Each byte is copied once, from
    the system into memory of our own: a mapped file could change after it was verified. After an error the arrays hold
    anything. Raises DamagedError, also for a tensor of another shape or dtype; KeyError.
    """
    sums = header.metadata["sums"]
    if len(sums) != 16 * len(header.spans):
        raise DamagedError("its checksums are incomplete")
    wanted = set(targets)
    for i, span in enumerate(header.spans):
        names = {tensor.name for tensor in span.tensors}
        if not wanted.isdisjoint(names):
            wanted -= names
            pieces = (piece for tensor in span.tensors for piece in _pieces(tensor, targets.get(tensor.name)))
            if _read_and_sum(descriptor, pieces, header.payload_offset + span.begin) != sums[16 * i : 16 * i + 16]:
                raise DamagedError(f"tensors from {span.tensors[0].name!r} on do not match their checksum")
    if wanted:
        raise KeyError(min(wanted))


def _pieces(tensor: Tensor, target: npt.NDArray[Any] | None) -> Iterator[Any]:
    """Where a tensor's bytes go, in order: contiguous arrays. Without a target they are only verified."""
    if target is None:
        return iter((bytearray(tensor.nbytes),))
    if target.shape != tensor.shape or target.dtype != tensor.dtype:
        shape = list(target.shape)
        raise DamagedError(
            f"tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, not {target.dtype} {shape} as wanted"
        )
    return _contiguous(target)


def _contiguous(target: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    if target.flags.c_contiguous:
        yield target
    else:
        for part in target:
            yield from _contiguous(part)


def _read_and_sum(descriptor: int, pieces: Iterable[Any], offset: int) -> str:
    digest = xxhash.xxh3_64()
    for batch, nbytes in _batches(pieces):
        if os.preadv(descriptor, batch, offset) != nbytes:
            _fill(descriptor, batch, offset)
        for piece in batch:
            digest.update(piece)
        offset += nbytes
    return digest.hexdigest()


def _batches(pieces: Iterable[Any]) -> Iterator[tuple[list[Any], int]]:
    """Pieces for one call of the system: few, and together little more than stays in the processor's cache."""
    batch: list[Any] = []
    nbytes = 0
    for whole in pieces:
        view = memoryview(whole)
        for piece in (view,) if view.nbytes <= _BATCH else _cut(view.cast("B")):
            batch.append(piece)
            nbytes += piece.nbytes
            if nbytes >= _BATCH or len(batch) == _MOST_PIECES:
                yield batch, nbytes
                batch, nbytes = [], 0
    if batch:
        yield batch, nbytes


def _cut(view: memoryview) -> Iterator[memoryview]:
    return (view[start : start + _BATCH] for start in range(0, len(view), _BATCH))


def _fill(descriptor: int, pieces: Iterable[memoryview], offset: int) -> None:
    """Read again, piece by piece, what the system did not give in one go."""
    for whole in pieces:
        piece, done = whole.cast("B"), 0
        while done < len(piece):
            count = os.preadv(descriptor, [piece[done:]], offset + done)
            if count == 0:
                raise DamagedError("the file is cut short")
            done += count
        offset += len(piece)
