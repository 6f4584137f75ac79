"""API keys: who a request is from. One key is one trust domain, and nothing crosses domains."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from typing import Self

from amem.errors import InputError

OWNER = ""  #: the domain of the engine's own space: what cells and the command line use
SESSIONS = "http"  #: the last part of the space of a domain's sessions without a name, which no domain may be called
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


class Keys:
    """Keys by the name of their domain; without any key every request is the owner's.

    Raises
    ------
    InputError
        A key is empty or not plain ASCII, a name is not possible or taken, or two domains have the same key.
    """

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        self._digests: dict[str, bytes] = {}
        for name, key in (keys or {}).items():
            if name != OWNER and not _NAME.fullmatch(name):
                raise InputError(f"a key's name has 1 to 32 letters, digits, - or _; {name!r} has not.")
            if name == SESSIONS:
                raise InputError(f"a key cannot be called {name!r}: that is where sessions without a name are kept.")
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InputError("an API key is a text of printable ASCII characters without spaces.")
            self._digests[name] = _digest(key)
        if len(set(self._digests.values())) < len(self._digests):
            raise InputError("two domains have the same API key: give each its own.")

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Keys as a command line gives them: ``KEY`` for the owner's, ``NAME:KEY`` for others.

        Raises
        ------
        InputError
            Two keys of one name, or as above.
        """
        keys: dict[str, str] = {}
        for text in texts:
            name, found, key = text.partition(":")
            name, key = (name, key) if found else (OWNER, text)
            if name in keys:
                whose = f"the name {name!r}" if name else "no name"
                raise InputError(f"two API keys have {whose}: write NAME:KEY, with a name for each.")
            keys[name] = key
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def domains(self) -> tuple[str, ...]:
        """The names of all domains."""
        return tuple(self._digests) or (OWNER,)

    def domain_of(self, sent: str | None) -> str | None:
        """The domain of a key that came with a request; None if there is no such key.

        The time that this takes tells nothing of the keys: digests are compared, all of them, each in constant time.
        """
        if not self._digests:
            return OWNER
        digest, found = _digest(sent or ""), None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
