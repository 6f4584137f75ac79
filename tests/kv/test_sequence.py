"""What may never change an agent's bits: restore, fork, rollback, cutting, chunking of what is stored."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amem.errors import MemoryBudgetError
from amem.kv.pool import Pool
from amem.kv.sequence import SequenceState
from amem.model import spec
from amem.model.capacity import capacity
from tests.kv import states
from tests.kv.test_attention import chunkings

LAYERS = [states.layer(0), states.layer(1, window=96), states.layer(2), states.layer(3, heads=1, k_dim=96, v_dim=32)]
CODECS = st.sampled_from(spec.CODECS)


def many(n_tokens, seed=0):
    return {layer.index: states.random_qkv(layer, n_tokens, seed + layer.index) for layer in LAYERS}


def feed_and_export(sequence, data, lengths, blocks):
    outs = []
    for length in lengths:
        outs.append(states.step(sequence, data, sequence.n_tokens, length))
        states.export_full(sequence, blocks)
    return outs


def same_outputs(one, other):
    return all(np.array_equal(a[slot], b[slot]) for a, b in zip(one, other, strict=True) for slot in a)


@settings(deadline=None, max_examples=25)
@given(codec=CODECS, lengths=chunkings(most=700), more=st.integers(1, 140), seed=st.integers(0, 99))
def test_a_restored_sequence_goes_on_bit_for_bit(codec, lengths, more, seed):
    """restore(save(x)) == x, and every later output is the same; with windows, of what the window still sees."""
    total = sum(lengths)
    data = many(total + more + 3, seed)
    pool = Pool(10**9)
    sequence = SequenceState(states.layout(*LAYERS, codec=codec), pool)
    blocks = []
    feed_and_export(sequence, data, lengths, blocks)
    sequence.close_turn()
    states.export_full(sequence, blocks)
    twin = states.twin(sequence, blocks, pool)
    assert sequence.n_tokens == twin.n_tokens == total
    assert states.equal_bits(sequence.export_snapshot(), twin.export_snapshot())
    for slot in (0, 2):
        lane = sequence.layout.slots()[slot][0]
        assert 0 == twin.lanes[lane].first_group
    steps = [more, 1, 1, 1]
    more_blocks = [list(blocks), list(blocks)]
    assert same_outputs(
        feed_and_export(sequence, data, steps, more_blocks[0]), feed_and_export(twin, data, steps, more_blocks[1])
    )
    assert all(states.equal_bits(a, b) for a, b in zip(*more_blocks, strict=True))
    sequence.release()
    twin.release()
    assert 0 == pool.used
    assert 0 == pool.n_live


@settings(deadline=None, max_examples=25)
@given(codec=CODECS, lengths=chunkings(most=400), more=st.lists(st.integers(1, 90), min_size=1, max_size=4))
def test_fork_and_rollback_change_no_bit(codec, lengths, more):
    """A fork and its parent go on alike and apart; a rolled back sequence is as it was, or says that it cannot be."""
    total = sum(lengths)
    data, other = many(total + sum(more), 1), many(total + sum(more), 2)
    pool = Pool(10**9)
    parent = SequenceState(states.layout(*LAYERS, codec=codec), pool)
    blocks = []
    feed_and_export(parent, data, lengths, blocks)
    parent.close_turn()
    states.export_full(parent, blocks)
    parent.settle()
    used, before = pool.used, parent.checkpoint()
    snapshot = parent.export_snapshot()
    child = parent.fork()
    assert pool.used - used == parent.layout.open_nbytes  # nothing but an open group was taken
    third = parent.fork()
    feed_and_export(child, other, more, list(blocks))  # the other goes another way first
    first = feed_and_export(parent, data, more, list(blocks))
    if parent.rollback(before):
        assert states.equal_bits(snapshot, parent.export_snapshot())
        assert same_outputs(first, feed_and_export(parent, data, more, list(blocks)))
    assert same_outputs(first, feed_and_export(third, data, more, list(blocks)))
    for sequence in (parent, child, third):
        sequence.release()
    assert 0 == pool.used


@settings(deadline=None, max_examples=40)
@given(codec=CODECS, lengths=chunkings(most=300), back=st.integers(0, 127), more=st.integers(1, 70))
def test_cutting_back_equals_never_having_gone_there(codec, lengths, back, more):
    """A stop string's tokens leave no trace; too far back is refused and changes nothing."""
    layers = [states.layer(0), states.layer(1, heads=1)]
    total = sum(lengths)
    keep = total - back
    if keep < 1:
        return
    data = {layer.index: states.random_qkv(layer, total + more, layer.index) for layer in layers}
    went = states.new_sequence(states.layout(*layers, codec=codec))
    feed_and_export(went, data, lengths, [])
    before = states.bits(went)
    sealed = went.n_groups * 64
    if not went.cut(keep):
        assert keep < max(sealed - 63, 1) or keep < sealed - 64
        assert total == went.n_tokens
        assert states.equal_bits(before, states.bits(went))
        return
    never = states.new_sequence(states.layout(*layers, codec=codec))
    feed_and_export(never, data, [keep], [])
    went.close_turn()
    never.close_turn()
    assert states.equal_bits(states.bits(never), states.bits(went))
    assert same_outputs(feed_and_export(never, data, [more], []), feed_and_export(went, data, [more], []))


