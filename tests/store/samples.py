"""A stand-in for the engine: it computes "K and V" from tokens alone, and saves turns as the engine does."""

from __future__ import annotations

import os

import numpy as np
import xxhash

from amem.store import AgentStore, BlockRecord, NewTurn, Realm, TurnRecord

REALM = Realm("model-a", "k4v4")
OTHER = Realm("model-b", "k4v4")
SPACE = "notebook"

#: Where stores are made: memory if there is some, as hundreds of them wait for the disk otherwise.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def tensors(history, start, stop, layers=2):
    """What a model would hold for positions start..stop: all of it follows from the ids up to there."""
    ids = np.ascontiguousarray(history[:stop], dtype=np.int32)
    seed = xxhash.xxh3_64_intdigest(ids.tobytes() + bytes([start % 251]))
    random = np.random.default_rng(seed)
    n = stop - start
    named = {}
    for layer in range(layers):
        named[f"{layer}.k"] = random.integers(0, 2**32, (1, n, 2), dtype=np.uint32)
        named[f"{layer}.v_scales"] = random.standard_normal((1, n // 8 + 1, 1)).astype(np.float16)
    return named


def equal(a, b):
    """Bit for bit, shapes and types included."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a
    )


def say(agent: AgentStore, parent, ids, realm=REALM, prompt="?", reply="!", layers=2, **words) -> TurnRecord:
    """Append a turn of these tokens: restore what is stored, write the rest, commit."""
    before = agent.path_tokens(parent, realm) if parent is not None else np.empty(0, np.int32)
    history = np.concatenate([before, np.asarray(ids, np.int32)])
    blocks, last, tail, snapshot = prepare(agent, history, realm, prefer=parent, layers=layers)
    turn = NewTurn(parent, prompt, reply, "stop", **words)
    return agent.commit(turn, realm, ids, len(history), blocks=blocks, tail=tail, snapshot=snapshot, last_block=last)


def prepare(agent: AgentStore, history, realm=REALM, prefer=None, layers=2):
    """Write the files of a history that are not stored yet; what a commit needs."""
    found = agent.find(realm, history, prefer=prefer)
    whole = [b for b in found.blocks if b.sealed and b.start + 256 <= found.n_block_tokens]
    last = whole[-1].id if whole else None
    blocks: list[BlockRecord] = []
    position = 256 * len(whole)
    while position + 256 <= len(history):
        part = tensors(history, position, position + 256, layers)
        blocks.append(agent.write_block(realm, last, position, history[position : position + 256], part))
        last = blocks[-1].id
        position += 256
    end = len(history) // 64 * 64
    tail = None
    if end > position:
        part = tensors(history, position, end, layers)
        tail = agent.write_block(realm, last, position, history[position:end], part)
    part = tensors(history, end, len(history), layers)
    snapshot = agent.write_snapshot(realm, len(history), len(history) - end, part)
    return blocks, last, tail, snapshot


def check(agent: AgentStore, history, realm=REALM, layers=2):
    """Restore all that is stored of a history, compare every bit of it, and return how many tokens that was."""
    found = agent.find(realm, history)
    parent = None
    for number, block in enumerate(found.blocks):
        assert (parent, 256 * number) == (block.parent, block.start)
        stop = block.start + len(block.token_ids)
        used = min(stop, found.n_block_tokens)
        assert used > block.start
        assert np.array_equal(block.token_ids[: used - block.start], history[block.start : used])
        full = np.concatenate([history[: block.start], block.token_ids])
        assert equal(tensors(full, block.start, stop, layers), agent.read(block))
        parent = block.id
    if found.snapshot is not None:
        assert found.snapshot.position == found.n_tokens
        expected = tensors(history, found.n_block_tokens, found.n_tokens, layers)
        assert equal(expected, agent.read(found.snapshot))
    return found.n_tokens
