"""How the next token is chosen from the logits: greedy, or sampled with a request's own random key."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from amem.errors import InputError
from amem.results import Alternative, TokenLogprob

if TYPE_CHECKING:
    import mlx.core as mx

_MAX_SEED = 2**63 - 1  # so that it fits a signed column of a database

#: Here a difference of logits in their last place is worth ten in the exponent; far below, dividing would overflow.
_GREEDY_BELOW = 1e-7


class Sampler:
    """Chooses one sequence's tokens, independent of every other request's.

    Parameters
    ----------
    temperature
        0 (or below 1e-7) takes the most likely token; otherwise logits are divided by it first.
    top_p
        Sample from the smallest set of most likely tokens whose probabilities sum to at least this (nucleus sampling,
        Holtzman et al. 2020, section 3.1). Applied after the temperature.
    seed
        The same seed and logits give the same tokens.

    Raises
    ------
    InputError
        A value out of range.
    """

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise InputError(f"temperature must be 0 or more, not {temperature}.")
        if not 0 < top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, not {top_p}.")
        if not 0 <= seed <= _MAX_SEED:
            raise InputError(f"seed must be a whole number from 0 to {_MAX_SEED}, not {seed}.")
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed
        self._key: mx.array | None = None

    def __call__(self, logits: mx.array) -> mx.array:
        """The next token, a lazy scalar (uint32), from logits of shape [V]; the next call draws anew."""
        import mlx.core as mx

        if self.temperature < _GREEDY_BELOW:
            return mx.argmax(logits)
        if self._key is None:  # made on the thread that samples
            self._key = mx.random.key(self.seed)
        self._key, key = mx.random.split(self._key)
        scaled = logits.astype(mx.float32) * (1 / self.temperature)
        if self.top_p < 1:
            scaled = _nucleus(scaled, self.top_p)
        return mx.random.categorical(scaled, key=key)


class Scored:
    """A sampler that notes how likely the model found each token that it chooses, and the likeliest in its place.

    Parameters
    ----------
    sample
        Chooses the token from logits of shape [V].
    n_top
        How many of the likeliest tokens are noted.
    decode
        Text of a token.
    notes
        Where each choice is added. Logarithms are natural, of the model's own distribution: before any temperature.
    """

    def __init__(
        self,
        sample: Callable[[mx.array], mx.array],
        n_top: int,
        decode: Callable[[Sequence[int]], str],
        notes: list[TokenLogprob],
    ) -> None:
        self._sample = sample
        self._n_top = n_top
        self._decode = decode
        self._notes = notes

    def __call__(self, logits: mx.array) -> mx.array:
        """The next token, a scalar, from logits of shape [V]."""
        import mlx.core as mx

        token = self._sample(logits)
        exact = logits.astype(mx.float32)
        logprobs = np.array(exact - mx.logsumexp(exact))
        likeliest = np.argsort(-logprobs, kind="stable")[: self._n_top]
        chosen = int(token.tolist())  # type: ignore[arg-type]  # a scalar
        top = tuple(Alternative(int(id_), self._decode([int(id_)]), float(logprobs[id_])) for id_ in likeliest)
        self._notes.append(TokenLogprob(chosen, self._decode([chosen]), float(logprobs[chosen]), top))
        return token


def derive_seed(agent: str, parent_turn: int | None, prompt: str, settings: Mapping[str, object]) -> int:
    """A seed for a request that names none: the same request at the same place of an agent's tree repeats itself.

    The same in every process and on every machine. ``settings`` must be what `json.dumps` takes.
    """
    text = json.dumps([agent, parent_turn, prompt, dict(settings)], sort_keys=True, ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") & _MAX_SEED


def _nucleus(logits: mx.array, top_p: float) -> mx.array:
    """Logits [V] with those outside the nucleus at minus infinity; ties with its last token stay in."""
    import mlx.core as mx

    ascending = mx.sort(logits)
    more_likely = mx.cumsum(mx.softmax(ascending), reverse=True, inclusive=False)
    # The most likely token has nothing above it, so the nucleus is never empty.
    least = mx.min(mx.where(more_likely < top_p, ascending, mx.inf))
    return mx.where(logits >= least, logits, -mx.inf)
