"""An append-only text copy of all that was said to and by an agent: one checked JSON line per fact.

It is written before the database commits, so that no saved transcript is lost with a damaged database, and it can be
read with a text editor. The database says how much of the file it knows. What lies beyond is of a commit that was
interrupted, or that the database lost with its log: when the agent is opened, what is whole of it is taken over, and
the rest is cut off.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from amem.store import files

TRANSCRIPT = "transcript.jsonl"

Row = Mapping[str, Any]


def line(row: Row) -> str:
    """A row as it stands in the file."""
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
    return f'{{"xxh3":"{_sum(text)}","row":{text}}}\n'


def _sum(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def append(folder: Path, rows: Iterable[Row], length: int) -> int:
    """Write rows after the first ``length`` bytes, durably; returns the file's new length in bytes."""
    data = "".join(line(row) for row in rows).encode()
    descriptor = os.open(folder / TRANSCRIPT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], length + done)
            os.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, length)
            raise
    finally:
        os.close(descriptor)
    return length + len(data)


def cut(folder: Path, length: int) -> bool:
    """Cut off what was never committed. False if the file is shorter than ``length``: it was damaged."""
    try:
        size = (folder / TRANSCRIPT).stat().st_size
    except FileNotFoundError:
        return length == 0
    if size > length:
        os.truncate(folder / TRANSCRIPT, length)
    return size >= length


def write_whole(folder: Path, rows: Iterable[Row]) -> int:
    """Replace the file; returns its length in bytes."""
    return files.write_durably(folder / TRANSCRIPT, (line(row).encode() for row in rows))


def read(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """All rows whose checksum holds, and the number of lines that could not be read."""
    rows: list[dict[str, Any]] = []
    bad = 0
    try:
        data = (folder / TRANSCRIPT).read_bytes()
    except FileNotFoundError:
        return rows, 0
    lines = data.split(b"\n")
    for raw in lines if lines[-1] else lines[:-1]:
        row = _row(raw)
        if row is None:
            bad += 1
        else:
            rows.append(row)
    return rows, bad


def beyond(folder: Path, length: int) -> tuple[list[dict[str, Any]], int]:
    """The rows of whole commits after the first ``length`` bytes, and the file's length with them and no more."""
    rows: list[dict[str, Any]] = []
    ends = [length]
    with contextlib.suppress(FileNotFoundError), (folder / TRANSCRIPT).open("rb") as file:
        file.seek(length)
        for raw in file:
            row = _row(raw[:-1]) if raw.endswith(b"\n") else None
            if row is None:
                break
            rows.append(row)
            ends.append(ends[-1] + len(raw))
    while rows and rows[-1].get("kind") == "turn":  # its tokens were to follow it
        rows.pop()
        ends.pop()
    return rows, ends[-1]


def _row(raw: bytes) -> dict[str, Any] | None:
    """The row of a line without its end; None if it is not what was written."""
    try:
        row: dict[str, Any] = json.loads(raw)["row"]
        return row if line(row).encode() == raw + b"\n" else None
    except (ValueError, KeyError, TypeError):
        return None
