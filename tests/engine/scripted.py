"""Replies that a test chooses, on a real engine: the model computes, and what is sampled is what the test wants."""

import mlx.core as mx


class Replies:
    """Replies to come, as tokens; the requests take them in the order in which they start to decode."""

    def __init__(self):
        self.waiting = []

    def say(self, token_ids):
        """Say this next."""
        self.waiting.append(list(token_ids))

    def sampler(self, **options):
        """Stands in for `amem.asked.Sampler`; without a reply to come it is greedy."""
        del options
        ids = None

        def sample(logits):
            nonlocal ids
            if ids is None:
                ids = self.waiting.pop(0) if self.waiting else []
            return mx.array(ids.pop(0)) if ids else mx.argmax(logits)

        return sample
