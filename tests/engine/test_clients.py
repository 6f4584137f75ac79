"""What a server for other programs needs of the engine: logprobs, bare texts, several spaces, async without threads."""

import asyncio
import gc
import math
import threading

import numpy as np
import pytest

from amem import Engine, InputError, Match
from amem.stream import events_of, queued_request

LONG = "a list of many words " * 12


def user(text):
    return {"role": "user", "content": text}


def finished(queued):
    """The reply of a queued request, and its events."""
    events = []
    while True:
        event = queued.result().events.get()
        if isinstance(event, BaseException):
            raise event
        events.append(event)
        if event.reply is not None:
            return event.reply, events


# -- logprobs


def test_logprobs_are_of_the_models_own_distribution(engine):
    """The chosen token is the likeliest when greedy; what is told of several is in order and sums to at most one."""
    reply = engine.agent("planner").chat([user(LONG)], max_tokens=6, logprobs=5)
    tokens = [id_ for id_ in reply.token_ids if id_ != 2]
    assert tokens == [entry.token_id for entry in reply.logprobs]
    for entry in reply.logprobs:
        assert entry.token_id == entry.top[0].token_id
        assert entry.logprob == entry.top[0].logprob
        told = [one.logprob for one in entry.top]
        assert told == sorted(told, reverse=True)
        assert 5 == len(told)
        assert 0 < sum(math.exp(one) for one in told) <= 1 + 1e-6


def test_logprobs_of_all_tokens_sum_to_one(engine, monkeypatch):
    """Natural logarithms."""
    monkeypatch.setattr("amem.checks.MAX_TOP", 384)
    reply = engine.agent("planner").chat([user(LONG)], max_tokens=1, logprobs=384)
    assert 1 == pytest.approx(np.exp([one.logprob for one in reply.logprobs[0].top]).sum(), abs=1e-5)


def test_logprobs_do_not_change_what_is_sampled(engine):
    """Nor does the temperature change them."""
    settings = {"max_tokens": 8, "temperature": 0.9, "seed": 5}
    plain = engine.agent("one").chat([user(LONG)], **settings)
    told = engine.agent("two").chat([user(LONG)], **settings, logprobs=0)
    assert plain.token_ids == told.token_ids
    assert () == plain.logprobs
    greedy = engine.agent("three").chat([user(LONG)], max_tokens=1, logprobs=20)
    known = {one.token_id: one.logprob for one in greedy.logprobs[0].top}
    if told.token_ids[0] in known:
        assert known[told.token_ids[0]] == pytest.approx(told.logprobs[0].logprob, abs=1e-4)


def test_logprobs_are_streamed_with_the_text_of_their_tokens(engine):
    """In order, none twice."""
    events = list(engine.agent("planner").chat_stream([user(LONG)], max_tokens=9, logprobs=1))
    streamed = [entry for event in events for entry in event.logprobs]
    assert streamed == list(events[-1].reply.logprobs)[: len(streamed)]
    assert streamed


@pytest.mark.parametrize("n_top", [-1, 21, 1.5, True, "2"])
def test_impossible_numbers_of_logprobs_are_refused(engine, n_top):
    """Before anything changes."""
    with pytest.raises(InputError, match="logprobs"):
        engine.agent("planner").chat([user("Hello.")], logprobs=n_top)
    assert not engine.agent("planner").turns


# -- how a reply ended


def test_a_reply_says_which_stop_string_ended_it(engine):
    """None if it ended for another reason."""
    agent = engine.agent("planner")
    whole = agent.chat([user(LONG)], max_tokens=24)
    assert whole.stop is None
    stop = whole.text[4:6]
    cut = agent.fork("other").chat([user(LONG)], max_tokens=24, stop=["never to be seen", stop], logprobs=0)
    assert stop == cut.stop
    assert whole.text.partition(stop)[0] == cut.text
    assert len(cut.logprobs) == len(cut.token_ids)


# -- bare texts


def test_a_text_is_continued_without_the_chat_template(engine):
    """The tokens are those of the text alone."""
    agent = engine.agent("writer")
    reply, _ = finished(engine.submit_text("writer", LONG, max_tokens=5))
    ids = engine.with_session("writer", lambda session: session.head_tokens().tolist())
    text = engine.with_session("writer", lambda session: session.parts.prompter.decode(ids))
    assert text.startswith(LONG)
    assert "<|im_start|>" not in text[: len(LONG)]
    assert LONG == agent.turns[0].prompt
    assert text.removesuffix("<|im_end|>") == LONG + reply.text
    assert reply.metrics.prompt_tokens + len(reply.token_ids) == len(ids)


