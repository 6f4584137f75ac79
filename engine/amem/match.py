"""Prefix matching on text, carried to tokens: how much of what is wanted a stored branch has said already.

Text is compared character by character (the EXACT, EXTEND and DIVERGE of arXiv 2603.04428), since the ids
that a model generated need not be those that a tokenizer makes of the same text. What is continued are tokens. Two
token lists can only be joined where no merge reaches over the seam: beside a special token, which tokenizers look for
before anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Carried:
    """What is wanted, in the stored branch's own tokens as far as the branch says the same."""

    token_ids: list[int]
    n_common: int  #: of these, from the first: tokens that the branch begins with
    n_stored: int  #: tokens of the branch

    @property
    def extends(self) -> bool:
        """Whether the whole branch is a beginning of what is wanted."""
        return self.n_common == self.n_stored


def carry(wanted: Sequence[int], stored: Sequence[int], special: Collection[int], decode: Decode) -> Carried:
    """Put a branch's tokens in the place of wanted ones that are the same text.

    Parameters
    ----------
    wanted
        Tokens of the wanted text, as the tokenizer makes them.
    stored
        The branch's tokens, as they were generated and fed.
    special
        Tokens that text never merges with.
    decode
        Text of tokens.

    Returns
    -------
    Carried
        Its text is that of ``wanted``, whatever the branch holds.
    """
    ours, theirs = _pieces(wanted, special), _pieces(stored, special)
    same = 0
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other and (_is_special(mine, special) or decode(mine) != decode(other)):
            break
        same += 1
    ids = [id_ for piece in [*theirs[:same], *ours[same:]] for id_ in piece]
    return Carried(ids, n_common(ids, stored), len(stored))


def n_common(one: Sequence[int] | npt.NDArray[np.int32], other: Sequence[int] | npt.NDArray[np.int32]) -> int:
    """How many leading tokens two lists share."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:n]) != np.asarray(other[:n]))
    return int(differ[0]) if len(differ) else n


def _pieces(token_ids: Sequence[int], special: Collection[int]) -> list[list[int]]:
    """The tokens cut at every special one: each is a piece of its own, and so is what lies between two of them."""
    pieces: list[list[int]] = []
    for is_special, run in groupby(token_ids, lambda id_: id_ in special):
        ids = [int(id_) for id_ in run]
        pieces.extend([[id_] for id_ in ids] if is_special else [ids])
    return pieces


def _is_special(piece: Sequence[int], special: Collection[int]) -> bool:
    return piece[0] in special
