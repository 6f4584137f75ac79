"""Chunks of a prompt that are left between two layers and taken up again."""

import math

import numpy as np
import pytest

from amem.errors import MemoryBudgetError
from amem.kv.pool import Pool
from amem.kv.sequence import SequenceState
from tests.kv import models

attentions = pytest.mark.parametrize(
    "attention",
    [
        "reference",
        pytest.param("cpu", marks=pytest.mark.skipif(not models.CPU, reason="needs numba, and MLX on the CPU")),
    ],
)


def sequence(budget=10**9):
    return SequenceState(models.layout("llama", "q4"), Pool(budget))


@attentions
def test_a_chunk_is_left_after_each_layer_and_no_bit_differs(attention):
    """Between the parts of a chunk other sequences decode; both get what they get alone."""
    runner, ids = models.runner("llama", attention), models.token_ids(130, 0)
    whole, parted, other = sequence(), sequence(), sequence()
    assert runner.prefill(whole, ids).advance(math.inf)
    wanted = np.array(runner.decode([whole], [5]))
    runner.prefill(other, ids[:70]).advance(math.inf)
    twin = other.fork()
    alone = [np.array(runner.decode([twin], [token])) for token in range(2)]
    chunk, n_parts, between = runner.prefill(parted, ids), 1, []
    while not chunk.advance(0):
        n_parts += 1
        if len(between) < 2:
            between.append(np.array(runner.decode([other], [len(between)])))
    assert n_parts > len(parted.layout.spec.layers)
    assert np.array_equal(wanted, np.array(runner.decode([parted], [5])))
    assert np.array_equal(alone, between)


@attentions
def test_a_chunk_that_is_not_finished_can_be_dropped(attention):
    """A cancelled request leaves its chunk in the middle; its sequence gives all memory back."""
    runner, one = models.runner("llama", attention), sequence()
    chunk = runner.prefill(one, models.token_ids(130, 0))
    assert not chunk.advance(0)
    pool = one._pool
    del chunk
    one.release()
    assert 0 == pool.used


@attentions
def test_a_chunk_without_room_is_refused_before_it_begins(attention):
    """The budget is asked when the chunk is made, not in the middle of the model."""
    with pytest.raises(MemoryBudgetError):
        models.runner("llama", attention).prefill(sequence(budget=200_000), models.token_ids(640, 0))
