"""Rules 1 to 5 of the design over a tiny random model of every architecture that is carried."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amem.kv.pool import Pool
from amem.kv.sequence import first_block_seen
from amem.model.spec import group_nbytes
from tests.architectures import CARRIED
from tests.kv import models
from tests.kv.models import Conversation

WINDOWED = ("gemma3_text", "gpt_oss")

#: How far logits may be apart, as a part of their spread, where another batch or chunking sums in another order.
ROUNDING = 1e-4
#: The same in nats under q4, where a sum that differs in its last bit can move a value by one of its 16 levels.
KL = 1e-3

#: A batch that grows and shrinks: prompt, chunks, and the steps in which each sequence decodes.
RAGGED = [(0, [], range(5)), (70, [64, 6], range(1, 4)), (150, [17, 128, 5], range(3))]

few = settings(deadline=None, max_examples=2, derandomize=True)
every_architecture = pytest.mark.parametrize("name", CARRIED)
both_attentions = pytest.mark.parametrize(
    "attention",
    [
        "reference",
        pytest.param("cpu", marks=pytest.mark.skipif(not models.CPU, reason="needs numba, and MLX on the CPU")),
    ],
)


def apart(one, other):
    """The largest difference of logits ``[n, V]`` as a part of their spread."""
    return (np.abs(one - other).max(-1) / (one.max(-1) - one.min(-1))).max()


def kl(one, other):
    """The largest KL divergence of two rows of logits."""
    p, q = (x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
            for x in (one.astype(np.float64), other.astype(np.float64)))  # fmt: skip
    return (np.exp(p) * (p - q)).sum(-1).max()


@st.composite
def members(draw, n_steps):
    """A sequence of a ragged batch: its prompt, how that is chunked, and in which steps it decodes."""
    n_prompt = draw(st.integers(0, 150))
    start = draw(st.integers(0, n_steps - 1))
    return n_prompt, draw(models.chunkings(n_prompt)), range(start, draw(st.integers(start + 1, n_steps)))


@every_architecture
@both_attentions
@few
@given(codec=st.sampled_from(["exact", "q4"]), batch=st.lists(members(n_steps=5), min_size=2, max_size=3))
@example(codec="exact", batch=RAGGED)
@example(codec="q4", batch=RAGGED)
def test_a_ragged_batch_gives_each_sequence_what_it_gets_alone(name, attention, codec, batch):
    """Sequences of any lengths and chunkings join and leave between steps; each has its own RoPE offsets and masks."""
    the_layout, pool = models.layout(name, codec), Pool(10**9)
    alone, joined, ids = [], [], []
    for seed, (n_prompt, chunks, steps) in enumerate(batch):
        ids.append(models.token_ids(n_prompt + len(steps), seed))
        one = Conversation(name, the_layout, pool, ids[-1], attention)
        one.prefill([n_prompt] if n_prompt else [])
        alone.append(one.decode(len(steps)))
        one.state.release()
        other = Conversation(name, the_layout, pool, ids[-1], attention)
        other.prefill(chunks)
        joined.append(other)
    rows = [[] for _ in batch]
    for step in range(5):
        now = [at for at, (_, _, steps) in enumerate(batch) if step in steps]
        for at, row in zip(now, models.decode([joined[at] for at in now]) if now else [], strict=True):
            rows[at].append(row)
    for at, conversation in enumerate(joined):
        assert len(ids[at]) == conversation.state.n_tokens
        together = np.stack(rows[at])
        assert kl(alone[at], together) < KL if codec == "q4" else apart(alone[at], together) < ROUNDING
        conversation.state.release()
    assert 0 == pool.used


@every_architecture
@both_attentions
@few
@given(codec=st.sampled_from(["q4", "fp16"]), n_tokens=st.integers(1, 330), more=st.integers(1, 80), data=st.data())
def test_evicted_and_forked_sequences_go_on_bit_for_bit(name, attention, codec, n_tokens, more, data):
    """restore(save(x)) == x at a turn's end, as the logits of all that follows show; recurrent states are in it."""
    pool = Pool(10**9)
    one = Conversation(name, models.layout(name, codec), pool, models.token_ids(n_tokens + more + 2, 0), attention)
    one.prefill(data.draw(models.chunkings(n_tokens)))
    one.end_turn()
    twins = [one.restored(pool), one.forked(), one]
    logits = []
    for twin in twins:
        twin.prefill([more])
        logits.append(twin.decode(2))
        twin.end_turn()
        assert n_tokens + more + 2 == twin.state.n_tokens
    for twin, found in zip(twins[:2], logits, strict=False):
        assert np.array_equal(logits[2], found)
        assert same_bits(one, twin)
    for twin in twins:
        twin.state.release()
    assert (0, 0) == (pool.used, pool.n_live)


