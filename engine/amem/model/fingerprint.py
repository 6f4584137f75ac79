"""What tells one model from another: stored attention state is valid for one fingerprint only."""

from __future__ import annotations

import struct
from pathlib import Path

import xxhash

FORMAT_VERSION = 1  #: of what is hashed here, and of the K/V that the engine computes from it

_WHOLE = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.jsonl")  # config, tokenizer, chat template
_HEADER_LENGTH = struct.Struct("<Q")
_SAMPLE_NBYTES = 64 * 1024
_N_SAMPLES = 32


def fingerprint(folder: Path, *, dtype: str) -> str:
    """Fingerprint of the model in ``folder`` when it computes in ``dtype``, as 32 hex digits (xxh3_128).

    Covers the configuration, tokenizer and chat template whole; of each weight file the size, the safetensors header
    (names, shapes, dtypes) and 32 evenly spaced samples of 64 kB, so that a model of any size takes milliseconds.
    The folder's own place and name do not matter.
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
        length = stream.read(_HEADER_LENGTH.size)
        start = _HEADER_LENGTH.size
        if len(length) == _HEADER_LENGTH.size:
            header = stream.read(min(_HEADER_LENGTH.unpack(length)[0], nbytes))
            _add(digest, header)
            start += len(header)
        body = nbytes - start
        step = max(_SAMPLE_NBYTES, (body - _SAMPLE_NBYTES) // max(1, _N_SAMPLES - 1))
        for offset in range(0, max(body, 0), step):
            stream.seek(start + offset)
            _add(digest, stream.read(_SAMPLE_NBYTES))
