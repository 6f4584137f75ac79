"""Tab completion on the lines of our magics: commands, options, agents, models, from the table of commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from amem_jupyter.commands import BY_NAME, CELL_AGENT, CELL_AGENTS, LINE_AGENT, MAGICS, Command

Names = Callable[[str], Iterable[str]]

LINE = re.compile(r"^\s*(?:[\w.]+\s*=\s*)?(%%agents|%%agent|%agent|%amem)\s(.*)$")
HEADS = {"%%agent": CELL_AGENT, "%%agents": CELL_AGENTS, "%agent": LINE_AGENT}


def complete(line: str, names: Names) -> list[str] | None:
    """What the last word of `line` can become; None if the line is not one of ours, or wants a file.

    `names` tells the names of a kind of thing: agents, models, settings.
    """
    found = LINE.match(line)
    if found is None:
        return None
    words = found[2].split()
    last = "" if not words or line[-1].isspace() else words.pop()
    if found[1] != "%amem":
        return _words_of(HEADS[found[1]], words, last, names)
    if not words:
        return _starting(BY_NAME, last)
    command = BY_NAME.get(words[0])
    return [] if command is None else _words_of(command, words[1:], last, names)


def _words_of(command: Command, words: list[str], last: str, names: Names) -> list[str] | None:
    """What can stand after `words` of a command; None where IPython completes files."""
    before = command.option(words[-1]) if words else None
    if before is not None and before.metavar:
        return _starting(before.choices, last)
    if last.startswith("-"):
        free = [option.flag for option in command.options if option.repeatable or option.flag not in words]
        return _starting(free, last)
    n_given = sum(not word.startswith("-") for word in words) - sum(
        1 for word in words if (option := command.option(word)) is not None and option.metavar
    )
    wanted = command.positionals[min(n_given, len(command.positionals) - 1) :][:1]
    if not wanted or (n_given >= len(command.positionals) and not wanted[0].many):
        return []
    if wanted[0].kind == "file":
        return None
    known = [*BY_NAME, *MAGICS] if wanted[0].kind == "command" else names(wanted[0].kind)
    return _starting([name for name in known if name not in words], last)


def _starting(names: Iterable[str], beginning: str) -> list[str]:
    return sorted(name for name in names if name.startswith(beginning))


class Completion:
    """The matcher in IPython's completer."""

    def __init__(self, shell: InteractiveShell, names: Names) -> None:
        self._shell = shell
        self._names = names

        @context_matcher()  # type: ignore[untyped-decorator]
        def amem_matcher(context: CompletionContext) -> SimpleMatcherResult:
            return self._match(context)

        self._matcher = amem_matcher

    def attach(self) -> None:
        """Complete from now on."""
        self._shell.Completer.custom_matchers.append(self._matcher)

    def detach(self) -> None:
        """Complete no longer."""
        self._shell.Completer.custom_matchers.remove(self._matcher)

    def _match(self, context: CompletionContext) -> SimpleMatcherResult:
        line = context.line_with_cursor[: context.cursor_position]
        found = complete(line, self._names)
        if found is None:
            return {"completions": []}
        token = context.token
        last = "" if not line or line[-1].isspace() else line.split()[-1]
        lead = len(last) - len(token)
        # IPython's token may begin after a dash or a slash of our word: what it replaces is the token alone.
        completions = [SimpleCompletion(name[lead:] if lead > 0 else name) for name in found]
        return {"completions": completions, "suppress": True}