def test_a_text_that_grew_reuses_what_it_began_with(engine):
    """And asked again unchanged it is the same turn."""
    first, _ = finished(engine.submit_text("writer", LONG, max_tokens=5))
    again, _ = finished(engine.submit_text("writer", LONG, max_tokens=5))
    assert (first.turn, first.token_ids) == (again.turn, again.token_ids)
    assert Match.EXACT is again.metrics.match
    longer, _ = finished(engine.submit_text("writer", LONG + first.text + LONG, max_tokens=5))
    assert longer.metrics.reused_tokens >= first.metrics.prompt_tokens // 64 * 64


def test_a_bare_text_is_no_message_of_a_conversation(engine):
    """A chat that begins with the same words does not go on from it."""
    reply, _ = finished(engine.submit_text("writer", LONG, max_tokens=3))
    chat = engine.agent("writer").chat(
        [user(LONG), {"role": "assistant", "content": reply.text}, user("Go on.")], max_tokens=2
    )
    assert Match.COLD is chat.metrics.match


def test_an_empty_text_is_refused(engine):
    """There is nothing to continue."""
    with pytest.raises(InputError, match="empty"):
        engine.submit_text("writer", "")
    assert [] == engine.agents()


# -- spaces


def test_agents_of_two_spaces_do_not_meet(engine):
    """One engine, one name, two agents."""
    other = engine.in_space("elsewhere")
    engine.agent("planner").chat([user(LONG)], max_tokens=2)
    there = other.agent("planner").chat([user(LONG)], max_tokens=2)
    assert Match.COLD is there.metrics.match
    assert ["planner"] == engine.agents() == other.agents()
    other.agent("planner").delete()
    assert ["planner"] == engine.agents()
    assert [] == other.agents()


def test_a_view_on_a_space_keeps_its_engine_alive_and_is_closed_with_it(tiny_model_path, tmp_path):
    """Whoever still holds a view can still ask."""
    view = Engine(tiny_model_path, tmp_path / "store", memory="100MB").in_space("elsewhere")
    gc.collect()
    view.agent("planner").ask("Hello.", max_tokens=1)
    view.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "amem-owner" and thread.is_alive()]


def test_agents_that_are_open_can_be_adopted(engine):
    """They go on in their new space."""
    other = engine.in_space("elsewhere")
    other.agent("planner").ask(LONG, max_tokens=2)
    assert ["planner"] == engine.adopt("elsewhere")
    assert 1 == len(engine.agent("planner").turns)
    engine.agent("planner").ask("Go on.", max_tokens=2)
    assert [] == other.agents()


def test_a_released_agent_can_be_opened_by_another_engine(open_engine):
    """And by this one again, when it is asked."""
    one, two = open_engine(), open_engine()
    one.agent("planner").ask(LONG, max_tokens=2)
    one.release("planner")
    assert 0 == one.status().hot_bytes
    assert Match.EXTEND is two.agent("planner").ask("Go on.", max_tokens=2).metrics.match
    two.release("planner")
    assert 2 == len(one.agent("planner").turns)
    one.release("nobody")


def test_an_agent_that_answers_is_not_released(engine):
    """Its state is in use."""
    events = engine.agent("planner").stream(LONG, max_tokens=200)
    next(events)
    with pytest.raises(InputError, match="answering"):
        engine.release("planner")
    events.close()


# -- async


def test_waiting_for_events_takes_no_thread(engine):
    """However many wait."""

    async def run():
        before = threading.active_count()
        requests = [
            await queued_request(engine.submit_chat(f"agent {i}", [user(LONG)], max_tokens=8)) for i in range(8)
        ]
        streams = [events_of(request) for request in requests]
        texts = ["" for _ in streams]
        n_threads = 0
        for _ in range(3):
            for i, stream in enumerate(streams):
                texts[i] += (await anext(stream)).text
                n_threads = max(n_threads, threading.active_count())
        for stream in streams:
            async for _ in stream:
                pass
        return n_threads - before

    assert asyncio.run(run()) <= 3  # the store's readers and writer, started when first used


def test_a_task_that_is_cancelled_takes_its_request_along(engine):
    """The agent is as it was."""

    async def run():
        task = asyncio.ensure_future(engine.agent("planner").achat([user(LONG)], max_tokens=400))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert [] == engine.agent("planner").tree()
    engine.agent("planner").chat([user("Hello.")], max_tokens=1)
