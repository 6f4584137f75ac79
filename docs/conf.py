"""How Sphinx builds the documentation: `make docs`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

from amem import Engine
from amem.cli import parser
from amem_jupyter.commands import MAGICS, SUBCOMMANDS, Command
from amem_jupyter.manual import describe, overview

project = "amem"
release = metadata.version("amem")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"amem {release}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
pygments_style = "friendly"
default_role = "py:obj"  # a name in a docstring leads to what it names
autodoc_default_options = {"members": True, "member-order": "bysource", "undoc-members": True}
autodoc_preserve_defaults = True
napoleon_use_rtype = False
myst_heading_anchors = 3

_ROOT = Path(__file__).parent.parent
_PLACE = re.compile(r"<!-- made of ([a-zA-Z. ]+) -->")


def setup(app: Sphinx) -> None:
    """Called by Sphinx before anything is read."""
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _name_errors, priority=1)  # before napoleon
    app.connect("autodoc-process-signature", _leave_out_signature)


def _fill(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Put what is made of the tables of commands into its place on a page."""
    source[0] = _PLACE.sub(lambda found: PARTS[found[1]](), source[0])


def _name_errors(_app: Sphinx, _kind: str, _name: str, _what: object, _options: object, lines: list[str]) -> None:
    """Our underlined sections of errors hold lines of the other style, `Error: when`: give them its heading."""
    for at in range(len(lines) - 2):
        if lines[at] == "Raises" and set(lines[at + 1]) == {"-"} and lines[at + 2].startswith("    "):
            lines[at : at + 2] = ["Raises:"]
            return


def _leave_out_signature(_app: Sphinx, kind: str, _name: str, what: object, *_: object) -> tuple[str, str] | None:
    """Only engines are made by who reads this; of results, the fields are listed."""
    return ("", "") if kind == "class" and what is not Engine else None


def _page(name: str) -> str:
    """A page of the project's root, with its links as they are here."""
    text = (_ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    for other in ("CONTRIBUTING.md", "CHANGELOG.md"):
        text = text.replace(f"]({other}", f"]({other.lower()}")
    return text


def _overview() -> str:
    return f"```text\n{overview()}\n```"


def _magics() -> str:
    return "\n\n".join(_magic(command) for command in (*MAGICS.values(), *SUBCOMMANDS))


def _magic(command: Command) -> str:
    name = command.name if command.name.startswith("%") else f"%amem {command.name}"
    return f"## `{name}`\n\n```text\n{describe(command)}\n```"


def _commands() -> str:
    return "\n\n".join(f"## `{made.prog}`\n\n```text\n{_help(made)}```" for made in _parsers(parser()))


def _parsers(made: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield made
    for action in made._actions:  # noqa: SLF001  # argparse has no public list of them
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from _parsers(below)


def _help(made: argparse.ArgumentParser) -> str:
    made.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
    return made.format_help()


PARTS: dict[str, Callable[[], str]] = {
    "CONTRIBUTING.md": lambda: _page("CONTRIBUTING.md"),
    "CHANGELOG.md": lambda: _page("CHANGELOG.md"),
    "the overview of the magics": _overview,
    "the magics": _magics,
    "the command line": _commands,
}
