"""What the engine reports: plain frozen data, every figure of it measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Match(StrEnum):
    """What a request found of its history in the agent's stored state."""

    #: all of it, computed before at this place. Its last token is computed again, and with it what comes after the last
    #: boundary of reuse: less than 64 tokens, which may be all of a short prompt
    EXACT = "EXACT"
    EXTEND = "EXTEND"  #: the whole stored history; the request goes on from its end
    DIVERGE = "DIVERGE"  #: a part; from there the request says something else
    COLD = "COLD"  #: nothing


class Residency(StrEnum):
    """Where an agent's K/V are."""

    HOT = "hot"  #: in memory
    WARM = "warm"  #: on disk
    COLD = "cold"  #: only the transcript is kept; to be computed again
    EMPTY = "empty"  #: the agent has no turn yet


class _Record:
    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain values that `json.dumps` takes."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]  # every subclass is a dataclass


@dataclass(frozen=True)
class BlockInfo(_Record):
    """One block of at most 256 tokens as a person sees it."""

    index: int
    start: int  #: position of its first token
    n_tokens: int
    kind: str  #: "sealed" (256 tokens, never changes), "tail" (whole groups) or "open" (exact, at most 64)
    residency: Residency
    shared: bool  #: another agent's state (a fork) uses it too
    new: bool  #: computed by the last turn
    nbytes: int  #: bytes that it takes in memory, or on disk if it is warm


@dataclass(frozen=True)
class LayerBlocks(_Record):
    """The blocks of one group of layers of the same kind and shape."""

    label: str  #: e.g. "layers 0-29, full attention, q4"
    n_layers: int
    blocks: tuple[BlockInfo, ...]


@dataclass(frozen=True)
class BlockMap(_Record):
    """All blocks of an agent's head, with the text that lies in each."""

    agent: str
    codec: str
    n_tokens: int
    layers: tuple[LayerBlocks, ...]
    texts: tuple[str, ...]  #: decoded text of each 256 token stretch


@dataclass(frozen=True)
class Why(_Record):
    """Why a request found what it found of its past."""

    cause: str  #: the likeliest one, a plain sentence
    remedy: str  #: what to do about it
    position: int | None = None  #: of the first token that differs from the stored branch; None if none does
    turn: int | None = None  #: the stored turn that it lies in
    before: str = ""  #: text of the last tokens that agree
    stored: str = ""  #: text from there on in the stored branch
    wanted: str = ""  #: text from there on in the request


