"""How far apart two forms of one state are, token by token: teacher-forced, and in greedy decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from amem.errors import InputError
from amem.fidelity.figures import Fidelity
from amem.fidelity.replay import CHUNK, Fed, Logits

Floats = npt.NDArray[np.float64]

_ROWS = 16


@dataclass(frozen=True)
class Apart:
    """What stored state does to each prediction of a text, beside full precision. All arrays are ``[n]``."""

    kl: Floats  #: KL(full precision, stored) in nats
    nll: Floats  #: negative log-likelihood of the text's next token, in nats
    nll_exact: Floats  #: the same at full precision
    same_top: npt.NDArray[np.bool_]  #: the likeliest token is the same

    def __getitem__(self, part: slice) -> Apart:
        return Apart(self.kl[part], self.nll[part], self.nll_exact[part], self.same_top[part])

    def __len__(self) -> int:
        return len(self.kl)

    def summary(self) -> Fidelity:
        """Means over all predictions.

        Raises
        ------
            InputError: there is no prediction.
        """
        if not len(self):
            raise InputError("a text of at least two tokens is needed to compare predictions.")
        return Fidelity(
            n_predictions=len(self),
            kl_mean=float(self.kl.mean()),
            kl_p99=float(np.quantile(self.kl, 0.99)),
            nll=float(self.nll.mean()),
            nll_exact=float(self.nll_exact.mean()),
            top1_agreement=float(self.same_top.mean()),
        )


def joined(parts: Sequence[Apart]) -> Apart:
    """All predictions of several stretches."""
    names = ("kl", "nll", "nll_exact", "same_top")
    return Apart(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def compare(token_ids: Sequence[int], exact: Fed, others: Mapping[str, Fed]) -> dict[str, Apart]:
    """Feed one text to all, and compare each with ``exact``. Gives ``len(token_ids) - 1`` predictions for each.

    The last token is not fed: nothing is known to follow it.
    """
    parts: dict[str, list[Apart]] = {name: [] for name in others}
    for name, part in steps(token_ids, exact, others):
        parts[name].append(part)
    return {name: joined(found) for name, found in parts.items()}


def steps(
    token_ids: Sequence[int], exact: Fed, others: Mapping[str, Fed], chunk: int = CHUNK
) -> Iterator[tuple[str, Apart]]:
    """Like `compare`, step by step: at most ``chunk`` tokens are fed to one of the others, and before to ``exact``."""
    for at in range(0, len(token_ids) - 1, chunk):
        fed, following = token_ids[at : at + chunk], np.asarray(token_ids[at + 1 : at + 1 + chunk])
        fed = fed[: len(following)]
        truth = exact.feed(fed)  # [L, V]
        for name, other in others.items():
            yield name, _apart(truth, other.feed(fed), following)


def _apart(exact: Logits, other: Logits, following: npt.NDArray[np.int_]) -> Apart:
    """By few rows at a time: in double precision those of a large vocabulary take much memory."""
    parts = [slice(at, at + _ROWS) for at in range(0, len(following), _ROWS)]
    return joined([_apart_rows(exact[part], other[part], following[part]) for part in parts])


def _apart_rows(exact: Logits, other: Logits, following: npt.NDArray[np.int_]) -> Apart:
    p, q = _log_softmax(exact), _log_softmax(other)
    rows = np.arange(len(following))
    same = exact.argmax(axis=-1) == other.argmax(axis=-1)
    return Apart((np.exp(p) * (p - q)).sum(axis=-1), -q[rows, following], -p[rows, following], same)


def _log_softmax(logits: Logits) -> Floats:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def greedy_divergence(last_id: int, exact: Fed, others: Mapping[str, Fed], n_tokens: int) -> dict[str, int]:
    """After how many greedy tokens each would first say something else than ``exact``; ``n_tokens`` if it would not.

    All have been fed the same text but its last token. Only ``exact`` decodes: until the first difference the others
    would have said the same, so the same tokens can be fed to them at once.
    """
    said: list[int] = []
    for _ in range(n_tokens):
        said.append(int(exact.feed([said[-1] if said else last_id])[0].argmax()))
    fed = [last_id, *said[:-1]]
    found = {}
    for name, other in others.items():
        different = np.flatnonzero(other.feed(fed).argmax(axis=-1) != said)
        found[name] = int(different[0]) if len(different) else n_tokens
    return found
