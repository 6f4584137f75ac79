"""How attention is computed, chosen once when a model is loaded: MLX's operations, or kernels for Linux on a CPU."""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem.errors import InputError
from amem.kernels import can_compile, read_or_compile
from amem.kv import attention as reference
from amem.kv.attention import LayerView
from amem.kv.codec import Codec
from amem.kv.sequence import Join
from amem.model.hook import Gate

Floats = npt.NDArray[np.float32]

BACKENDS = ("auto", "reference", "cpu")
_REMEDY = f"`{sys.executable} -m pip install numba` and restart"


class Attend(Protocol):
    """See `amem.kv.attention.attend`."""

    def __call__(
        self, q: mx.array, view: LayerView, *, start: int, scale: float, codec: Codec, sinks: mx.array | None = None
    ) -> mx.array: ...


class AttendEvaluated(Protocol):
    """See `amem.kv.cpu.attend_evaluated`."""

    def __call__(self, q: Floats, view: LayerView, *, start: int, scale: float, codec: Codec) -> Floats: ...


@dataclass(frozen=True)
class Evaluated:
    """How a layer that computes its tokens by kernels stores and attends to them, in the thread that it runs in."""

    attend: AttendEvaluated
    join: Join


@dataclass(frozen=True)
class Backend:
    """One way to compute attention, and a feed-forward layer's gate."""

    name: str  #: "reference" or "cpu"
    attend: Attend
    gate: Gate | None = None  #: of many tokens at once; None: the model's own
    evaluated: Evaluated | None = None  #: for `amem.model.decoder`; None: its layers are left alone
    warning: str | None = None  #: why it is not the one that would be faster here


REFERENCE = Backend("reference", reference.attend)


def choose(name: str) -> Future[Backend]:
    """The backend of this name; "auto" is the one that suits this machine. It is got ready in a thread.

    The first time on a machine the kernels are compiled, which takes some twenty seconds; later they are read from
    numba's cache beside their source.

    Raises
    ------
        InputError: no such backend, or it cannot run here.
    """
    if name not in BACKENDS:
        raise InputError(f"unknown attention {name!r}: choose one of {', '.join(BACKENDS)}.")
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if name == "cpu" and not on_cpu:
        raise InputError("attention 'cpu' reads what MLX computed on the CPU, and it computes on a GPU: choose auto.")
    if name == "cpu" and not can_compile():
        raise InputError(f"attention 'cpu' needs numba, not disabled by NUMBA_DISABLE_JIT: {_REMEDY}, or choose auto.")
    future: Future[Backend] = Future()
    if name == "reference" or not on_cpu or (name == "auto" and sys.platform != "linux"):
        future.set_result(REFERENCE)
        return future
    pool = ThreadPoolExecutor(1, "amem-compile")
    future = pool.submit(_compiled)
    pool.shutdown(wait=False)
    return future


def _compiled() -> Backend:
    if not can_compile():
        warning = f"Attention is several times slower on the CPU without numba (or with NUMBA_DISABLE_JIT): {_REMEDY}."
        return Backend("reference", reference.attend, warning=warning)
    try:
        return read_or_compile(_kernels)
    except Exception as error:  # noqa: BLE001  # whatever numba does not like here, the reference computes the same
        warning = f"The CPU's attention kernels could not be compiled ({error}); attention is several times slower."
        return Backend("reference", reference.attend, warning=warning)


def _kernels() -> Backend:
    from amem.kernels import decoder  # noqa: F401  # to be compiled now
    from amem.kv.cpu import attend, attend_evaluated, join, swiglu

    return Backend("cpu", attend, swiglu, Evaluated(attend_evaluated, join))
