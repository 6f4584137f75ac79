"""Asking an agent: replies, sampling, stops, streams, and what is refused."""

import asyncio
import itertools
from contextlib import closing

import pytest

from amem import AmemError, Cancelled, ContextOverflow, EngineClosed, InputError, Match, Residency

LONG = "a list of many words " * 8


def texts(events):
    return "".join(event.text for event in events)


def state(engine, name="planner"):
    """All that must not change when a request fails."""
    agent = engine.agent(name)
    return agent.turns, agent.status.n_tokens, agent.status.residency


def test_a_reply_carries_its_tokens_and_what_it_cost(engine):
    """The metrics add up, and count every token that is held."""
    agent = engine.agent("planner", system="Be brief.")
    reply = agent.ask("Hello.", max_tokens=9)
    metrics = reply.metrics
    assert Match.COLD is metrics.match
    assert Residency.EMPTY is metrics.residency
    assert 9 >= metrics.generated_tokens == len(reply.token_ids)
    assert metrics.prompt_tokens == metrics.reused_tokens + metrics.computed_tokens
    assert agent.status.n_tokens == metrics.prompt_tokens + len(reply.token_ids)
    parts = metrics.queue_ms + metrics.match_ms + metrics.restore_ms + metrics.prefill_ms + metrics.first_decode_ms
    assert metrics.ttft_ms == pytest.approx(parts)
    assert metrics.saved
    assert agent.turns[0].reply == reply.text


def test_a_second_message_computes_only_what_is_new(engine):
    """History, reply included, is reused as it was generated."""
    agent = engine.agent("planner")
    first = agent.ask(LONG, max_tokens=20)
    second = agent.ask("And then?", max_tokens=5).metrics
    assert Match.EXTEND is second.match
    assert Residency.HOT is second.residency
    assert second.reused_tokens == first.metrics.prompt_tokens + len(first.token_ids)


def test_streamed_text_is_the_replys_text(engine):
    """Pieces come as they are made, the reply last."""
    events = list(engine.agent("planner").stream(LONG, max_tokens=30))
    assert events[-1].reply is not None
    assert texts(events) == events[-1].reply.text


def test_sampling_repeats_itself_unless_it_is_told_not_to(open_engine):
    """A seed is derived from the request's place; another seed, and a random one, give other replies."""
    engine = open_engine()
    ask = {"max_tokens": 24, "temperature": 1.5, "top_p": 0.95}
    first = engine.agent("a").ask("Say something.", **ask)
    engine.agent("a").rewind()
    again = engine.agent("a").ask("Say something.", **ask)
    other = engine.agent("b").ask("Say something.", seed=7, **ask)
    same = engine.agent("c").ask("Say something.", seed=7, **ask)
    free = [engine.agent(f"r{i}").ask("Say something.", seed="random", **ask).token_ids for i in range(3)]
    assert first.token_ids == again.token_ids
    assert other.token_ids == same.token_ids != first.token_ids
    assert len(set(free)) > 1


def test_a_stop_string_ends_the_reply_before_it(engine):
    """Text and tokens end before the stop string, and the state holds only what was kept."""
    full = engine.agent("full").ask("Say something.", max_tokens=40)
    start = len(full.text) // 2
    stop = full.text[start : start + 3]
    agent = engine.agent("stopped")
    reply = agent.ask("Say something.", max_tokens=40, stop=[stop])
    assert full.text[: full.text.find(stop)] == reply.text
    assert "stop" == reply.finish_reason
    assert agent.status.n_tokens == reply.metrics.prompt_tokens + len(reply.token_ids)
    assert reply.text == engine._parts.prompter.decode(reply.token_ids)