@dataclass(frozen=True)
class ReplyMetrics(_Record):
    """What one request cost. Times are wall-clock milliseconds.

    ``ttft_ms`` runs from the request to its first token and is the sum of ``queue_ms``, ``match_ms``,
    ``restore_ms``, ``prefill_ms`` and ``first_decode_ms`` (the step for the last prompt token, which yields the
    first token). ``decode_ms`` covers the tokens after the first.
    """

    agent: str
    model: str
    codec: str
    match: Match
    residency: Residency  #: before the request
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int  #: prompt tokens that were run through the model
    generated_tokens: int
    ttft_ms: float
    queue_ms: float  #: waiting for its turn, for room in memory, and, once its bytes were read, for a step of others
    match_ms: float
    restore_ms: float
    prefill_ms: float
    first_decode_ms: float
    decode_ms: float
    commit_ms: float
    tokens_per_second: float  #: of decoding after the first token; 0 if there was none
    hot_bytes: int  #: the agent's K/V in memory, after the turn
    disk_bytes: int  #: the agent's files, after the turn
    bytes_written: int  #: by this turn
    saved: bool  #: False if the turn could not be written to disk
    blocks: tuple[BlockInfo, ...] = ()  #: of the first group of layers, after the turn
    notes: tuple[str, ...] = ()  #: plain sentences that a person should see
    #: what computing the reused tokens again would have cost, by this model's prefill rate as it was measured on this
    #: machine; None before it was
    recompute_ms: float | None = None
    saved_ms: float | None = None  #: ``recompute_ms`` without what the restore took
    why: Why | None = None  #: see `explain`

    def explain(self) -> str:
        """In plain lines: what was reused, why not more, where the request left a stored branch, and what to do."""
        of = f"{self.reused_tokens} of {self.prompt_tokens} prompt tokens were reused, {self.computed_tokens} computed"
        lines = [f"{self.match}: {of}."]
        if self.why is not None:
            lines.append(self.why.cause)
            if self.why.position is not None:
                place = f"at position {self.why.position}, in turn {self.why.turn}, after {self.why.before!r}"
                lines.append(f"The first token that differs is {place}:")
                lines += [f"  stored  {self.why.stored!r}", f"  wanted  {self.why.wanted!r}"]
            lines.append(f"What to do: {self.why.remedy}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Alternative(_Record):
    """A token that could have come, and how likely it was."""

    token_id: int
    text: str
    logprob: float  #: natural logarithm of its probability, before temperature and top_p


@dataclass(frozen=True)
class TokenLogprob(Alternative):
    """A token that was generated, and the likeliest ones at its place."""

    top: tuple[Alternative, ...] = ()  #: the likeliest first


@dataclass(frozen=True)
class Reply(_Record):
    """An agent's answer."""

    text: str
    #: as they were generated, an end-of-turn token included; where a stop string began inside a token, what that token
    #: said before it is in the tokenizer's tokens
    token_ids: tuple[int, ...]
    finish_reason: str  #: "stop" (end of turn or a stop string) or "length"
    metrics: ReplyMetrics
    turn: int  #: id of the turn that holds it
    stop: str | None = None  #: the stop string that ended it
    logprobs: tuple[TokenLogprob, ...] = ()  #: of its tokens without the end-of-turn token, if they were asked for

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Event(_Record):
    """One step of a streamed reply: a piece of text, progress, or the finished reply (last of all)."""

    text: str = ""
    stage: str = ""  #: what is going on ("queued", "restore" or "prefill"), or ""
    done: int = 0  #: tokens done in this stage
    total: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()  #: of the tokens since the last piece of text, if they were asked for
    reply: Reply | None = None


@dataclass(frozen=True)
class TurnInfo(_Record):
    """One turn of an agent's tree."""

    id: int
    parent: int | None
    prompt: str
    reply: str
    finish_reason: str
    created: float  #: seconds since the epoch
    cell_id: str | None
    on_head_path: bool
    n_tokens: int  #: tokens of the whole history at its end, 0 if it has no realization for this model


@dataclass(frozen=True)
class AgentStatus(_Record):
    """One agent as `engine.status()` shows it."""

    name: str
    space: str
    residency: Residency
    n_tokens: int
    n_turns: int  #: on the head's path
    hot_bytes: int
    disk_bytes: int
    last_ttft_ms: float | None  #: of this engine's last request to it
    pinned: bool
    saved: bool


@dataclass(frozen=True)
class InterToken(_Record):
    """Wall-clock times between one token of a reply and the next, over the last 4096."""

    n: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True)
class PrefetchStatus(_Record):
    """What became of restores that were begun because an agent usually follows another."""

    restored: int  #: restores begun
    hits: int  #: requests whose agent was in memory, or on its way, thanks to one
    misses: int  #: requests whose agent was on disk


@dataclass(frozen=True)
class EngineStatus(_Record):
    """The engine at one instant."""

    model: str
    model_path: str
    fingerprint: str
    codec: str
    attention: str  #: "reference" or "cpu"
    device: str
    blas: str  #: the BLAS library that MLX's CPU products really call, or "" where MLX does not use one
    context_length: int
    memory_budget: int
    hot_bytes: int
    peak_hot_bytes: int
    disk_quota: int
    disk_bytes: int
    bytes_written: int  #: to the store by this engine
    store: str
    space: str
    agents: tuple[AgentStatus, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    prefetch: PrefetchStatus | None = None  #: None if it is off
    inter_token: InterToken | None = None  #: None before a reply had two tokens
    prefill_tokens_per_second: float | None = None  #: of the first 256 tokens of a history, as measured lately
    codec_choice: str = ""  #: what was measured for it where the codec was left to "auto"

    def __iter__(self) -> Iterator[AgentStatus]:
        return iter(self.agents)
