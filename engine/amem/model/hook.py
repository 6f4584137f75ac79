"""How a model's attention reaches our caches: mlx-lm's `scaled_dot_product_attention`, rebound where models call it.

Every model file of mlx-lm imports that one function and calls it with its cache. The rebinding holds for the whole
process, so it looks at the cache of each call: ours answers itself, any other goes to mlx-lm's own function untouched.
In the same way `swiglu` can be computed otherwise, by the calls of whoever asks for it with `gated`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import mlx.core as mx
from mlx.nn.layers.base import Module

_ATTENTION, _GATE = "scaled_dot_product_attention", "swiglu"
_INSTALLING = threading.Lock()


@runtime_checkable
class CarriedCache(Protocol):
    """A layer's cache that computes attention over what it holds."""

    def attend(self, queries: mx.array, *, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of ``queries [B, Hq, L, Dk]``, gives ``[B, Hq, L, Dv]``; ``sinks`` are ``[Hq]`` or None."""
        ...


@dataclass(frozen=True)
class AttentionCall:
    """What a layer handed to `scaled_dot_product_attention`."""

    cache: Any  #: the layer's cache object, or None
    queries: mx.array  # [B, Hq, L, Dk]
    keys: Any  #: as its cache returned them; ``[B, H, T, Dk]`` from a stock cache
    values: Any
    scale: float
    mask: Any
    sinks: mx.array | None  # [Hq]


_seen: ContextVar[list[AttentionCall] | None] = ContextVar("amem_attention_calls", default=None)

#: ``swiglu(gate, x)``, or None for arrays that it does not compute.
Gate = Callable[[mx.array, mx.array], mx.array | None]
_gate: ContextVar[Gate | None] = ContextVar("amem_gate", default=None)


class _Dispatch:
    """Stands in one module's globals for the function it keeps."""

    def __init__(self, original: Callable[..., mx.array]) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        call = _as_call(*args, **kwargs)
        report(call)
        if hasattr(call.cache, "attend"):  # a protocol's own check takes as long as all of this call
            return cast("CarriedCache", call.cache).attend(
                call.queries, scale=call.scale, mask=call.mask, sinks=call.sinks
            )
        return self.original(*args, **kwargs)


def spied() -> bool:
    """Whether this thread's attention calls are collected."""
    return _seen.get() is not None


def report(call: AttentionCall) -> None:
    """Tell who collects this thread's attention calls of one."""
    seen = _seen.get()
    if seen is not None:
        seen.append(call)


class _GateDispatch:
    """Stands in one module's globals for `swiglu`."""

    def __init__(self, original: Callable[..., mx.array]) -> None:
        self.original = original

    def __call__(self, gate: mx.array, x: mx.array) -> mx.array:
        own = _gate.get()
        found = own(gate, x) if own is not None else None
        return self.original(gate, x) if found is None else found


def _as_call(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> AttentionCall:
    return AttentionCall(cache, queries, keys, values, scale, mask, sinks)


def install(model: Module) -> tuple[str, ...]:
    """Rebind the attention function in every module that defines a class of this model.

    Once per process and module, whichever thread or model comes first; doing it again changes nothing.

    Returns
    -------
    tuple of str
        The modules whose attention now passes through here, sorted; empty for a model without attention.
    """
    names = set()
    with _INSTALLING:
        for namespace in _namespaces(model, _ATTENTION):
            if not isinstance(namespace[_ATTENTION], _Dispatch):
                namespace[_ATTENTION] = _Dispatch(namespace[_ATTENTION])
            names.add(str(namespace.get("__name__", "?")))
        for namespace in _namespaces(model, _GATE):
            if not isinstance(namespace[_GATE], _GateDispatch):
                namespace[_GATE] = _GateDispatch(namespace[_GATE])
    return tuple(sorted(names))


def _namespaces(model: Module, name: str) -> list[dict[str, Any]]:
    """Globals of the modules that define this model's classes and know a function of this name."""
    modules = model.named_modules()
    classes = {cls for _, module in modules for cls in type(module).__mro__}
    found: dict[int, dict[str, Any]] = {}
    for cls in classes:
        home = sys.modules.get(cls.__module__)
        # a model file loaded from a folder may be missing from sys.modules; its functions still know their globals
        for namespace in (vars(home) if home else {}, getattr(cls.__call__, "__globals__", {})):
            if callable(namespace.get(name)):
                found[id(namespace)] = namespace
    return list(found.values())


@contextmanager
def gated(gate: Gate | None) -> Iterator[None]:
    """Let this thread's calls of `swiglu` be computed by ``gate`` while the block runs; None leaves them alone."""
    token = _gate.set(gate)
    try:
        yield
    finally:
        _gate.reset(token)


@contextmanager
def spy() -> Iterator[list[AttentionCall]]:
    """Collect this thread's attention calls while the block runs, in order. They keep their arrays alive."""
    calls: list[AttentionCall] = []
    token = _seen.set(calls)
    try:
        yield calls
    finally:
        _seen.reset(token)
