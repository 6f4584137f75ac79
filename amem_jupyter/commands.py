"""The table of the magics' commands and options: grammar, help, docstrings and completion all come from it."""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable
from dataclasses import dataclass

Converter = Callable[[str], object]


def whole_number(minimum: int) -> Converter:
    """A converter to an integer of at least `minimum`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise ValueError(f"a whole number of at least {minimum}")
        return value

    return convert


def real_number(low: float, high: float, *, above: bool = False) -> Converter:
    """A converter to a number from `low` (excluded if `above`) to `high`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high) or (above and value == low) or math.isinf(value):
            bounds = f"{'above' if above else 'from'} {low:g}" + ("" if math.isinf(high) else f" up to {high:g}")
            raise ValueError(f"a number {bounds}")
        return value

    return convert


def seed(text: str) -> int | str:
    """A converter to a seed: a whole number, or "random"."""
    if text == "random":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError('a whole number or "random"') from None


def place(text: str) -> int | str:
    """A converter to a place in a tree: a turn's number, or a named snapshot."""
    if not text.strip():
        raise ValueError("a turn's number or a snapshot's name")
    return int(text) if text.isdecimal() else text


def variable(text: str) -> str:
    """A converter to the name of a variable."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ValueError("the name of a Python variable")
    return text


def stop_text(text: str) -> str:
    r"""A converter to a stop string, in which \n and \t stand for a line's end and a tab."""
    if not text:
        raise ValueError("a text of at least one character")
    return text.replace("\\n", "\n").replace("\\t", "\t")


