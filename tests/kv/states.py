"""Sequences of one or a few attention layers, fed with random K, V and Q instead of a model's."""

import mlx.core as mx
import numpy as np

from amem.kv.attention import attend
from amem.kv.codec import make_codec
from amem.kv.pool import Pool
from amem.kv.restore import RestoreBuffers
from amem.kv.sequence import SequenceState, StateLayout
from amem.model.spec import LayerKind, LayerSpec, ModelCacheSpec


def layer(index=0, heads=2, k_dim=64, v_dim=64, heads_q=4, window=None):
    kind = LayerKind.WINDOW if window else LayerKind.FULL
    return LayerSpec(index, kind, heads, k_dim, v_dim, heads_q, window)


def layout(*layers, codec="q4", dtype="float32"):
    return StateLayout(ModelCacheSpec(tuple(layers), dtype), make_codec(codec))


def random_qkv(spec_layer, n_tokens, seed=0):
    """Float32 q, k, v ``[H, T, D]``; some key channels are outliers, as in real models."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(spec_layer.n_q_heads, n_tokens, spec_layer.k_dim))
    k = (
        rng.normal(size=(spec_layer.n_kv_heads, n_tokens, spec_layer.k_dim))
        + rng.normal(size=(spec_layer.n_kv_heads, 1, spec_layer.k_dim)) * 3
    )
    v = rng.normal(size=(spec_layer.n_kv_heads, n_tokens, spec_layer.v_dim))
    return tuple(x.astype(np.float32) for x in (q, k, v))


def step(sequence, data, start, length, *, scale=0.1, sinks=None, attend=attend):
    """One step of all layers: outputs ``[Hq, L, Dv]`` for each slot."""
    sequence.begin_step(length)
    out = {}
    for slot, (q, k, v) in data.items():
        rows = [mx.array(x[:, start : start + length]) for x in (q, k, v)]
        view = sequence.append(slot, rows[1], rows[2])
        out[slot] = attend(rows[0], view, start=start, scale=scale, codec=sequence.layout.codec, sinks=sinks)
    sequence.end_step(length)
    mx.eval(list(out.values()), sequence.pending())
    return {slot: np.array(x) for slot, x in out.items()}


def feed(sequence, data, lengths, **options):
    """Several steps; outputs of each slot joined along the tokens."""
    outs = [step(sequence, data, sequence.n_tokens, length, **options) for length in lengths]
    return {slot: np.concatenate([out[slot] for out in outs], axis=1) for slot in outs[0]}


def bits(sequence):
    """Every stored bit of a sequence, by name."""
    first = max(lane.first_group for lane in sequence.lanes) if sequence.lanes else 0
    blocks = sequence.export_block(first, sequence.n_groups - first) if sequence.n_groups > first else {}
    return blocks | sequence.export_snapshot()


def equal_bits(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def filled(the_layout, blocks, n_tokens):
    """Restore buffers that hold the first tokens of some blocks; of a block that is cut, only its first groups."""
    stored = RestoreBuffers(the_layout, n_tokens)
    for index in reversed(range(stored.n_blocks)):  # any order will do
        targets = stored.block(index)
        if any(blocks[index][name].shape != target.shape for name, target in targets.items()):
            stored.put(index, blocks[index])
        else:
            for name, target in targets.items():
                target[...] = blocks[index][name]
    return stored


def restored(the_layout, pool, blocks, snapshot, n_tokens):
    """A sequence from its plain form."""
    sequence = SequenceState(the_layout, pool)
    sequence.adopt(filled(the_layout, blocks, n_tokens), snapshot)
    return sequence


def export_full(sequence, blocks):
    """Append the sequence's new full blocks to a list, as a caller must after each step."""
    while len(blocks) < sequence.n_groups // 4:
        blocks.append(sequence.export_block(len(blocks) * 4, 4))
    return blocks


def twin(sequence, blocks, pool):
    """A new sequence from the plain form of a closed one."""
    tail = sequence.n_groups % 4
    stored = [*blocks, sequence.export_block(len(blocks) * 4, tail)] if tail else blocks
    return restored(sequence.layout, pool, stored, sequence.export_snapshot(), sequence.n_tokens)


def new_sequence(the_layout, budget=10**9):
    return SequenceState(the_layout, Pool(budget))
