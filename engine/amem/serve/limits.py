"""What one server takes on at most."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from amem.errors import InputError


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Raises
    ------
    InputError
        One of them is not above zero.
    """

    body_bytes: int = 4_000_000  #: of a request
    connections: int = 256  #: that are open at once; the next one is told to come back
    head_s: float = 20.0  #: that a request's first lines may take; who sends less is cut off
    stall_s: float = 60.0  #: that a client may leave its reply unread before it counts as gone
    requests: int = 64  #: that run or wait; the next one is told to come back
    timeout_s: float = 600.0  #: of a request, from its arrival to its last token
    grace_s: float = 30.0  #: that running requests get at a shutdown
    idle_s: float = 24 * 3600.0  #: after which a session without a name is deleted
    sessions: int = 256  #: sessions without a name of one key; the least recently used one is deleted for the next
    open_sessions: int = 64  #: of these, how many hold files and memory; and as many agents with a name, of all keys
    max_tokens: int = 512  #: of a reply, where a request says nothing

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise InputError(f"{field.name} must be above zero, not {value!r}.")