@dataclass(frozen=True)
class Option:
    """One option: a switch if it has no `metavar`, else a flag with a value."""

    flag: str
    metavar: str
    help: str
    convert: Converter = str
    choices: tuple[str, ...] = ()
    repeatable: bool = False
    excludes: tuple[str, ...] = ()  #: options and positionals that cannot be given beside it

    @property
    def name(self) -> str:
        """Its key among the parsed values."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Positional:
    """One word of a command. Its `kind` says what completes it: agent, new agent, turn, model, command or text."""

    name: str
    kind: str
    required: bool = True
    many: bool = False
    convert: Converter = str
    empty: bool = False  #: whether "" is a value


@dataclass(frozen=True)
class Command:
    """One magic, or one subcommand of %amem.

    `message` says where its text is: "cell" (the body), "line" (the rest of the line) or "" (it has none).
    """

    name: str
    summary: str
    positionals: tuple[Positional, ...] = ()
    options: tuple[Option, ...] = ()
    message: str = ""
    notes: tuple[str, ...] = ()

    def option(self, flag: str) -> Option | None:
        """The option that is written `flag`."""
        return next((option for option in self.options if option.flag == flag), None)


FORMATS = ("md", "text", "code")

SAMPLING = (
    Option("--max-tokens", "N", "most tokens to generate", whole_number(1)),
    Option("--temperature", "T", "0 is greedy, higher is more varied", real_number(0.0, math.inf)),
    Option("--top-p", "P", "sample from the likeliest tokens that make up P", real_number(0.0, 1.0, above=True)),
    Option("--seed", "N", 'seed of the sampling, or "random"; without it a repeated request repeats its reply', seed),
    Option("--stop", "TEXT", r"end the reply before TEXT; may be given again; \n is a line's end", stop_text,
           repeatable=True),
)  # fmt: skip

SYSTEM = Option("--system", "TEXT", "the agent's instructions, or @FILE to read them from; only before its first turn")

ASKING = (
    Option("--format", "HOW", "show the reply as md (Markdown), text or code", choices=FORMATS),
    Option("--raw", "", "send the text untouched: {{name}} is not replaced"),
    Option("--append", "", "add a turn even if this cell has asked before", excludes=("--cached",)),
    Option("--cached", "", "show the recorded reply, if this was asked at this place before; nothing is computed"),
    Option("--from", "NAME", "put the last reply of agent NAME before the text, as a quotation; may be given again",
           repeatable=True),
    Option("--dry-run", "", "show what would be sent, and send nothing"),
)  # fmt: skip

BACKGROUND = Option("--background", "", "go on at once; the reply streams into this cell while others run")

INTO = Option("--into", "VAR", "keep the reply in the variable VAR too", variable)

BRACES = (
    "{{name}} in the text is replaced by that variable, or any expression, of yours, or else by the last reply of the "
    "agent of that name; --raw sends braces as they are."
)

NAME = Positional("NAME", "agent")
NAMES = Positional("NAME", "agent", many=True)
TURN = Positional("TURN", "turn", convert=place)

CELL_AGENT = Command(
    "%%agent", "send the cell's text to an agent; its reply streams into the cell", (NAME,),
    (*SAMPLING, SYSTEM, INTO, *ASKING, BACKGROUND), message="cell",
    notes=(BRACES, "A cell that is run again replaces the turn it made before; the earlier one stays as a branch."),
)  # fmt: skip

LINE_AGENT = Command(
    "%agent", "send the rest of the line to an agent", (NAME,), (*SAMPLING, SYSTEM, INTO, *ASKING, BACKGROUND),
    message="line",
    notes=("Options go before the text. -- ends them, for a text that begins with a dash.", BRACES),
)  # fmt: skip

CELL_AGENTS = Command(
    "%%agents", "send the cell's text to several agents at once; their replies stream in side by side", (NAMES,),
    (*SAMPLING, Option("--into", "VAR", "keep the replies in the variable VAR, by agent", variable), *ASKING,
     BACKGROUND),
    message="cell", notes=(BRACES,),
)  # fmt: skip

SUBCOMMANDS = (
    Command("status", "the engine and its agents: residency, tokens, bytes, last time to first token", (),
            (Option("--live", "", "a dashboard that follows what happens, with buttons for each agent"),)),
    Command("load", "load a model: a hub id or a local folder; alone, the model of the settings",
            (Positional("MODEL", "model", required=False),),
            (Option("--codec", "NAME", 'how K and V are stored, e.g. q4; "auto" lets the engine choose'),
             Option("--memory", "SIZE", "the most that K and V may take in memory, e.g. 2GB"),
             Option("--disk", "SIZE", "the most that the store may take on disk"),
             Option("--store", "DIR", "where agents are kept"))),
    Command("agents", "the names of this space's agents"),
    Command("map", "a picture of an agent's blocks, live while cells run", (NAME,)),
    Command("tree", "an agent's turns with their branches; a click on a turn stands the agent there", (NAME,)),
    Command("history", "an agent's conversation up to where it stands", (NAME,),
            (Option("--last", "N", "only the last N turns", whole_number(1)),)),
    Command("fork", "a new agent that starts with all of NAME's state; nothing is copied",
            (NAME, Positional("NEW", "new agent")),
            (Option("--at", "TURN", "fork at this turn or named snapshot instead of where NAME stands", place),
             Option("--keep-last", "N", "only the system text and the last N turns; they are computed again",
                    whole_number(1)),
             Option("--replace", "", "delete an agent NEW that is there already, so that the cell can run again"))),
    Command("rewind", "take an agent's last turn back, or its last TURNS; they stay as a branch",
            (NAME, Positional("TURNS", "number", required=False, convert=whole_number(1))),
            (Option("--to", "TURN", "back to this turn or named snapshot", place, excludes=("TURNS",)),)),
    Command("checkout", "stand an agent on another turn of its tree, or on a named snapshot", (NAME, TURN)),
    Command("snapshot", "name the turn at which an agent stands; without SNAPSHOT, list those it has",
            (NAME, Positional("SNAPSHOT", "text", required=False)),
            (Option("--at", "TURN", "name this turn instead", whole_number(0)),
             Option("--forget", "", "take the name away; its turn stays", excludes=("--at",)))),
    Command("why", "what an agent's last request found of its past, and why not more", (NAME,)),
    Command("evict", "take agents' K and V out of memory; they stay on disk", (NAMES,)),
    Command("restore", "bring agents' K and V from disk into memory", (NAMES,)),
    Command("prefetch", "begin to bring agents' K and V into memory, and go on at once", (NAMES,)),
    Command("pin", "keep agents in memory", (NAMES,)),
    Command("unpin", "let agents be evicted again", (NAMES,)),
    Command("delete", "delete an agent: its text, its K and V, its files", (NAME,),
            (Option("--yes", "", "do it; nothing brings it back"),)),
    Command("wait", "wait for the replies in the background, of these agents or of all",
            (Positional("NAME", "agent", required=False, many=True),)),
    Command("cancel", "end agents' requests in the background; the agents are as they were before", (NAMES,)),
    Command("export", "write all of an agent to one file", (NAME, Positional("FILE", "file"))),
    Command("import", "make an agent of a file that export wrote", (Positional("FILE", "file"),),
            (Option("--as", "NAME", "its name here, instead of the one that it had"),)),
    Command("verify", "read all stored blocks and compare them with their checksums", (),
            (Option("--repair", "", "set damaged files aside, and rebuild what can be rebuilt"),)),
    Command("fidelity", "what an agent's stored state costs in fidelity, measured on its last tokens",
            (NAME,), (Option("--tokens", "N", "about how many of its last tokens to read; 128 without it",
                             whole_number(1)),)),
    Command("capacity", "how many agents of N tokens fit the memory budget",
            (Positional("N", "number", required=False, many=True, convert=whole_number(1)),)),
    Command("space", "show this notebook's space of agents, or change to SPACE",
            (Positional("SPACE", "text", required=False),)),
    Command("serve", "serve this kernel's agents over HTTP to other programs; cells and clients share them", (),
            (Option("--port", "N", "the port, 8000 if none is given; 0 takes a free one", whole_number(0)),
             Option("--host", "HOST", "the address; any but 127.0.0.1 needs a key"),
             Option("--api-key", "KEY", "a key that requests must bring, as KEY or NAME:KEY; may be given again",
                    repeatable=True),
             Option("--into", "VAR", "keep the address for clients in the variable VAR", variable),
             Option("--stop", "", "end the serving", excludes=("--port", "--host", "--api-key", "--into")))),
    Command("release", "close the engine: the model leaves memory, and other kernels may use the agents"),
    Command("config", 'the defaults of this notebook; with a name and a value, set one ("" resets it)',
            (Positional("OPTION", "setting", required=False), Positional("VALUE", "text", required=False, empty=True))),
    Command("help", "this list, or one command in full", (Positional("COMMAND", "command", required=False),)),
)  # fmt: skip

BY_NAME = {command.name: command for command in SUBCOMMANDS}
MAGICS = {command.name: command for command in (CELL_AGENT, LINE_AGENT, CELL_AGENTS)}
