"""The plain data that the store takes and gives. It knows token ids and named numpy buffers, no model and no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Tensors = Mapping[str, npt.NDArray[Any]]

BLOCK_TOKENS = 256
GROUP_TOKENS = 64


@dataclass(frozen=True)
class Realm:
    """What stored K/V are valid for: one model, one codec. State of another realm never matches."""

    fingerprint: str
    codec: str


@dataclass(frozen=True)
class BlockRecord:
    """A block of whole groups: sealed if it has 256 tokens, else the quantized tail of a turn."""

    id: str  #: random, 32 hex digits; also its file's stem
    parent: str | None  #: the sealed block before it
    realm: Realm
    start: int  #: position of its first token, a multiple of 256
    token_ids: Tokens
    checksum: str  #: of the payload (xxh3_128, hex)
    nbytes: int  #: of its file

    @property
    def sealed(self) -> bool:
        """Whether it is full, and so never changes again."""
        return len(self.token_ids) == BLOCK_TOKENS


@dataclass(frozen=True)
class SnapshotRecord:
    """The exact open group (and recurrent state) at a turn's end."""

    id: str
    realm: Realm
    position: int  #: tokens of the whole history at the turn's end
    n_open: int  #: tokens in the open group, position % 64
    checksum: str
    nbytes: int


@dataclass(frozen=True)
class TurnRecord:
    """A turn as text."""

    id: int
    parent: int | None
    prompt: str
    reply: str
    system: str | None  #: only on a root turn
    settings: Mapping[str, Any]
    finish_reason: str
    cell_id: str | None
    execution: str | None  #: which execution of the cell made it
    created: float


@dataclass(frozen=True)
class NewTurn:
    """A turn about to be committed."""

    parent: int | None
    prompt: str
    reply: str
    finish_reason: str
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    cell_id: str | None = None
    execution: str | None = None


@dataclass(frozen=True)
class Realization:
    """A turn as tokens and blocks, for one realm."""

    turn: int
    realm: Realm
    token_ids: Tokens  #: of this turn alone: its rendered delta and its reply
    n_tokens: int  #: of the whole history at its end
    last_block: str | None  #: the last sealed block of its path
    tail: str | None  #: a block of 1 to 3 groups after it
    snapshot: str | None


@dataclass(frozen=True)
class Found:
    """The longest stored prefix of a token list.

    ``blocks`` cover positions 0.. in order; of the last one only the first ``n_block_tokens - start`` tokens are used.
    With a ``snapshot`` its open group follows, so that ``n_tokens == n_block_tokens + snapshot.n_open``.
    """

    blocks: tuple[BlockRecord, ...] = ()
    n_block_tokens: int = 0  #: a multiple of 64
    snapshot: SnapshotRecord | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens found in all."""
        return self.n_block_tokens + (self.snapshot.n_open if self.snapshot else 0)


@dataclass(frozen=True)
class AgentEntry:
    """An agent in a list. It can be read while another process has the agent open."""

    key: str
    name: str
    space: str
    last_used: float  #: seconds since the epoch, by the clock of then
    nbytes: int  #: of all its files; what forks share is counted for each of them
    n_turns: int


@dataclass(frozen=True)
class Written:
    """Bytes that one Store object has written."""

    payload: int  #: block and snapshot files, exact
    database: int  #: of agents: the log, exact, and its checkpoints, at most. The index's few pages are not counted.
    transcript: int  #: exact

    @property
    def total(self) -> int:
        """All bytes written."""
        return self.payload + self.database + self.transcript


@dataclass(frozen=True)
class Deleted:
    """What deleting an agent did."""

    nbytes: int  #: of its files
    n_shared: int  #: block files that live on, because an agent forked from it (or it was forked from) has them too
