"""What a turn writes: its new tokens, one tail and one snapshot, however long its history is."""

import pytest

from amem import Engine
from tests.tiny import write_tiny_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """One on a model with room for a long history."""
    folder = tmp_path_factory.mktemp("long")
    model = write_tiny_model(folder / "model", max_position_embeddings=8192)
    with Engine(model, folder / "store", memory="200MB", prefetch=False) as engine:
        yield engine


def of_length(engine, n_tokens):
    """A text of so many tokens."""
    text = "word " * (n_tokens // engine.n_tokens("word word") - 1)
    while engine.n_tokens(text) < n_tokens:
        text += "!"
    assert n_tokens == engine.n_tokens(text)
    return text


@pytest.mark.parametrize("more", [0, 235])
@pytest.mark.parametrize("evicted", [False, True])
def test_a_turn_of_fifty_tokens_writes_no_more_after_4096_tokens_than_after_512(engine, more, evicted):
    """Inside a group, and where a block becomes full; from memory, and after a restore."""
    wrote, n_before = [], []
    for n_tokens in (512, 4096):
        agent = engine.agent(f"{n_tokens} {more} {evicted}")
        agent.ask(of_length(engine, n_tokens + more - agent_overhead(engine)), max_tokens=1)
        n_before.append(agent.status.n_tokens)
        if evicted:
            agent.evict()
        before, told = engine._parts.store.written, engine.status().bytes_written
        reply = agent.ask(of_length(engine, 49 - agent_overhead(engine)), max_tokens=1)
        after = engine._parts.store.written
        assert 45 <= agent.status.n_tokens - n_before[-1] <= 55
        assert n_before[-1] == reply.metrics.reused_tokens
        assert reply.metrics.bytes_written <= engine.status().bytes_written - told == after.total - before.total
        wrote.append((after.payload - before.payload, after.total - before.total))
    assert n_before[0] % 256 == n_before[1] % 256
    (short, short_all), (long, long_all) = wrote
    assert 0 < long <= short + 128  # positions have more digits, and headers are padded
    assert long_all <= short_all + 4 * 4120  # pages of larger indexes in the database


def agent_overhead(engine):
    """Tokens that the template puts around a message, about."""
    return engine.n_tokens("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
