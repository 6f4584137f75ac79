"""What a block's and a snapshot's file says of itself: its record, as the text metadata of a safetensors file."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from amem.errors import InputError
from amem.store import payload
from amem.store.payload import DamagedError, Encoded, Header
from amem.store.records import BLOCK_TOKENS, GROUP_TOKENS, BlockRecord, Realm, SnapshotRecord, Tensors, Tokens

#: Version of everything that the store writes. A store of a newer one is refused.
FORMAT = 1

Record = BlockRecord | SnapshotRecord


def as_tokens(token_ids: npt.ArrayLike) -> Tokens:
    """Token ids as a one-dimensional int32 array of its own. Raises InputError for anything else."""
    array = np.asarray(token_ids)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError("token ids must be a flat list of integers")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise InputError("token ids must be from 0 to 2**31 - 1")
    return array.astype(np.int32)


def tokens_to_bytes(token_ids: Tokens) -> bytes:
    """Little-endian int32."""
    return token_ids.astype("<i4", copy=False).tobytes()


def tokens_from_bytes(data: bytes) -> Tokens:
    """The inverse of tokens_to_bytes; the array is read-only."""
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)


def tokens_to_text(token_ids: Tokens) -> str:
    """Base64 of the little-endian int32 ids."""
    return base64.b64encode(tokens_to_bytes(token_ids)).decode()


def tokens_from_text(text: str) -> Tokens:
    """The inverse of tokens_to_text. Raises ValueError."""
    return tokens_from_bytes(base64.b64decode(text, validate=True))


def metadata_of(record: Record) -> dict[str, str]:
    """What the record's file must say, but for its checksums."""
    realm = record.realm
    common = {"amem": str(FORMAT), "id": record.id, "fingerprint": realm.fingerprint, "codec": realm.codec}
    if isinstance(record, SnapshotRecord):
        return common | {"kind": "snapshot", "position": str(record.position), "n_open": str(record.n_open)}
    return common | {
        "kind": "block",
        "parent": record.parent or "",
        "start": str(record.start),
        "token_ids": tokens_to_text(record.token_ids),
    }


def encode(record: Record, tensors: Tensors) -> Encoded:
    """A record's file, with the checksum that the record is to have. Raises InputError."""
    return payload.encode(metadata_of(record), tensors)


def read(path: Path, record: Record, names: Collection[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a record's file. Raises DamagedError if it is not the file that was written, KeyError, OSError."""
    with _opened(path, record) as (descriptor, header):
        return payload.read_tensors(descriptor, header, names)


def read_into(path: Path, record: Record, targets: Tensors) -> None:
    """Read tensors of a record's file into given arrays. See payload.read_into; raises as `read` does."""
    with _opened(path, record) as (descriptor, header):
        payload.read_into(descriptor, header, targets)


@contextlib.contextmanager
def _opened(path: Path, record: Record) -> Iterator[tuple[int, Header]]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = payload.read_header(descriptor)
        said = dict(header.metadata)
        said.pop("sums", None)
        if said.pop("checksum", None) != header.checksum:
            raise DamagedError("its header does not match its checksum")
        if said != metadata_of(record):
            raise DamagedError("it describes another block than the database does")
        if header.checksum != record.checksum or os.fstat(descriptor).st_size != record.nbytes:
            raise DamagedError("its checksum is not the one in the database")
        yield descriptor, header
    finally:
        os.close(descriptor)


def read_record(path: Path) -> Record:
    """The record that a file's own metadata describes. Raises DamagedError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = payload.read_header(descriptor)
        nbytes = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    said = header.metadata
    try:
        if said["checksum"] != header.checksum:
            raise DamagedError("its header does not match its checksum")
        realm = Realm(said["fingerprint"], said["codec"])
        record: Record
        if said["kind"] == "snapshot":
            position, n_open = int(said["position"]), int(said["n_open"])
            record = SnapshotRecord(said["id"], realm, position, n_open, header.checksum, nbytes)
        else:
            token_ids = tokens_from_text(said["token_ids"])
            parent, start = said["parent"] or None, int(said["start"])
            record = BlockRecord(said["id"], parent, realm, start, token_ids, header.checksum, nbytes)
            if not valid_span(record.start, len(token_ids)):
                raise DamagedError("it describes no block")
        if {**metadata_of(record), "checksum": header.checksum, "sums": said["sums"]} != said or record.id != path.stem:
            raise DamagedError("it describes another block than its name does")
    except (KeyError, ValueError, binascii.Error) as error:
        raise DamagedError("its metadata cannot be read") from error
    return record


def valid_span(start: int, n_tokens: int) -> bool:
    """Whether a block may start there and have so many tokens."""
    whole_groups = n_tokens % GROUP_TOKENS == 0 and GROUP_TOKENS <= n_tokens <= BLOCK_TOKENS
    return start >= 0 and start % BLOCK_TOKENS == 0 and whole_groups