def test_after_a_stop_string_the_agent_goes_on_as_after_a_restart(open_engine):
    """What a stop string cut off leaves no trace in the state."""
    engine = open_engine()
    full = engine.agent("full").ask(LONG, max_tokens=80)
    stop = full.text[len(full.text) // 2 :][:4]
    engine.agent("a").ask(LONG, max_tokens=80, stop=[stop])
    fork = engine.agent("a").fork("b")
    hot = engine.agent("a").ask("Go on.", max_tokens=30)
    fork.evict()
    assert hot.token_ids == fork.ask("Go on.", max_tokens=30).token_ids


@pytest.mark.parametrize(
    ("message", "options", "says"),
    [
        ("", {}, "message is empty"),
        (" \n\t", {}, "message is empty"),
        ("Hi", {"max_tokens": 0}, "max_tokens"),
        ("Hi", {"max_tokens": -3}, "max_tokens"),
        ("Hi", {"max_tokens": 2.5}, "max_tokens"),
        ("Hi", {"max_tokens": True}, "max_tokens"),
        ("Hi", {"temperature": -0.1}, "temperature"),
        ("Hi", {"temperature": float("nan")}, "temperature"),
        ("Hi", {"temperature": float("inf")}, "temperature"),
        ("Hi", {"top_p": 0}, "top_p"),
        ("Hi", {"top_p": 1.1}, "top_p"),
        ("Hi", {"seed": "fixed"}, "seed"),
        ("Hi", {"stop": [""]}, "stop string"),
        ("Hi", {"system": "Another."}, "another system text"),
        ("Hi", {"max_tokens": 10**6}, "context"),
        ("word " * 9000, {}, "context"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_changes_nothing(engine, message, options, says):
    """The agent is as it was, in memory and on disk."""
    engine.agent("planner", system="Be brief.").ask("Hello.", max_tokens=4)
    before = state(engine)
    with pytest.raises(InputError, match=says) as raised:
        engine.agent("planner").ask(message, **{"max_tokens": 4, **options})
    assert "\n" not in str(raised.value)
    assert before == state(engine)


@pytest.mark.parametrize("name", ["", "x" * 129, "a\0b", "\ud800"])
def test_names_that_cannot_be_are_refused(engine, name):
    """And leave no agent behind."""
    with pytest.raises(InputError):
        engine.agent(name)
    assert [] == engine.agents()


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "q5"},
        {"attention": "fast"},
        {"memory": "lots"},
        {"disk": "-1"},
        {"max_batch": 0},
        {"prefill_chunk": 100},
    ],
)
def test_engine_options_that_cannot_be_are_refused(open_engine, options):
    """With one clear line, before a model is loaded."""
    with pytest.raises(InputError):
        open_engine(**options)


def test_too_long_a_prompt_says_how_many_tokens_there_are(engine):
    """The error names the figures and a remedy."""
    with pytest.raises(ContextOverflow, match=r"\d+ tokens.*context of \d+"):
        engine.agent("planner").ask("Hello.", max_tokens=10**6)


def test_a_refused_first_message_makes_no_agent(engine):
    """Neither in memory nor on disk; one that was made before, by whatever, stays."""
    engine.agent("made")
    engine.agent("told", system="Be brief.")
    engine.agent("asked", create=False).ask("Hello.", max_tokens=2)
    for name in ("new", "made", "told", "asked"):
        with pytest.raises(ContextOverflow):
            engine.agent(name, create=False).ask("Hello.", max_tokens=10**6)
    with pytest.raises(ContextOverflow):
        engine.ask_all({"first": "Hello.", "second": "Hello."}, max_tokens=10**6)
    with closing(engine.agent("left", create=False).stream("Hello.", max_tokens=400)) as stream:
        next(stream)
    assert ["asked", "made", "told"] == sorted(engine.agents())
    assert engine.agent("new", create=False).ask("Hello.", max_tokens=2).turn


def test_a_refused_first_message_leaves_what_a_later_one_makes(engine):
    """Both wait at the same time; the second is served."""
    agent = engine.agent("planner", create=False)
    refused, served = agent.stream("Hello.", max_tokens=10**6), agent.stream("Hello.", max_tokens=2)
    with pytest.raises(ContextOverflow):
        refused.reply()
    assert served.reply().turn == agent.turns[-1].id


def test_a_closed_stream_leaves_the_agent_as_it_was(engine):
    """Leaving the loop cancels the request; the next one is served."""
    agent = engine.agent("planner")
    agent.ask(LONG, max_tokens=10)
    before = state(engine)
    stream = agent.stream("Go on.", max_tokens=400)
    list(itertools.islice((event for event in stream if event.text), 3))
    stream.close()
    assert before == state(engine)
    assert agent.ask("Go on.", max_tokens=5).metrics.match is Match.EXTEND


def test_an_interrupt_while_streaming_is_raised_on_and_leaves_the_agent_as_it_was(engine):
    """KeyboardInterrupt passes through, so that queued cells stop."""
    agent = engine.agent("planner")
    agent.ask(LONG, max_tokens=10)
    before = state(engine)
    undisturbed = agent.fork("twin").ask("Go on.", max_tokens=70)

    def interrupted():
        for count, _ in enumerate(agent.stream("Go on.", max_tokens=400)):
            if count == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert before == state(engine)
    assert undisturbed.token_ids == agent.ask("Go on.", max_tokens=70).token_ids


def test_requests_to_one_agent_run_one_after_the_other(engine):
    """Two streams at once give two turns, the second on the first."""
    agent = engine.agent("planner")
    one, two = agent.stream("One.", max_tokens=8), agent.stream("Two.", max_tokens=8)
    list(two)
    list(one)
    assert ["One.", "Two."] == [turn.prompt for turn in agent.turns]


def test_several_agents_are_asked_as_one_batch(engine):
    """Each gets what it gets alone, to within rounding: here the same tokens."""
    alone = {name: engine.agent(f"{name}-alone").ask(f"You are {name}.", max_tokens=12) for name in "abc"}
    together = engine.ask_all({name: f"You are {name}." for name in "abc"}, max_tokens=12)
    assert {name: reply.token_ids for name, reply in alone.items()} == {
        name: reply.token_ids for name, reply in together.items()
    }


def test_a_long_prompt_tells_how_far_it_is(engine):
    """Tokens done of those that have to be computed, rising to all of them; the last one is the first step of decoding."""
    *steps, last = engine.agent("planner").stream(LONG * 12, max_tokens=2)
    told = [(event.done, event.total) for event in steps if event.stage == "prefill"]
    assert len(told) > 2
    assert told == sorted(set(told))
    assert told[-1] == (last.reply.metrics.computed_tokens - 1,) * 2


def test_a_batch_can_be_followed_stream_by_stream(engine):
    """Each gives its own agent's text and reply; one that is cancelled leaves the other, and one refused asks nobody."""
    together = engine.ask_all({name: f"You are {name}." for name in "ab"}, max_tokens=12)
    streams = engine.stream_all({f"{name}2": f"You are {name}." for name in "ab"}, max_tokens=12)
    for name in "ba":
        events = list(streams[f"{name}2"])
        assert together[name].token_ids == events[-1].reply.token_ids
        assert together[name].text == "".join(event.text for event in events)
    streams = engine.stream_all({"c": "Hello.", "d": "Hello."}, max_tokens=40)
    streams["c"].close()
    assert list(streams["d"])[-1].reply is not None
    assert [0, 1] == [len(engine.agent(name).turns) for name in "cd"]
    with pytest.raises(InputError, match="empty"):
        engine.stream_all({"e": "Hello.", "f": " "}, max_tokens=40)
    assert [] == engine.agent("e").turns


def test_one_bad_message_in_a_batch_does_not_take_the_others_along(engine):
    """The error is raised once the others are done."""
    with pytest.raises(AmemError, match="context"):
        engine.ask_all({"a": "Hello.", "b": "word " * 9000}, max_tokens=5)
    assert 1 == len(engine.agent("a").turns)
    assert 0 == len(engine.agent("b").turns)


def test_async_callers_get_the_same(engine):
    """Aask and astream are ask and stream."""

    async def run():
        reply = await engine.agent("a").aask("Hello.", max_tokens=9)
        pieces = [event async for event in engine.agent("b").astream("Hello.", max_tokens=9)]
        return reply, pieces

    reply, pieces = asyncio.run(run())
    assert reply.text == texts(pieces) == pieces[-1].reply.text


def test_a_closed_engine_says_so(open_engine):
    """A running request ends with an error at once; later calls are refused."""
    engine = open_engine()
    stream = engine.agent("planner").stream("Hello.", max_tokens=400)
    next(event for event in stream if event.text)
    engine.close()
    with pytest.raises((EngineClosed, Cancelled)):
        list(stream)
    with pytest.raises(EngineClosed):
        engine.status()
    engine.close()
