"""What is measured of fidelity, as plain data. No MLX in here."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from amem.sizes import format_size


@dataclass(frozen=True)
class Fidelity:
    """How true stored state is to full precision, over some predictions."""

    n_predictions: int
    kl_mean: float  #: nats
    kl_p99: float
    nll: float  #: nats a token
    nll_exact: float
    top1_agreement: float  #: part of the predictions whose likeliest token is the same

    @property
    def perplexity_change(self) -> float:
        """0.01 is one percent more than at full precision."""
        return math.expm1(self.nll - self.nll_exact)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain values that `json.dumps` takes."""
        return asdict(self) | {"perplexity_change": self.perplexity_change}


@dataclass(frozen=True)
class ReplayCost:
    """What a receipt takes, told before it is made."""

    agent: str
    n_history: int  #: tokens that are computed again at full precision
    n_sampled: int  #: tokens after them, which are read twice: over the stored state and over the exact one
    nbytes: int  #: of the memory budget
    seconds: float | None  #: by the prefill rate that was measured here; None before one was

    def __str__(self) -> str:
        took = "time that was not measured here yet" if self.seconds is None else f"about {self.seconds:.0f} s"
        return (
            f"{self.agent}: computes {self.n_history} tokens again at full precision and reads the {self.n_sampled} "
            f"after them twice; takes {took} and {format_size(self.nbytes)} of K/V memory"
        )


@dataclass(frozen=True)
class Receipt:
    """How true an agent's stored state is to full precision, on a sample of its own last tokens."""

    agent: str
    codec: str
    n_history: int  #: tokens whose stored state was tested
    n_sampled: int  #: tokens after them that were fed to both
    fidelity: Fidelity
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain values that `json.dumps` takes."""
        return asdict(self) | {"fidelity": self.fidelity.to_dict()}
