"""Messages of a conversation in one plain form, and when two of them say the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from amem.errors import InputError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

ROLES = ("system", "user", "assistant", "tool")

_DEEPEST = 100  # lists and mappings in one another; deeper ones may exhaust the stack of whoever reads them later


def plain_messages(messages: object) -> tuple[Message, ...]:
    """A whole conversation as a client sends it, checked and in plain form.

    Of each message role, content (a text; parts of type "text" are joined), name, tool_call_id, reasoning_content and
    tool_calls are kept. A tool call's arguments, which clients send as JSON text, become a mapping: so their order does
    not count, and chat templates get what they expect.

    Raises
    ------
    InputError
        No messages, a role that is not known, a message without text, a last message that is not the user's or a
        tool's, or a tool call's arguments that are nested more than 100 deep.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InputError("messages must be a list of mappings with a role and a content.")
    if not messages:
        raise InputError("There are no messages: give at least the user's.")
    plain = tuple(_plain(number, message) for number, message in enumerate(messages))
    last = plain[-1]
    if last["role"] not in ("user", "tool"):
        raise InputError("The last message must be the user's or a tool's: the reply to it is what is asked for.")
    if last["role"] == "user" and not last["content"].strip():
        raise InputError("The message is empty: write what the reply is to be to.")
    return plain


def plain_tools(tools: object) -> tuple[Mapping[str, Any], ...]:
    """Descriptions of tools, as the chat template takes them.

    Raises
    ------
    InputError
        Not a list of mappings that can be written as JSON, or nested more than 100 deep.
    """
    if tools is None:
        return ()
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise InputError("tools must be a list of tool descriptions.")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError("each tool must be a mapping, such as {'type': 'function', 'function': {...}}.")
    return tuple(_as_json("tools", tool) for tool in tools)


def _plain(number: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise InputError(f"Message {number} is not a mapping with a role and a content.")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InputError(f"Message {number} has the role {role!r}; known: {', '.join(ROLES)}.")
    calls = message.get("tool_calls") or ()
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        content = _joined(number, content)
    if content is None and calls and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise InputError(f"Message {number} has no text in 'content'.")
    plain: dict[str, Any] = {"role": role, "content": content}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(key), str):
            plain[key] = message[key]
    if calls:
        plain["tool_calls"] = [_plain_call(number, call) for call in calls]
    found: Message = _as_json(f"message {number}", plain)
    return found


def _joined(number: int, parts: Sequence[object]) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InputError(f"Message {number} has no text in 'content': only parts of type 'text' can be read.")
        texts.append(part["text"])
    return "".join(texts)


def _plain_call(number: int, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"Message {number} has a tool call without a function's name.")
    plain: dict[str, Any] = {"type": "function"}
    if isinstance(call.get("id"), str):
        plain["id"] = call["id"]
    return plain | {"function": {"name": function["name"], "arguments": arguments_of(function.get("arguments"))}}


def arguments_of(arguments: object) -> Any:
    """A tool call's arguments as a mapping, if they are one or JSON text of one; else as they are.

    Raises
    ------
    InputError
        They cannot be written as JSON, or are nested more than 100 deep.
    """
    what = "a tool call's arguments"
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments)
        except ValueError:
            return arguments
        except RecursionError as error:
            raise _too_deep(what) from error
        return _as_json(what, found) if isinstance(found, dict) else arguments
    return {} if arguments is None else _as_json(what, arguments)


def same_json(one: object, other: object, *, ordered: bool = False) -> bool:
    """Whether two values are the same JSON: true, 1 and 1.0 are three values, which Python takes for equal.

    With ``ordered`` the order of keys counts, as where a template writes them out.
    """
    return _written(one, ordered) == _written(other, ordered)


def _written(value: object, ordered: bool) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=not ordered)


def _is_deeper(value: object, than: int) -> bool:
    """Whether lists and mappings lie in one another in more levels than that."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (than == 0 or any(_is_deeper(item, than - 1) for item in inner))


def _too_deep(what: str) -> InputError:
    return InputError(f"{what}: lists and mappings are nested more than {_DEEPEST} deep; send fewer in one another.")


def _as_json(what: str, value: object) -> Any:
    """The value as it comes back from a file."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} holds half of a character (a lone surrogate): remove it.") from error
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} cannot be written as JSON: {error}") from error
    except RecursionError as error:
        raise _too_deep(what) from error
    plain = json.loads(text)
    if _is_deeper(plain, _DEEPEST):
        raise _too_deep(what)
    return plain
