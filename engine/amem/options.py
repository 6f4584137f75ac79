"""What can be chosen for a request, by name: said once for all that take such options and pass them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Seed = int | Literal["random"] | None


class Sampling(TypedDict, total=False):
    """How to generate. `Agent.ask` explains each."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: Seed
    stop: Sequence[str]


class AskOptions(Sampling, total=False):
    """For a message to an agent. `Agent.ask` explains each."""

    system: str | None
    append: bool
    cached: bool
    cell_id: str | None
    execution: str | None


class TextOptions(Sampling, total=False):
    """For a text that is to be continued as it stands."""

    logprobs: int | None


class ChatOptions(TextOptions, total=False):
    """For a whole conversation. `Agent.chat` explains each."""

    tools: Sequence[Mapping[str, Any]] | None
