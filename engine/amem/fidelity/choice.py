"""The codec that ``auto`` stands for: measured once for each model, on a short text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass

from amem.errors import InputError
from amem.fidelity.compare import compare
from amem.fidelity.replay import Replay, exact_layout
from amem.fidelity.texts import SHORT
from amem.kv.backend import REFERENCE, Backend
from amem.kv.codec import codec_for
from amem.kv.sequence import StateLayout
from amem.model.load import LoadedModel
from amem.model.spec import ModelCacheSpec, group_nbytes
from amem.run.remembered import recall, remember

CANDIDATES = ("q4", "q8", "fp16")  #: the smallest first
MOST_KL = 0.01  #: nats a token, on average: about what raises perplexity by one percent at most
_N_TOKENS = 256  #: the last three groups of them see quantized ones


@dataclass(frozen=True)
class Measured:
    """What a candidate cost on the short text."""

    codec: str
    kl_mean: float  #: nats
    top1_agreement: float
    n_predictions: int


@dataclass(frozen=True)
class CodecChoice:
    """What ``auto`` chose for a model, and what was measured for it: each candidate up to the one that was taken."""

    codec: str
    measured: tuple[Measured, ...]

    def __str__(self) -> str:
        said = [
            f"{one.codec} KL {one.kl_mean:.2g} nats, top-1 {one.top1_agreement:.1%} of {one.n_predictions} tokens"
            for one in self.measured
        ]
        return f"auto chose {self.codec} ({'; '.join(said)}; the bound is KL {MOST_KL:g})"


def choose_codec(
    loaded: LoadedModel,
    spec: ModelCacheSpec,
    progress: Callable[[str], None] | None = None,
    *,
    backend: Backend = REFERENCE,
) -> CodecChoice:
    """The smallest candidate whose KL from full precision stays within `MOST_KL` on a short text, else the last one.

    Takes two passes over 256 tokens where the first candidate is true enough. The choice is remembered by the model's
    fingerprint. A candidate that cannot pack the model's head dims is passed over.
    """
    if (known := recall("codec", loaded.fingerprint)) is not None:
        with contextlib.suppress(KeyError, TypeError):
            return CodecChoice(known["codec"], tuple(Measured(**one) for one in known["measured"]))
    if progress is not None:
        progress("Measuring which form of K and V is true enough for this model (once per model).")
    ids = loaded.tokenizer.encode(SHORT)[: min(_N_TOKENS, loaded.context_length)]
    possible = [codec for codec in CANDIDATES if _can_pack(codec, spec)]
    measured: list[Measured] = []
    for codec in possible:
        measured.append(_measure(loaded, spec, codec, ids, backend))
        if measured[-1].kl_mean <= MOST_KL:  # not so if it is no number
            break
    choice = CodecChoice(measured[-1].codec, tuple(measured))
    remember("codec", loaded.fingerprint, asdict(choice))
    return choice


def _can_pack(codec: str, spec: ModelCacheSpec) -> bool:
    try:
        for group in spec.groups:
            group_nbytes(codec, group, spec.dtype)
    except InputError:
        return False
    return True


def _measure(loaded: LoadedModel, spec: ModelCacheSpec, codec: str, ids: list[int], backend: Backend) -> Measured:
    exact = Replay.fresh(loaded.model, exact_layout(spec), backend=backend)
    stored = Replay.fresh(loaded.model, StateLayout(spec, codec_for(codec, spec)), backend=backend)
    found = compare(ids, exact, {codec: stored})[codec].summary()
    return Measured(codec, found.kl_mean, found.top1_agreement, found.n_predictions)