def same_bits(one, other):
    """Every stored bit of two conversations at the end of the same turn."""
    pairs = [*zip(one.blocks, other.blocks, strict=True), (one.tail or {}, other.tail or {})]
    pairs.append((one.state.export_snapshot(), other.state.export_snapshot()))
    return all(a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a) for a, b in pairs)


@every_architecture
@both_attentions
def test_no_bit_of_a_sequence_depends_on_its_neighbours(name, attention):
    """Canaries: neighbours with other tokens, and one whose state is all NaN, leave every logit as it is."""
    the_layout, pool = models.layout(name, "q4"), Pool(10**9)
    found = []
    for seed in (1, 2, 3):
        batch = [
            Conversation(name, the_layout, pool, models.token_ids(80, seed if at != 1 else 0), attention)
            for at in range(3)
        ]
        for conversation, n_prompt in zip(batch, (30, 70, 75), strict=True):
            conversation.prefill([n_prompt])
        if seed == 3:
            batch[2].end_turn()
            snapshot = {key: np.full_like(x, np.nan) for key, x in batch[2].state.export_snapshot().items()}
            batch[2] = batch[2].restored(pool, snapshot)
        found.append([models.decode(batch) for _ in range(4)])
    mine, others = np.array(found)[:, :, 1], np.array(found)[:, :, [0, 2]]
    assert np.isfinite(mine).all()
    assert np.array_equal(mine[0], mine[1])
    assert np.array_equal(mine[0], mine[2])
    assert np.isnan(others[2, :, 1]).all()
    assert not np.array_equal(others[0], others[1])


@every_architecture
@pytest.mark.parametrize("codec", ["q4", "fp16"])
def test_the_pool_covers_every_array_that_is_held(name, codec):
    """Groups take what the spec says; at each step of two turns all arrays fit what was allocated, and no more comes."""
    chunk, ids = 128, models.token_ids(600, 0)
    the_layout = models.layout(name, codec)
    pool = Pool(10**9)
    one = Conversation(name, the_layout, pool, ids)
    for lengths in ([128, 128, 64, 21, 1, 1], [42, 128, 1]):
        n_tokens = one.state.n_tokens + sum(lengths)
        missing, used = one.state.missing_nbytes(n_tokens, chunk), pool.used
        one.state.reserve(n_tokens, chunk)
        checkpoint = one.state.checkpoint()
        assert used + missing == pool.used == one.state.nbytes
        for length in lengths:
            one.prefill([length])
            held = models.nbytes(models.arrays(one.state, checkpoint))
            assert held <= one.state.nbytes == pool.used
            assert used + missing == pool.used
        one.end_turn()
        assert models.nbytes(models.arrays(one.state)) <= one.state.nbytes == pool.used
    for lane, group in zip(one.state.lanes, the_layout.spec.groups, strict=True):
        size = group_nbytes(codec, group, the_layout.spec.dtype)
        assert size == lane.group_nbytes
        for span in lane.spans:
            assert size * span.run.capacity == models.nbytes(span.run.arrays()) == span.run.allocation.nbytes
    state = [array for kept in one.state.recurrent.values() for array in kept if array is not None]
    assert the_layout.spec.state_nbytes == models.nbytes(state)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_windowed_model_holds_what_its_windows_touch(name):
    """Whole blocks from the one that the next token's window begins in; full layers hold everything."""
    the_layout = models.layout(name, "q4")
    one = Conversation(name, the_layout, Pool(10**9), models.token_ids(900, 0))
    for n_tokens in (256, 300, 600):
        one.prefill([n_tokens - one.state.n_tokens])
        one.end_turn()
        for lane, group in zip(one.state.lanes, the_layout.spec.groups, strict=True):
            assert min(4 * first_block_seen(group, n_tokens), n_tokens // 64) == lane.first_group
            assert n_tokens // 64 == lane.n_groups
            assert 0 == len(lane.spare)


@every_architecture
def test_a_rolled_back_turn_leaves_no_trace(name):
    """After an interrupt the sequence goes on as if nothing had been said, and the pool has its bytes back."""
    pool = Pool(10**9)
    one = Conversation(name, models.layout(name, "q4"), pool, models.token_ids(400, 0))
    one.prefill([128, 22])
    one.end_turn()
    used, snapshot, point = pool.used, one.state.export_snapshot(), one.state.checkpoint()
    twin = one.forked()
    wanted = twin.decode(3)
    twin.state.release()
    one.prefill([100])
    one.decode(2)
    assert one.state.rollback(point)
    one.state.settle()
    assert used == pool.used
    assert 150 == one.state.n_tokens
    assert all(np.array_equal(x, snapshot[key]) for key, x in one.state.export_snapshot().items())
    assert np.array_equal(wanted, one.decode(3))
