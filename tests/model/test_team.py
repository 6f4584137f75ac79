"""Parts of products, computed by several threads."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None or sys.platform != "linux",
    reason="needs numba, and Linux's semaphores",
)


@pytest.fixture(scope="module")
def team():
    from amem.kernels import team

    team.start()
    return team


@pytest.fixture(scope="module")
def marking(team):
    """Runs a part function that counts, for each part, how often it was computed and of how many."""
    import numba as nb

    from amem.kernels.vectors import pointer

    def mark(arguments, part, n_parts):
        words = nb.carray(pointer(arguments), (2 * 64,), np.int64)
        words[part] += 1
        words[64 + part] = n_parts

    function = nb.cfunc(team.PART, nopython=True)(mark)

    @nb.njit(nogil=True)
    def go(address, arguments, n_parts, times):
        for _ in range(times):
            team.run(address, arguments, n_parts)

    return lambda words, n_parts, times=1: go(function.address, words.ctypes.data, n_parts, times)


def parts(team):
    return team.start() + 1


@pytest.mark.parametrize("resting", [0, 3])
def test_every_part_is_computed_once(team, marking, resting):
    """With workers, and while products rest because a worker was waited for in vain."""
    team._state[0, team._RESTING] = resting
    for n_parts in range(1, parts(team) + 3):  # more than there are workers, too
        words = np.zeros(128, np.int64)
        marking(words, n_parts, 50)
        assert words[:n_parts].tolist() == [50] * n_parts
        assert not words[n_parts:64].any()
        assert words[64 : 64 + n_parts].tolist() == [n_parts] * n_parts


def test_callers_take_turns(team, marking):
    """Threads of several engines divide their products at the same time."""
    every = [np.zeros(128, np.int64) for _ in range(4)]
    threads = [threading.Thread(target=marking, args=(words, parts(team), 2000)) for words in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for words in every:
        assert words[: parts(team)].tolist() == [2000] * parts(team)


def test_a_worker_that_is_late_is_not_waited_for_again_at_once(team):
    """The products after it are computed by the caller alone, and divided again later."""
    import numba as nb

    from amem.kernels.vectors import pointer

    if parts(team) < 2:
        pytest.skip("one core: there is no worker")

    def late(arguments, part, _n_parts):
        total = 0.0
        for i in range(10_000_000 * min(part, 1)):  # some ten milliseconds
            total += np.sqrt(np.float64(i))
        nb.carray(pointer(arguments), (2,), np.float64)[part] = total

    function = nb.cfunc(team.PART, nopython=True)(late)

    @nb.njit(nogil=True)
    def go(address, arguments, n_parts):
        team.run(address, arguments, n_parts)

    found = np.zeros(2)
    team._state[0, team._RESTING] = team._state[0, team._NEXT_RESTS] = 0
    go(function.address, found.ctypes.data, 2)
    assert found[1] > 0
    assert team._state[0, team._RESTING] == team.RESTS
    go(function.address, found.ctypes.data, 2)
    assert team._state[0, team._RESTING] == team.RESTS - 1
    go(function.address, found.ctypes.data, 1)
    assert team._state[0, team._RESTING] == team.RESTS - 1  # it had nothing to divide
    for times in (2, 4):
        team._state[0, team._RESTING] = 0
        go(function.address, found.ctypes.data, 2)
        assert team._state[0, team._RESTING] == times * team.RESTS
    team._state[0, team._RESTING] = team._state[0, team._NEXT_RESTS] = 0


def test_workers_are_started_once(team):
    assert team.start() == team.start()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("amem-team-")]
    assert len(names) == team.start()


def test_who_holds_the_interpreter_can_multiply_beside_an_attention(team):
    """`mx.save` evaluates without letting go of the interpreter: parts that needed it would wait for ever."""
    code = """
import threading, mlx.core as mx, numpy as np
from amem.model import blas, packed
blas.ensure(); packed.prepare().result()
from tests.kv import states
from amem.kv import backend, cpu
cpu.WORTH = 1
def attend():
    layer = states.layer(heads=4, heads_q=8)
    for _ in range(20):
        qkv = states.random_qkv(layer, 600)
        states.feed(states.new_sequence(states.layout(layer)), {0: qkv}, [500, 100], attend=backend.choose("cpu").result().attend)
thread = threading.Thread(target=attend)
thread.start()
x, w = mx.random.normal((64, 512)), mx.random.normal((2048, 512))
n = 0
while thread.is_alive():
    mx.save("/dev/null", x @ w.T) if n % 2 else mx.eval(x @ w.T)
    n += 1
print(n)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) > 0
