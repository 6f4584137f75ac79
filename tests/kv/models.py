"""Tiny models of every architecture that is carried, run over sequences as the engine runs them."""

import importlib.util
import math
from functools import lru_cache

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from amem.kv.backend import choose
from amem.kv.codec import make_codec
from amem.kv.sequence import SequenceState, StateLayout
from amem.model.hook import install
from amem.model.probe import probe
from amem.run.runner import Runner
from tests.architectures import ARCHITECTURES, VOCABULARY
from tests.kv import states

#: Whether the kernels for Linux on a CPU can be had.
CPU = importlib.util.find_spec("numba") is not None and mx.default_device() == mx.Device(mx.cpu)


@lru_cache(maxsize=1)  # tests of one architecture follow one another
def machine(name):
    """A model, a runner of it for each attention, and its cache spec."""
    model = ARCHITECTURES[name]()
    install(model)
    runners = {
        backend: Runner(model, lambda: make_prompt_cache(model), choose(backend).result())
        for backend in ("reference", *(("cpu",) if CPU else ()))
    }
    return runners, probe(model)


def layout(name, codec):
    return StateLayout(machine(name)[1], make_codec(codec))


def runner(name, attention):
    return machine(name)[0][attention]


def token_ids(n_tokens, seed):
    return np.random.default_rng(seed).integers(0, VOCABULARY, n_tokens).tolist()


class Conversation:
    """A sequence, the ids that it is fed, and the blocks that were exported as soon as they were full."""

    def __init__(self, name, the_layout, pool, ids, attention="reference"):
        self.runner = runner(name, attention)
        self.state = SequenceState(the_layout, pool)
        self.ids = ids
        self.blocks = []

    def prefill(self, lengths):
        for length in lengths:
            at = self.state.n_tokens
            assert self.runner.prefill(self.state, self.ids[at : at + length]).advance(math.inf)
            self.export()

    def decode(self, steps):
        """Logits ``[steps, V]`` of the next tokens, fed one by one."""
        return np.concatenate([decode([self]) for _ in range(steps)])

    def export(self):
        while len(self.blocks) < self.state.n_groups // 4:
            self.blocks.append(self.state.export_block(len(self.blocks) * 4, 4))

    def end_turn(self):
        self.state.close_turn()
        self.export()
        self.tail = self.state.export_block(len(self.blocks) * 4, n) if (n := self.state.n_groups % 4) else None
        self.state.settle()

    def restored(self, pool, snapshot=None):
        """Another sequence from this one's plain form, which must be at a turn's end."""
        state, the_layout = self.state, self.state.layout
        stored = [*self.blocks, self.tail] if self.tail else self.blocks
        twin = object.__new__(Conversation)
        twin.runner, twin.ids, twin.blocks = self.runner, self.ids, list(self.blocks)
        open_group = state.export_snapshot() if snapshot is None else snapshot
        twin.state = states.restored(the_layout, pool, stored, open_group, state.n_tokens)
        return twin

    def forked(self):
        twin = object.__new__(Conversation)
        twin.runner, twin.ids, twin.blocks = self.runner, self.ids, list(self.blocks)
        twin.state = self.state.fork()
        return twin


def decode(conversations):
    """One token for each, in one batch: logits ``[B, V]``."""
    fed = [conversation.ids[conversation.state.n_tokens] for conversation in conversations]
    logits = conversations[0].runner.decode([conversation.state for conversation in conversations], fed)
    for conversation in conversations:
        conversation.export()
    return np.array(logits)


def arrays(state, checkpoint=None):
    """Every array that a sequence (and a checkpoint of it) holds, each once."""
    found = [array for lane in state.lanes for run in lane._runs() for array in run.arrays()]
    for layers, recurrent in [
        (state._open, state.recurrent),
        *([(checkpoint.layers, checkpoint.recurrent)] if checkpoint else []),
    ]:
        for held in layers.values():
            found += [array for pair in (held.exact, held.before, held.first) if pair for array in pair]
        found += [array for kept in recurrent.values() for array in kept if array is not None]
    return list({id(array): array for array in found}.values())


def nbytes(found):
    return sum(array.nbytes for array in found)


@st.composite
def chunkings(draw, n_tokens):
    """Step lengths that cover some tokens."""
    lengths = []
    while (left := n_tokens - sum(lengths)) > 0:
        lengths.append(min(left, draw(st.sampled_from([1, 17, 63, 64, 65, 128, 200]))))
    return lengths
