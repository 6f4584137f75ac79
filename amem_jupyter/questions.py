"""Keeps the question mark at the end of a %agent line: IPython would take the line for a question about a name."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Sequence

from IPython.core.inputtransformer2 import EscapedCommand, MagicAssign, TransformerManager

ASKS = re.compile(r"%agent[ \t]+\S+[ \t]+\S")  #: with a message; %agent? and %agent NAME? stay IPython's


class AgentLine(EscapedCommand):
    """`%agent NAME message?`, before the help syntax looks at it."""

    priority = 1  # HelpEnd has 5

    @classmethod
    def find(cls, tokens_by_line: Sequence[Sequence[tokenize.TokenInfo]]) -> AgentLine | None:
        """The first such line in the cell."""
        for tokens in tokens_by_line:
            first = next((one for one in tokens if one.type not in {tokenize.INDENT, tokenize.DEDENT}), None)
            if first is not None and ASKS.match(first.line, first.start[1]):
                return cls(first.start)
        return None


class AgentAssign(MagicAssign):
    """`reply = %agent NAME message?`, likewise."""

    priority = 1

    def __init__(self, start: tuple[int, int]) -> None:
        # the help syntax begins further left, at the name that is assigned to, and the leftmost goes first
        super().__init__((start[0], 0))  # type: ignore[no-untyped-call]
        self.sign_col = start[1]

    def transform(self, lines: list[str]) -> list[str]:
        """The lines with a call in place of the magic."""
        self.start_col = self.sign_col
        return super().transform(lines)  # type: ignore[no-any-return]

    @classmethod
    def find(cls, tokens_by_line: Sequence[Sequence[tokenize.TokenInfo]]) -> AgentAssign | None:
        """The first such line in the cell."""
        for tokens in tokens_by_line:
            found: AgentAssign | None = super().find([tokens])  # type: ignore[no-untyped-call]
            if found is not None:
                start = (found.start_line + 1, found.sign_col)
                sign = next(one for one in tokens if one.start == start)
                if ASKS.match(sign.line, found.sign_col):
                    return found
        return None


TRANSFORMERS = (AgentLine, AgentAssign)


def keep_questions(manager: TransformerManager) -> None:
    """Put our transformers into a shell's."""
    manager.token_transformers.extend(TRANSFORMERS)


def leave_questions(manager: TransformerManager) -> None:
    """Take them out again."""
    manager.token_transformers[:] = [one for one in manager.token_transformers if one not in TRANSFORMERS]
