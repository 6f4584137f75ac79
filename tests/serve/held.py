"""Replies that last until a test lets them end: what is true meanwhile is a matter of conditions, not of time."""

import threading

import mlx.core as mx

END = 2  # the tiny model's end of a turn


class Held:
    """The next requests of an engine that are held; others are sampled as ever."""

    def __init__(self, real):
        self._real = real
        self._n = 0
        self._free = threading.Event()

    def hold(self, n=1):
        """Hold as many requests, in the order in which they are queued. Greedy, they say all but the end."""
        self._n = n
        self._free = threading.Event()

    def let_go(self):
        """End those that are held with their next token."""
        self._free.set()

    def sampler(self, **options):
        """Stands in for `amem.run.sampler.Sampler` where requests are made."""
        if not self._n:
            return self._real(**options)
        self._n -= 1
        free = self._free

        def sample(logits):
            if free.is_set():
                return mx.array(END)
            return mx.argmax(mx.where(mx.arange(logits.size) == END, -mx.inf, logits))

        return sample
