"""The picture of an agent's blocks, at rest and while a request works on them."""

from __future__ import annotations

from amem import Residency

LONG = "a list of many words " * 24


def test_while_a_request_runs_the_map_shows_what_it_has_by_now(engine):
    """Its prompt and its reply as far as they are computed; when it is cancelled, what was there before."""
    agent = engine.agent("planner")
    agent.ask(LONG, max_tokens=4)
    before = agent.block_map()
    stream = agent.stream(LONG, max_tokens=400)
    n_generated = 0
    seen = []
    for event in stream:
        if event.text and (n_generated := n_generated + 1) % 2:
            seen.append(agent.block_map())
        if len(seen) == 2:
            break
    first, later = seen
    assert before.n_tokens < first.n_tokens < later.n_tokens
    for blocks in first.layers[0].blocks:
        assert blocks.residency is Residency.HOT
        assert blocks.new == (blocks.start + blocks.n_tokens > before.n_tokens // 64 * 64)
    assert first.n_tokens == sum(block.n_tokens for block in first.layers[0].blocks)
    assert LONG[:40] in first.texts[0]
    assert len(first.texts) == -(-first.n_tokens // 256)
    stream.close()
    assert before == agent.block_map()
