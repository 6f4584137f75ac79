"""Hashes of whole histories: one for each group boundary, each made of the one before it and the group's ids.

And of the rows of a database, whose values change when a file rots without SQLite's notice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

from amem.store.fileformat import tokens_to_bytes
from amem.store.records import GROUP_TOKENS, Tokens

#: The history of no tokens.
EMPTY = bytes(16)


def chain(before: bytes, token_ids: Tokens) -> list[bytes]:
    """The hash at each group boundary of ``token_ids``, which follow a history whose hash is ``before``.

    Ids after the last boundary are left out. A hash only finds candidates: tokens are compared afterwards.
    """
    data = tokens_to_bytes(token_ids)
    step = 4 * GROUP_TOKENS
    hashes = []
    for offset in range(0, len(data) // step * step, step):
        before = xxhash.xxh3_128_digest(before + data[offset : offset + step])
        hashes.append(before)
    return hashes


def open_group(token_ids: Tokens) -> bytes:
    """The hash of an open group's ids."""
    return xxhash.xxh3_64_digest(tokens_to_bytes(token_ids))


def row_sum(values: Iterable[Any]) -> str:
    """Of a row's values, each with its type and length."""
    digest = xxhash.xxh3_64()
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode(errors="surrogatepass")
        digest.update(f"{type(value).__name__}{len(data)}:".encode() + data)
    return digest.hexdigest()
