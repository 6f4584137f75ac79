"""The grammar of the magics' lines, and of {{name}} in a message. The message itself is never split or unquoted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from IPython.core.error import UsageError

from amem_jupyter.commands import BY_NAME, Command, Option
from amem_jupyter.manual import usage

QUOTES = "\"'"
DASHES = "-\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"


@dataclass(frozen=True)
class Word:
    """One word of a line; `end` is the position after it."""

    text: str
    end: int
    quoted: bool


@dataclass(frozen=True)
class Arguments:
    """What a line says: values by name (only those that were given), and the rest of the line as it stands."""

    command: Command
    values: Mapping[str, Any]
    rest: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an option or a positional, or `default`."""
        return self.values.get(name, default)


def nearest(name: str, names: list[str]) -> str:
    """A hint such as "; did you mean fork?", or nothing if no name is near."""
    found = get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def next_word(line: str, start: int) -> Word | None:
    r"""The word at or after `start`.

    Single and double quotes group. A backslash is itself, so that Windows paths need no care, except before a
    double quote inside double quotes.
    """
    at = start
    while at < len(line) and line[at].isspace():
        at += 1
    if at == len(line):
        return None
    text, quoted, quote, opened = "", False, "", at
    while at < len(line):
        char = line[at]
        if quote == '"' and line.startswith('\\"', at):
            text, at = text + '"', at + 1
        elif quote:
            quote, text = ("", text) if char == quote else (quote, text + char)
        elif char in QUOTES:
            quote, quoted, opened = char, True, at
        elif char.isspace():
            break
        else:
            text += char
        at += 1
    if quote:
        raise UsageError(f"no closing {quote} for the one before {line[opened + 1 : opened + 25]!r}")
    return Word(text, at, quoted)


def parse(command: Command, line: str) -> Arguments:
    """Read `line` by the grammar of `command`.

    Raises
    ------
    UsageError
        In one line: what is wrong, the nearest name if there is one, and the usage.
    """
    values: dict[str, Any] = {}
    words: list[str] = []
    at = 0
    if command.message != "line":
        line = line.rstrip().removesuffix(";")
    while (word := next_start(line, at)) is not None:
        if line.startswith("--", word) and not line.startswith("---", word):
            dashes = next_word(line, word)
            if command.message == "line" and dashes is not None and dashes.text == "--":
                at = dashes.end
                break
            at = read_option(command, line, word, values)
            continue
        if command.message == "line" and len(words) == len(command.positionals):
            at = word
            refuse_late_options(command, line[at:])
            break
        found = next_word(line, word)
        assert found is not None
        if found.text == "#" and not found.quoted and command.message != "line":  # a comment ends the line
            break
        words.append(found.text)
        at = found.end
    place(command, words, values)
    refuse_contradictions(command, values)
    rest = line[at:].strip(" \t") if command.message == "line" else ""
    return Arguments(command, values, rest)


def next_start(line: str, at: int) -> int | None:
    """The position of the next word, if there is one."""
    while at < len(line) and line[at].isspace():
        at += 1
    return at if at < len(line) else None


def read_option(command: Command, line: str, at: int, values: dict[str, Any]) -> int:
    """Read the option at `at` into `values`, and return the position after it."""
    word = next_word(line, at)
    assert word is not None
    flag, equals, value = word.text.partition("=")
    option = command.option(flag)
    if option is None:
        raise UsageError(f"{command_name(command)} has no option {flag}" + _hint(flag, command))
    end = word.end
    if not option.metavar:
        if equals:
            raise UsageError(f"{flag} takes no value")
        store(option, True, values)
        return end
    if not equals:
        following = next_word(line, end)
        if following is None or (following.text.startswith("--") and not following.quoted):
            raise UsageError(f"{flag} needs a value: {flag} {option.metavar}")
        value, end = following.text, following.end
    store(option, convert(flag, option.convert, value, option.choices), values)
    return end


def store(option: Option, value: object, values: dict[str, Any]) -> None:
    """Put an option's value in its place; the same option twice is an error unless it repeats."""
    if option.repeatable:
        values[option.name] = (*values.get(option.name, ()), value)
    elif option.name in values:
        raise UsageError(f"{option.flag} was given twice")
    else:
        values[option.name] = value


def convert(what: str, converter: Callable[[str], object], text: str, choices: tuple[str, ...] = ()) -> object:
    """The value of `text`, or a UsageError that says what `what` must be."""
    if choices and text not in choices:
        raise UsageError(f"{what} must be one of {', '.join(choices)}, not {text!r}" + nearest(text, list(choices)))
    try:
        return converter(text)
    except ValueError as error:
        raise UsageError(f"{what} must be {error}, not {text!r}") from None


def place(command: Command, words: list[str], values: dict[str, Any]) -> None:
    """Give the words of a line to the command's positionals."""
    left = list(words)
    for positional in command.positionals:
        if positional.many:
            if not left and positional.required:
                raise UsageError(f"no {positional.name}. Usage: {usage(command)}")
            each = dict.fromkeys(convert(positional.name, positional.convert, word) for word in left)
            values |= {positional.name: tuple(each)} if each else {}
            left = []
        elif left:
            values[positional.name] = convert(positional.name, positional.convert, left.pop(0))
        elif positional.required:
            raise UsageError(f"no {positional.name}. Usage: {usage(command)}")
    if left:
        extra = left[0]
        hint = _hint("--" + extra.lstrip(DASHES), command) if extra[:1] in DASHES else ""
        where = "; the message goes into the lines below" if command.message == "cell" and not hint else ""
        raise UsageError(f"{extra!r} is one word too many for {command_name(command)}{hint}{where}")
    may_be_empty = {at for at, positional in enumerate(command.positionals) if positional.empty}
    if any(not word and at not in may_be_empty for at, word in enumerate(words)):
        raise UsageError(f"an empty name. Usage: {usage(command)}")


def refuse_contradictions(command: Command, values: Mapping[str, Any]) -> None:
    """Refuse two things of which only one can be meant."""
    options = [option for option in command.options if option.name in values]
    given = {*values, *(option.flag for option in options)}
    for option in options:
        for other in option.excludes:
            if other in given:
                raise UsageError(f"{command_name(command)} takes {option.flag} or {other}, not both")


def refuse_late_options(command: Command, text: str) -> None:
    """Refuse a text in which one of our own options stands: it was surely not meant for the agent."""
    for word in text.split():
        flag = word.partition("=")[0]
        if command.option(flag) is not None:
            raise UsageError(f"{flag} goes before the text (or put -- before a text that holds it)")


def command_name(command: Command) -> str:
    """How a command is written."""
    return command.name if command.name.startswith("%") else f"%amem {command.name}"


def _hint(flag: str, command: Command) -> str:
    flags = [option.flag for option in command.options]
    return nearest(flag, flags) or (f"; it has {', '.join(flags)}" if flags else "")


def parse_amem(line: str) -> Arguments:
    """Read a line of %amem: a subcommand and its words; an empty line is `status`."""
    word = next_word(line.rstrip().removesuffix(";"), 0)
    if word is None:
        return Arguments(BY_NAME["status"], {})
    command = BY_NAME.get(word.text)
    if command is None:
        hint = nearest(word.text, list(BY_NAME)) or "; %amem help lists them"
        raise UsageError(f"%amem has no command {word.text!r}{hint}")
    return parse(command, line[word.end :])
