"""The owner thread: jobs in order, its death, and who is told of it."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from amem.errors import EngineClosed
from amem.run.owner import OwnerThread


class Stepper:
    """Has nothing to do until it is told to die."""

    def __init__(self):
        self.deadly = threading.Event()
        self.failed = []
        self.fail_all_raises = None

    @property
    def busy(self):
        if self.deadly.is_set():
            self.deadly.clear()
            raise SystemExit("killed")
        return False

    def step(self):
        raise AssertionError("there is nothing to do")

    def fail_all(self, error):
        self.failed.append(error)


@pytest.fixture
def owner():
    made = OwnerThread()
    yield made
    made.close()


@pytest.fixture
def stepper(owner):
    made = Stepper()
    owner.drive(made)
    return made


def die(owner, stepper):
    """Let the thread die after its next job."""
    thread = owner._thread
    owner.call(stepper.deadly.set)
    thread.join(5)
    assert not thread.is_alive()


def test_all_who_wait_are_told_of_the_threads_death_at_once(owner, stepper):
    """Those in the scheduler, and those whose call has not begun."""
    started = threading.Event()

    def slow_and_deadly():
        started.set()
        time.sleep(0.2)
        stepper.deadly.set()

    owner.submit(slow_and_deadly)
    started.wait(5)
    queued = [owner.submit(lambda: "too late") for _ in range(3)]
    for future in queued:
        with pytest.raises(EngineClosed, match=r"died.*ask again") as raised:
            future.result(timeout=5)
        assert isinstance(raised.value.__cause__, SystemExit)
    assert 1 == len(stepper.failed)


def test_the_next_call_starts_the_thread_again(owner, stepper):
    """What the dead one left is dropped first, in the new thread; and again, if that dies too."""
    recovered = []
    owner.drive(stepper, recover=lambda: recovered.append(threading.current_thread()))
    first = owner.call(threading.current_thread)
    for count in (1, 2):
        die(owner, stepper)
        second = owner.call(threading.current_thread)
        assert second not in (first, threading.current_thread())
        assert count == len(recovered)
        assert second is recovered[-1]


def test_many_callers_find_one_new_thread(owner, stepper):
    """They do not start one each."""
    die(owner, stepper)
    with ThreadPoolExecutor(8) as callers:
        threads = set(callers.map(lambda _: owner.call(threading.current_thread), range(100)))
    assert 1 == len(threads)


def test_a_dead_thread_can_be_closed(owner, stepper):
    """And stays closed."""
    die(owner, stepper)
    owner.close()
    with pytest.raises(EngineClosed, match="closed"):
        owner.call(lambda: None)


def test_a_failing_job_tells_its_caller_alone(owner, stepper):
    """Even if it asks for the interpreter's end."""
    with pytest.raises(SystemExit):
        owner.call(lambda: (_ for _ in ()).throw(SystemExit(3)))
    assert 7 == owner.call(lambda: 7)
    assert not stepper.failed


def test_a_forked_process_is_told_to_make_its_own(owner):
    """It has no such thread, and waiting for one would never end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover  # the child
        try:
            owner.call(lambda: None)
            os.write(write, b"served")
        except EngineClosed as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    assert "forked" in os.read(read, 1000).decode()
    os.close(read)
    os.waitpid(pid, 0)
