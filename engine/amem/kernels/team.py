"""A team of threads that compute the parts of a product or of attention, for callers that are no Python, too.

Parts of less than a millisecond are worth dividing only if handing over costs little, and a thread that sleeps takes
some 50 microseconds to wake up. So a worker looks for its next part for longer than that before it sleeps, and so does
who waits for the parts. Not longer: threads that wait by spinning, as OpenBLAS's do, cost a whole time slice for each
product where another process wants the core (measured: a prompt twenty times slower). Where a worker was waited for in
vain, the next products are computed by the calling thread alone: all parts, one after the other, so no bit of them
depends on it. (A library may give other bits for a part than for the whole.)
"""

from __future__ import annotations

import ctypes
import os
import threading

import numba as nb
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from amem.kernels.vectors import address_of, pointer

MOST_WORKERS = 63
#: Looks at a semaphore before a thread sleeps on it, of one to five nanoseconds each: a worker's for its next part, and
#: those for its end, by when it can have been woken up.
LOOKS_FOR_WORK, LOOKS_FOR_END = 120_000, 300_000
_TEAM = "amem_team"
_SEMAPHORE = 8  # words of 64 bits, so that each has a cache line
#: Products that are not handed over after one that was waited for in vain; twice as many after each further one.
RESTS, MOST_RESTS = 32, 2048
#: Words of a worker: its two semaphores, then what it is to do. The first worker's place has the team's own: a
#: semaphore for whoever may use the team, how many workers there are, how many more products rest, and how many
#: will the next time.
_WORK, _DONE, _FUNCTION, _ARGUMENTS, _PART, _STRIDE, _N_PARTS = 0, _SEMAPHORE, 16, 17, 18, 19, 20
_N_WORKERS, _RESTING, _NEXT_RESTS = 16, 17, 18
_WORDS = 24

#: Numba reads it by its address, so that what was compiled can be kept on disk.
_state: npt.NDArray[np.int64] = np.zeros((MOST_WORKERS + 1, _WORDS), np.int64)
_starting, _started = threading.Lock(), threading.Event()
binding.add_symbol(_TEAM, _state.ctypes.data)

_compiled = nb.njit(nogil=True, cache=True, error_model="numpy")
_semaphore_call = types.int32(types.int64)
_sem_wait, _sem_trywait, _sem_post = (
    types.ExternalFunction(name, _semaphore_call) for name in ("sem_wait", "sem_trywait", "sem_post")
)

#: What computes a part: ``function(address of the arguments, part, n_parts)``.
PART = types.void(types.int64, types.int64, types.int64)


@intrinsic
def _call(_typing, _function, _arguments, _part, _n_parts):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Call a function of the kind `PART` at an address."""
    word = ir.IntType(64)

    def lower(_context, builder, _signature, args):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        kind = ir.FunctionType(ir.VoidType(), [word] * 3)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return ir.Constant(ir.IntType(1), 1)

    return types.boolean(types.int64, types.int64, types.int64, types.int64), lower


@_compiled
def _await(semaphore: int, looks: int) -> bool:
    """Whether it came while it was looked for."""
    for _ in range(looks):
        if _sem_trywait(semaphore) == 0:
            return True
    while _sem_wait(semaphore) != 0:  # a signal woke it up
        pass
    return False


@nb.njit("void(i8)", nogil=True, cache=True, error_model="numpy")  # now: a worker that cannot be compiled never comes
def _serve(at: int) -> None:
    """The life of a worker whose words are at an address."""
    words = nb.carray(pointer(at), (_WORDS,), np.int64)
    while True:
        _await(at + 8 * _WORK, LOOKS_FOR_WORK)
        part = words[_PART]
        while part < words[_N_PARTS]:
            _call(words[_FUNCTION], words[_ARGUMENTS], part, words[_N_PARTS])
            part += words[_STRIDE]
        _sem_post(at + 8 * _DONE)


@_compiled
def n_threads() -> int:
    """How many threads there are to compute parts, who calls among them."""
    words = nb.carray(pointer(address_of(_TEAM)), (_WORDS,), np.int64)
    return int(words[_N_WORKERS] + 1)


@_compiled
def run(function: int, arguments: int, n_parts: int) -> None:
    """Let the part function at an address compute all of its parts, in this thread and others, and wait for them.

    Of ``n`` threads each takes every n-th part. Two callers take turns.
    """
    team = address_of(_TEAM)
    own = nb.carray(pointer(team), (_WORDS,), np.int64)
    if n_parts == 1 or own[_RESTING] > 0:
        own[_RESTING] -= n_parts > 1
        for part in range(n_parts):
            _call(function, arguments, part, n_parts)
        return
    _await(team + 8 * _WORK, LOOKS_FOR_WORK)
    n = min(n_parts, own[_N_WORKERS] + 1)
    for worker in range(1, n):
        at = team + 8 * _WORDS * worker
        words = nb.carray(pointer(at), (_WORDS,), np.int64)
        words[_FUNCTION], words[_ARGUMENTS], words[_N_PARTS] = function, arguments, n_parts
        words[_PART], words[_STRIDE] = worker, n
        _sem_post(at + 8 * _WORK)
    for part in range(0, n_parts, n):
        _call(function, arguments, part, n_parts)
    in_time = True
    for worker in range(1, n):
        in_time &= _await(team + 8 * _WORDS * worker + 8 * _DONE, LOOKS_FOR_END)
    if in_time:
        own[_NEXT_RESTS] //= 2
    else:
        own[_RESTING] = max(RESTS, own[_NEXT_RESTS])
        own[_NEXT_RESTS] = min(2 * own[_RESTING], MOST_RESTS)
    _sem_post(team + 8 * _WORK)


@nb.njit("void(i8, i8[::1], i8)", nogil=True, cache=True)
def run_parts(function: int, arguments: npt.NDArray[np.int64], n_parts: int) -> None:
    """The same for callers in Python, who let go of the interpreter meanwhile."""
    run(function, arguments.ctypes.data, n_parts)


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start() -> int:
    """Start a worker for each core but one, once in a process; how many there are."""
    if not _started.is_set():
        with _starting:
            if not _started.is_set():
                _state[0, _N_WORKERS] = _start(min(n_cores() - 1, MOST_WORKERS))
                _started.set()
    return int(_state[0, _N_WORKERS])


def _start(n_workers: int) -> int:
    """How many of the workers the system lets us have."""
    libc = ctypes.CDLL(None)
    address, stride = _state.ctypes.data, _state.strides[0]
    libc.sem_init(ctypes.c_void_p(address + 8 * _WORK), 0, 1)
    for worker in range(1, n_workers + 1):
        at = address + worker * stride
        for semaphore in (_WORK, _DONE):
            libc.sem_init(ctypes.c_void_p(at + 8 * semaphore), 0, 0)
        # they wait for the end of the process, without the interpreter's lock
        thread = threading.Thread(target=_serve, args=(at,), name=f"amem-team-{worker}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads are allowed
            return worker - 1
    return n_workers
