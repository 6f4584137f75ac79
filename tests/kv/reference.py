"""The visibility rule and the codecs once more, in float64 numpy and without any of the engine's code."""

import numpy as np

GROUP = 64


def unpack(codes, scales, biases, bits=4):
    """Affine codes along the last axis, the first value in the lowest bits."""
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    values = (codes[..., None] >> shifts) & (2**bits - 1)
    values = values.reshape(*codes.shape[:-1], codes.shape[-1] * per_word).astype(np.float64)
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
        k_seen = unpack(*(parts[f"k.{name}"] for name in ("codes", "scales", "biases")))
        v_seen = unpack(*(parts[f"v.{name}"] for name in ("codes", "scales", "biases")))
    if codec == "q4":
        k_seen = k_seen.swapaxes(-1, -2)
        v_seen = v_seen @ hadamard(v.shape[-1])
    k_seen, v_seen = (x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[-1]) for x in (k_seen, v_seen))
    if codec == "q4":
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
