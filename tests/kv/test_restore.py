"""Restoring in place: what lands where, that nothing is copied on the way, and that no bit changes."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amem.errors import MemoryBudgetError
from amem.kv.codec import make_codec
from amem.kv.memory import unfilled, view_of
from amem.kv.pool import Pool
from amem.kv.restore import RestoreBuffers
from amem.kv.sequence import SequenceState, StateLayout
from amem.model import spec
from tests.kv import states
from tests.kv.test_sequence import CODECS, LAYERS, feed_and_export, many, same_outputs


def closed(n_tokens, codec="q4"):
    """A sequence at a turn's end, and all its blocks, the tail included."""
    sequence = states.new_sequence(states.layout(*LAYERS, codec=codec))
    blocks = []
    feed_and_export(sequence, many(1000), [128] * (n_tokens // 128) + [n_tokens % 128] * (n_tokens % 128 > 0), blocks)
    sequence.close_turn()
    states.export_full(sequence, blocks)
    if sequence.n_groups % 4:
        blocks.append(sequence.export_block(len(blocks) * 4, sequence.n_groups % 4))
    return sequence, blocks


@settings(deadline=None, max_examples=25)
@given(codec=CODECS, n_tokens=st.integers(64, 700), back=st.integers(0, 6), more=st.integers(1, 100))
def test_a_restore_that_ends_inside_a_block_has_the_bits_of_a_shorter_history(codec, n_tokens, back, more):
    """The groups before the cut, the window's part of them, and all that follows are as if no more had been said."""
    sequence, blocks = closed(n_tokens, codec)
    kept = max(0, sequence.n_groups - back) * 64
    pool = Pool(10**9)
    short, _ = closed(kept, codec)
    cut = states.restored(sequence.layout, pool, blocks, {}, kept)
    assert kept == cut.n_tokens == short.n_tokens
    data = many(kept + more + 1, 7)
    assert same_outputs(*(feed_and_export(one, data, [more, 1], [{}] * 9) for one in (short, cut)))
    for one in (short, cut):
        one.close_turn()
    assert states.equal_bits(states.bits(short), states.bits(cut))
    cut.release()
    assert (0, 0) == (pool.used, pool.n_live)


def address(array):
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False).ctypes.data


@pytest.mark.parametrize("codec", spec.CODECS)
def test_attention_reads_the_very_memory_that_blocks_are_read_into(codec):
    """No byte is copied between a file's read and attention: the arrays of the runs are the buffers."""
    sequence, blocks = closed(600, codec)
    stored = states.filled(sequence.layout, blocks, 600)
    twin = states.new_sequence(sequence.layout)
    twin.adopt(stored, sequence.export_snapshot())
    n_seen = 0
    for index, lane in enumerate(twin.lanes):
        for span in lane.spans:
            block = span.start_group // 4
            for name in lane.codec.part_shapes(lane.shape):
                target = stored.block(block)[f"{index}.{name}"]
                for layer in range(lane.n_layers):
                    assert target[layer].ctypes.data == address(span.run.parts(layer, 0, span.n_groups)[name])
                    n_seen += 1
    assert n_seen > len(LAYERS)


def test_what_is_not_seen_any_more_has_no_room():
    """A windowed lane has room for the blocks that its window touches, and lists no others."""
    stored = RestoreBuffers(states.layout(states.layer(0), states.layer(1, window=96)), 1000)
    assert [0, 12] == stored.first_groups
    names = [{name[0] for name in stored.block(index)} for index in range(stored.n_blocks)]
    assert [{"0"}, {"0"}, {"0"}, {"0", "1"}] == names


def test_no_old_memory_stays_where_no_block_is_read():
    """Room for groups to come is zero: what the memory held before may belong to another agent."""
    the_layout = states.layout(states.layer(0, window=300), codec="fp16")
    for _ in range(3):
        stored = RestoreBuffers(the_layout, 64 * 6)
        for run in stored._views[0]:
            for view in run.values():
                view[...] = 7  # the next buffers may get this memory
        stored = RestoreBuffers(the_layout, 64 * 6)
        assert all((view[:, 2:] == 0).all() for view in stored._views[0][-1].values())


@pytest.mark.parametrize("codec", ["q4", "exact"])
def test_a_bfloat16_state_is_restored(codec):
    """Bfloat16 is unknown to numpy: the bits are carried as 16-bit integers, in place as well."""
    layer = states.layer(0)
    the_layout = StateLayout(states.layout(layer, dtype="bfloat16").spec, make_codec(codec, compute_dtype=mx.bfloat16))
    sequence = states.new_sequence(the_layout)
    _, k, v = (mx.array(x).astype(mx.bfloat16) for x in states.random_qkv(layer, 300))
    sequence.begin_step(300)
    sequence.append(0, k, v)
    sequence.end_step(300)
    sequence.close_turn()
    block = sequence.export_block(0, 4)
    assert np.uint16 == block["0.k" if codec == "exact" else "0.k.first"].dtype
    twin = states.new_sequence(the_layout)
    twin.adopt(states.filled(the_layout, [block], 300), sequence.export_snapshot())
    assert states.equal_bits(states.bits(sequence), states.bits(twin))


def test_a_restore_that_does_not_fit_takes_nothing():
    """The budget is asked before the runs are taken over."""
    sequence, blocks = closed(600)
    pool = Pool(sequence.layout.open_nbytes + 1000)
    twin = SequenceState(sequence.layout, pool)
    with pytest.raises(MemoryBudgetError):
        twin.adopt(states.filled(sequence.layout, blocks, 600), {})
    twin.release()
    assert (0, 0) == (pool.used, pool.n_live)


def test_unfilled_arrays_are_writable_through_their_views():
    """What is written through a view is what MLX reads, for every dtype that is stored."""
    shapes = {f"{dtype}": ((3, 5, 8), dtype) for dtype in (mx.uint32, mx.float16, mx.bfloat16, mx.float32)}
    arrays = unfilled(shapes)
    assert shapes == {name: (array.shape, array.dtype) for name, array in arrays.items()}
    for array in arrays.values():
        view = view_of(array)
        bits = np.arange(view.size, dtype=np.uint16).reshape(view.shape).astype(view.dtype)
        view[...] = bits
        assert np.array_equal(bits, view_of(array))
        assert mx.array_equal(array, mx.array(bits).view(array.dtype)).item()
    assert {} == unfilled({})
