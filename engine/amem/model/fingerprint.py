"""What tells one model from another: stored attention state is valid for one fingerprint only."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import xxhash

FORMAT_VERSION = 1  #: of what is hashed here, and of the K/V that the engine computes from it

_WHOLE = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.jsonl")  # config, tokenizer, chat template
_HEADER_LENGTH = struct.Struct("<Q")
_SAMPLE_NBYTES = 4096


def fingerprint(folder: Path, *, dtype: str) -> str:
    """Fingerprint of the model in ``folder`` when it computes in ``dtype``, as 32 hex digits (xxh3_128).

    Covers the configuration, tokenizer and chat template whole; of each weight file the size, the safetensors header
    (names, shapes, dtypes) and 4 kB from the beginning, the middle and the end of every tensor, so that a model of any
    size takes milliseconds. The folder's own place and name do not matter.
    """
    digest = xxhash.xxh3_128()
    _add(digest, f"amem model {FORMAT_VERSION} {dtype}".encode())
    for file in sorted({file for pattern in _WHOLE for file in folder.glob(pattern)}):
        _add(digest, file.name.encode())
        _add(digest, file.read_bytes())
    for file in sorted(folder.glob("model*.safetensors")):
        _add(digest, file.name.encode())
        _add_weights(digest, file)
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_128, part: bytes) -> None:
    """Add a part with its length, so that no two lists of parts look alike."""
    digest.update(_HEADER_LENGTH.pack(len(part)))
    digest.update(part)


def _add_weights(digest: xxhash.xxh3_128, file: Path) -> None:
    nbytes = file.stat().st_size
    _add(digest, str(nbytes).encode())
    with file.open("rb") as stream:
        length = stream.read(_HEADER_LENGTH.size).ljust(_HEADER_LENGTH.size, b"\0")
        header = stream.read(min(_HEADER_LENGTH.unpack(length)[0], nbytes))
        _add(digest, header)
        body = _HEADER_LENGTH.size + len(header)
        for start, end in _spans(header, nbytes - body):
            last = max(start, end - _SAMPLE_NBYTES)
            for offset in sorted({start, (start + last) // 2, last}):
                stream.seek(body + offset)
                _add(digest, stream.read(min(_SAMPLE_NBYTES, end - offset)))


def _spans(header: bytes, nbytes: int) -> list[tuple[int, int]]:
    """Where each tensor begins and ends in the body; of a header that cannot be read, the body as a whole.

    A damaged file has a fingerprint too: that it cannot be read is found when it is loaded.
    """
    try:
        spans = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        return sorted((int(start), int(end)) for start, end in spans)
    except (ValueError, TypeError, KeyError, AttributeError):
        return [(0, max(nbytes, 0))]
