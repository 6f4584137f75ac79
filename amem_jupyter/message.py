"""From a cell's body to the text that is sent: {{name}} is replaced in a single pass, nothing else is touched."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from IPython.core.error import UsageError

from amem_jupyter.parse import nearest


def body_text(body: str) -> str:
    """The body as the person wrote it, without the one line end that IPython adds."""
    return body.removesuffix("\n").removesuffix("\r")


Replies = Callable[[str], str | None]  #: an agent's last reply by its name; None if there is no such agent


def no_replies(_name: str) -> str | None:
    """Where there are no agents."""
    return None


def expand(text: str, names: Mapping[str, Any], said: Replies = no_replies) -> str:
    """Replace each {{expression}} by the text of its value; braces inside a value are not looked at again.

    A name that is none of `names` can be an agent's: its value is that agent's last reply. An opening without its
    closing on the same line, or with nothing between, stays as it is.
    """
    pieces: list[str] = []
    at = 0
    while (opening := text.find("{{", at)) >= 0:
        source, end = _expression(text, opening)
        if source.strip():
            pieces += [text[at:opening], _value(source, names, said)]
        else:
            pieces.append(text[at:end])
        at = end
    return "".join([*pieces, text[at:]])


def _expression(text: str, opening: int) -> tuple[str, int]:
    """The source between {{ and the first }} at which it is a whole expression, and the position after that."""
    closing = text.find("}}", opening + 2)
    if closing < 0:
        return "", len(text)
    if "\n" in text[opening:closing]:
        return "", opening + 2
    first = (text[opening + 2 : closing], closing + 2)
    while closing >= 0 and "\n" not in text[opening:closing]:
        if _compile(text[opening + 2 : closing]) is not None:
            return text[opening + 2 : closing], closing + 2
        closing = text.find("}}", closing + 1)
    return first


def _compile(source: str) -> CodeType | None:
    try:
        return compile(source.strip(), "{{...}}", "eval")
    except (SyntaxError, ValueError):
        return None


def quoted(agent: str, said: Replies) -> str:
    """An agent's last reply as a quotation."""
    reply = said(agent)
    if reply is None:
        raise UsageError(f"--from {agent}: there is no agent of that name")
    return "\n".join([f"{agent} said:", "", *(f"> {line}".rstrip() for line in reply.splitlines())])


def _value(source: str, names: Mapping[str, Any], said: Replies) -> str:
    """A name of `names` goes before an agent's, and that before Python's own (such as `filter`)."""
    shown, name = f"{{{{{source}}}}}", source.strip()
    if name.isidentifier() and name not in names and not keyword.iskeyword(name) and (reply := said(name)) is not None:
        return reply
    code = _compile(source)
    if code is None:
        if (reply := said(name)) is not None:
            return reply
        raise UsageError(f"{shown} is not a Python expression (--raw sends braces as they are)")
    try:
        return str(eval(code, dict(names)))  # noqa: S307  # it is the person's own code, in their own kernel
    except NameError as error:
        if (reply := said(name)) is not None:  # a name such as my-planner
            return reply
        name = error.name or name
        hint = nearest(name, [key for key in names if not key.startswith("_")])
        raise UsageError(
            f"{shown}: you have no variable or agent {name}{hint} (--raw sends braces as they are)"
        ) from None
    except Exception as error:  # noqa: BLE001  # whatever the person's expression raises
        raise UsageError(f"{shown}: {type(error).__name__}: {error}") from None


def system_text(value: str) -> str:
    """The instructions that --system gives: its text, or the content of the file after @."""
    if not value.startswith("@"):
        return value
    try:
        path = Path(value[1:]).expanduser()
    except RuntimeError:
        raise UsageError(f"--system {value}: there is no such user") from None
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"--system {value}: {error.strerror or error} ({path.absolute()})") from None
    except UnicodeDecodeError:
        raise UsageError(f"--system {value}: not a text file in UTF-8") from None