def test_a_windowed_lane_holds_only_what_its_window_touches():
    """After thousands of tokens the windowed layer holds a few blocks, the full one all of them."""
    layers = [states.layer(0), states.layer(1, window=300)]
    data = {layer.index: states.random_qkv(layer, 3000, layer.index) for layer in layers}
    sequence = states.new_sequence(states.layout(*layers))
    sequence.reserve(3000, 128)
    free = sequence._pool.free
    feed_and_export(sequence, data, [128] * 23, [])
    full, windowed = sequence.lanes
    assert free == sequence._pool.free  # what was reserved was enough
    assert 45 == full.n_groups - full.first_group
    assert windowed.n_groups - windowed.first_group <= (300 // 256 + 2) * 4 + 2
    assert windowed.nbytes < full.nbytes / 2


@pytest.mark.parametrize("n_before", [70, 200, 330])
def test_a_windowed_fork_exports_whole_blocks(n_before):
    """A fork's runs need not begin where blocks do; no group of a block is dropped before the block is exported."""
    layers = [states.layer(0), states.layer(1, window=96)]
    data = {layer.index: states.random_qkv(layer, 1000, layer.index) for layer in layers}
    steps = [*[64] * 10, 1, 1]
    whole, parent = (states.new_sequence(states.layout(*layers)) for _ in range(2))
    blocks, fork_blocks = [], []
    feed_and_export(whole, data, [n_before, *steps], blocks)
    feed_and_export(parent, data, [n_before], fork_blocks)
    child = parent.fork()
    parent.release()
    feed_and_export(child, data, steps, fork_blocks)
    assert all(states.equal_bits(a, b) for a, b in zip(blocks, fork_blocks, strict=True))
    for sequence in (whole, child):
        sequence.close_turn()
    tail = [sequence.export_block(len(blocks) * 4, sequence.n_groups % 4) for sequence in (whole, child)]
    assert states.equal_bits(*tail)


@settings(deadline=None, max_examples=25)
@given(
    codec=CODECS,
    n_tokens=st.integers(64, 900),
    max_tokens=st.integers(1, 200),
    window=st.sampled_from([40, 96, 300, 512]),
)
def test_an_idle_sequence_takes_what_capacity_says(codec, n_tokens, max_tokens, window):
    """Restored, it has one open group and the blocks of its windows; a turn takes more, and gives all of it back."""
    layers = [states.layer(0, heads=1), states.layer(1, heads=1, window=window)]
    the_layout = states.layout(*layers, codec=codec)
    data = {layer.index: states.random_qkv(layer, n_tokens + 1, layer.index) for layer in layers}
    pool = Pool(10**9)
    sequence, blocks = SequenceState(the_layout, pool), []
    feed_and_export(sequence, data, [64] * (n_tokens // 64) + [n_tokens % 64] * (n_tokens % 64 > 0), blocks)
    sequence.close_turn()
    states.export_full(sequence, blocks)
    sequence.settle()
    twin = states.twin(sequence, blocks, pool)
    sequence.release()
    told = capacity(the_layout.spec, memory_bytes=0, context=n_tokens, codec=codec)
    first = 0 if told.first_nbytes else the_layout.exact_nbytes(the_layout.codec.n_exact)
    assert pool.used == twin.nbytes == told.agent_nbytes_most + first
    missing = twin.missing_nbytes(n_tokens + max_tokens)
    twin.reserve(n_tokens + max_tokens)
    assert pool.used == twin.nbytes == told.agent_nbytes_most + first + missing
    assert 0 == twin.missing_nbytes(n_tokens + max_tokens)
    twin.settle()
    assert pool.used == twin.nbytes == told.agent_nbytes_most + first


def test_a_reservation_that_does_not_fit_changes_nothing():
    """The budget is checked before a step, not during one."""
    layer = states.layer()
    the_layout = states.layout(layer)
    sequence = states.new_sequence(the_layout, budget=the_layout.open_nbytes + the_layout.turn_nbytes + 20_000)
    used = sequence._pool.used
    with pytest.raises(MemoryBudgetError, match="evict or unpin"):
        sequence.reserve(10_000)
    assert used == sequence._pool.used


def test_a_long_sequence_is_read_in_few_pieces():
    """Many small reservations end in a handful of runs, and no bit depends on them."""
    layer = states.layer()
    data = {0: states.random_qkv(layer, 3000)}
    grown, whole = states.new_sequence(states.layout(layer)), states.new_sequence(states.layout(layer))
    for start in range(0, 2816, 128):
        grown.reserve(start + 128)
        states.step(grown, data, start, 128)
    for start in range(0, 2816, 128):
        states.step(whole, data, start, 128)
    assert len(grown.lanes[0].spans) <= 5
    assert states.equal_bits(states.bits(whole), states.bits(grown))
    grown.release()
    assert 0 == grown._pool.used
