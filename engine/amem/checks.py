"""What a request may be: the checks that come before anything changes, and before a model is loaded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from amem.errors import InputError
from amem.sizes import format_size

MAX_TOP = 20  #: alternatives that are told for each token
LEAST_MEMORY = 100_000  #: bytes; no model that we know keeps an agent in less


def engine_options(
    *, max_batch: object, prefill_chunk: object, step_ms: object, io_threads: object, space: object, memory: int
) -> None:
    """Refuse options that no engine can have; ``memory`` in bytes.

    Raises
    ------
        InputError: the first option that is not possible.
    """
    _whole("max_batch", max_batch, 1)
    _whole("io_threads", io_threads, 0)
    if isinstance(step_ms, bool) or not isinstance(step_ms, (int, float)) or not 0 < step_ms < math.inf:
        raise InputError(f"step_ms must be a number of milliseconds above 0, not {step_ms!r}.")
    if prefill_chunk is not None:
        _whole("prefill_chunk", prefill_chunk, 64)
        if prefill_chunk % 64:  # type: ignore[operator]  # a whole number, as was checked
            raise InputError(f"prefill_chunk must be a multiple of 64, not {prefill_chunk}.")
    if not isinstance(space, str):
        raise InputError(f"space must be a text, not {space!r}.")
    if memory < LEAST_MEMORY:
        raise InputError(
            f"memory={format_size(memory)} holds no agent of any model: give at least {format_size(LEAST_MEMORY)}, "
            "or leave it out for a quarter of the RAM."
        )


def check_store(root: Path) -> None:
    """Refuse a store that is something else than a folder; one that is not there yet will be made.

    Raises
    ------
        InputError: it is a file, or lies below one.
    """
    with contextlib.suppress(OSError):  # what may not be looked at is told when it is opened
        there = next(path for path in (root, *root.parents) if path.exists())
        if not there.is_dir():
            raise InputError(f"the store {root} cannot be a folder, since {there} is a file: name another folder.")


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def request_settings(
    *,
    max_tokens: object = 512,
    temperature: object = 0.0,
    top_p: object = 1.0,
    seed: object = None,
    stop: object = (),
) -> dict[str, Any]:
    """How to generate, checked, as it is recorded with a turn.

    Raises
    ------
        InputError: the first setting that is not possible.
    """
    _whole("max_tokens", max_tokens, 1)
    if not isinstance(temperature, (int, float)) or not 0 <= temperature < math.inf:
        raise InputError(f"temperature must be a number from 0 upwards, not {temperature!r}.")
    if not isinstance(top_p, (int, float)) or not 0 < top_p <= 1:
        raise InputError(f"top_p must be above 0 and at most 1, not {top_p!r}.")
    if seed is not None and seed != "random" and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise InputError(f'seed must be a whole number or "random", not {seed!r}.')
    return {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "stop": _stop_strings(stop)}


def check_logprobs(n_top: object) -> int | None:
    """How many of the likeliest tokens are to be told for each token; None: no logprobs at all.

    Raises
    ------
        InputError: it is no whole number from 0 to 20.
    """
    if n_top is not None and (isinstance(n_top, bool) or not isinstance(n_top, int) or not 0 <= n_top <= MAX_TOP):
        raise InputError(f"logprobs must be a whole number from 0 to {MAX_TOP}, not {n_top!r}.")
    return n_top


def check_message(message: object) -> None:
    """Refuse a message that says nothing.

    Raises
    ------
        InputError: it is empty, or no text.
    """
    if not isinstance(message, str) or not message.strip():
        raise InputError("the message is empty: write what you want to say to the agent.")
    check_text("the message", message)


def check_text(what: str, text: object) -> None:
    """Refuse what cannot be saved as text; None is no text, and stays so.

    Raises
    ------
        InputError: it says what the text was for.
    """
    if text is None:
        return
    if not isinstance(text, str):
        raise InputError(f"{what} must be a text, not {text!r}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} holds half of a character (a lone surrogate): remove it.") from error


def _stop_strings(stop: object) -> list[str]:
    """One text, or several."""
    given: list[Any] = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Iterable) else [None]
    stops = [text for text in given if isinstance(text, str)]
    if len(stops) < len(given):
        raise InputError(f"stop must be a text or a list of texts, not {stop!r}.")
    if not all(stops):
        raise InputError("a stop string is empty: leave it out, or give the text at which the reply should end.")
    for text in stops:
        check_text("a stop string", text)
    return stops
