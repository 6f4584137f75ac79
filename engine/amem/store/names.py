"""Names of agents: which are valid, and the small file that keeps one beside the agent's database.

A name never becomes part of a path: the folder is a random key, and ``name.json`` in it says whose it is.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from amem.errors import InputError, StoreTooNew
from amem.store import files
from amem.store.fileformat import FORMAT

LABEL = "name.json"
MAX_NAME = 128
MAX_SPACE = 4096


@dataclass(frozen=True)
class Label:
    """An agent's name and the space that it belongs to."""

    name: str
    space: str

    @property
    def digest(self) -> str:
        """Stands for name and space where no text may be kept."""
        return _digest(f"{self.space}\0{self.name}")


def space_key(space: str) -> str:
    """Stands for a space where no text may be kept."""
    return _digest(space)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def canonical(text: str) -> str:
    """One form for texts that look the same: an é may be typed as one character, or as an e and an accent (NFC)."""
    return unicodedata.normalize("NFC", text)


def label(name: str, space: str) -> Label:
    """A checked name in a space, in its canonical form.

    Raises InputError: names have 1 to 128 characters, some of them visible, on one line, and no control codes.
    """
    if not isinstance(name, str) or not name:
        raise InputError("an agent needs a name of 1 to 128 characters")
    if len(name) > MAX_NAME:
        raise InputError(f"an agent's name has at most {MAX_NAME} characters; this one has {len(name)}")
    if len(space) > MAX_SPACE:
        raise InputError(f"a space's name has at most {MAX_SPACE} characters; this one has {len(space)}")
    for text, what in ((name, "an agent's name"), (space, "a space's name")):
        for character in text:
            if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
                raise InputError(f"{what} cannot contain {character!r}; use one line without control characters")
    if all(unicodedata.category(character) in ("Zs", "Cf") for character in name):
        raise InputError(f"an agent's name needs a character that can be seen; {name!r} has none")
    return Label(canonical(name), canonical(space))


def write_label(folder: Path, which: Label) -> int:
    """Write the label into an agent's folder; returns its bytes."""
    said = {"format": FORMAT, "name": which.name, "space": which.space}
    text = json.dumps(said | {"xxh3": _sum(said)}, ensure_ascii=False)
    return files.write_durably(folder / LABEL, [text.encode()])


def _sum(said: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(said, sort_keys=True).encode())


def read_label(folder: Path) -> Label | None:
    """The label of an agent's folder; None if there is none or it is damaged. Raises StoreTooNew."""
    try:
        said = json.loads((folder / LABEL).read_bytes())
        if said.pop("xxh3") != _sum(said):
            return None
        version, found = int(said["format"]), Label(canonical(said["name"]), canonical(said["space"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    check_format(version, folder)
    return found


def check_format(version: int, place: Path) -> None:
    """Raises StoreTooNew for what a newer version wrote."""
    if version > FORMAT:
        raise StoreTooNew(f"{place} has format {version}, this version of amem reads up to {FORMAT}; upgrade amem")
