"""What people read about the commands, written from the table: usage lines, the help of one command, the overview."""

from __future__ import annotations

from amem_jupyter.commands import MAGICS, SUBCOMMANDS, Command, Option, Positional


def usage(command: Command) -> str:
    """One line: how the command is written."""
    name = command.name if command.name.startswith("%") else f"%amem {command.name}"
    words = [name, *(_positional(positional) for positional in command.positionals)]
    if len(command.options) > 3:
        words.append("[options]")
    else:
        words += [f"[{_option(option)}]" for option in command.options]
    if command.message == "line":
        words.append("TEXT")
    line = " ".join(words)
    return f"{line}, with the message in the lines below" if command.message == "cell" else line


def describe(command: Command) -> str:
    """The whole help of one command: usage, summary, options, notes."""
    lines = [usage(command), "", _sentence(command.summary)]
    if command.options:
        width = max(len(_option(option)) for option in command.options)
        lines += ["", "Options:", *(f"  {_option(option):{width}}  {option.help}" for option in command.options)]
    if command.notes:
        lines += ["", *command.notes]
    return "\n".join(lines)


def overview() -> str:
    """All commands with their summaries."""
    width = max(len(_short(command)) for command in (*MAGICS.values(), *SUBCOMMANDS))
    magics = [f"{_short(command):{width}}  {command.summary}" for command in MAGICS.values()]
    subcommands = [f"{_short(command):{width}}  {command.summary}" for command in SUBCOMMANDS]
    return "\n".join([*magics, "", *subcommands, "", "%amem help COMMAND tells all of one."])


def _short(command: Command) -> str:
    name = command.name if command.name.startswith("%") else f"%amem {command.name}"
    return " ".join([name, *(_positional(positional) for positional in command.positionals)])


def _positional(positional: Positional) -> str:
    word = f"{positional.name} ..." if positional.many else positional.name
    return word if positional.required else f"[{word}]"


def _option(option: Option) -> str:
    return f"{option.flag} {option.metavar}".strip()


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
