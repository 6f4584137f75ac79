"""A reply's tokens as text, piece by piece, cut at the first stop string."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from amem.errors import InputError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


class StopStrings:
    """Lets text through up to the first stop string, wherever the pieces' boundaries are.

    The first is the one that is complete first; of two that end together, the longer. Text that may be the beginning
    of a stop string is held back until it is known.

    Raises
    ------
    InputError
        A stop string is empty.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise InputError("A stop string is empty: it would end every reply before its first token.")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """The text that is known not to be of a stop string, now that ``piece`` follows."""
        if self.found is not None:
            return ""
        self._held += piece
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if matches:
            _, safe, self.found = min(matches)
        else:
            safe = len(self._held) - max((overlap(self._held, stop) for stop in self._stops), default=0)
        free, self._held = self._held[:safe], "" if self.found is not None else self._held[safe:]
        return free

    def flush(self) -> str:
        """The text held back, at the end of a reply."""
        free, self._held = self._held, ""
        return free


class ReplyText:
    """The text of one reply while its tokens arrive.

    Detokenizers drop a space at the very beginning; a reply that continues a text keeps it.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        eos_token_ids: Collection[int],
        stops: Sequence[str] = (),
        *,
        continues: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer
        self._opening: list[int] | None = [] if continues else None  # tokens until the first text
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stops = StopStrings(stops)
        self._ends: list[int] = []  # length of the text after each token whose text is complete
        self._decoded = 0  # length of the text before stop strings are looked for
        self._n_tokens = 0
        self.text = ""  #: given out so far
        self.ended = False  #: an end-of-turn token came

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._stops.found is not None

    @property
    def stop(self) -> str | None:
        """The stop string that came."""
        return self._stops.found

    @property
    def n_kept(self) -> int:
        """How many of the tokens belong to the reply: those whose text lies wholly before the stop string."""
        return bisect_right(self._ends, len(self.text)) if self.stopped else self._n_tokens

    @property
    def tail_ids(self) -> list[int]:
        """Tokens of the text between the last kept token and the stop string, where that begins inside a token.

        No generated token ends there, so the tokenizer makes them: kept tokens and these say what ``text`` says.
        """
        if not self.stopped:
            return []
        n_kept = self.n_kept
        tail = self.text[self._ends[n_kept - 1] if n_kept else 0 :]
        return self._encode_in_midst(tail) if tail else []

    def _encode_in_midst(self, text: str) -> list[int]:
        """Tokens of a text that follows others.

        SentencePiece tokenizers put a space before a text; after a line break they do not.
        """
        before = self._encode("\n")
        alone, after = self._encode(text), self._encode(f"\n{text}")
        said = self._tokenizer.decode([*before, *alone])
        if said != self._tokenizer.decode(before) + text and after[: len(before)] == before:
            return after[len(before) :]
        return alone

    def _encode(self, text: str) -> list[int]:
        return [int(id_) for id_ in self._tokenizer.encode(text, add_special_tokens=False)]

    def add(self, token_id: int) -> str:
        """The text that this token completes; "" for an end-of-turn token, and after a stop string."""
        self._n_tokens += 1
        if token_id in self._eos_token_ids:
            self.ended = True
            return ""
        self._detokenizer.add_token(token_id)
        segment = self._detokenizer.last_segment
        if self._opening is not None:
            self._opening.append(token_id)
            if segment:
                text = str(self._tokenizer.decode(self._opening))
                self._opening = None
                if text.startswith(" ") and not segment.startswith(" "):
                    segment = f" {segment}"
        return self._give(segment)

    def finish(self) -> str:
        """What was held back, now that no more tokens come."""
        self._detokenizer.finalize()
        rest = self._give(self._detokenizer.last_segment)
        if not self.stopped:
            held = self._stops.flush()
            self.text += held
            rest += held
        return rest

    def _give(self, segment: str) -> str:
        self._decoded += len(segment)
        if segment:
            # Tokens that gave no text yet (a part of a character, a space) end where this one does.
            self._ends += [self._decoded] * (self._n_tokens - len(self._ends))
        free = self._stops.add(segment)
        self.text += free
        return free


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
