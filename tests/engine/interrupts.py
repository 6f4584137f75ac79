"""Ctrl-C at a chosen point of the main thread."""

import signal
import sys
import threading
import time
from concurrent.futures import Future

from amem.run.events import Events


def interrupt_main(when):
    """Ctrl-C, as soon as a condition holds."""

    def run():
        while not when():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=run, daemon=True).start()


def _codes():
    """What the main thread is in, the innermost call first."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def main_waits():
    """Whether the main thread waits for an event of a request."""
    return next(_codes()) is Events.get.__code__


def main_queues():
    """Whether the main thread waits for the owner thread to take what it asks for."""
    return Future.result.__code__ in _codes()
