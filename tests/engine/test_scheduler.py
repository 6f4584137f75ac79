"""Many requests on one engine: bounds, cancelling, errors, and the owner thread's death."""

import sys
import threading

import pytest

from amem import Cancelled, EngineClosed, InputError, MemoryBudgetError, Residency
from amem.kv.sequence import SequenceState
from amem.run.request import Request
from amem.run.runner import PrefillChunk, Runner
from amem.run.sampler import Sampler
from amem.run.scheduler import Scheduler
from tests.engine.interrupts import interrupt_main, main_waits

LONG = "a list of many words " * 40


@pytest.fixture
def batches(monkeypatch):
    """The number of sequences of every decode step."""
    sizes = []
    decode = Runner.decode

    def counted(self, sequences, token_ids):
        sizes.append(len(sequences))
        return decode(self, sequences, token_ids)

    monkeypatch.setattr(Runner, "decode", counted)
    return sizes


@pytest.mark.parametrize("max_batch", [16, 20])
def test_sixteen_agents_and_more_decode_as_one_batch(max_batch, open_engine, batches):
    """Each says what it says alone; no step has more than max_batch."""
    engine = open_engine(max_batch=max_batch)
    messages = {f"agent {i}": f"You are number {i}." for i in range(20)}
    together = engine.ask_all(messages, max_tokens=40)  # more than there are prompts to be computed before the last
    assert max_batch == max(batches)
    for name in ("agent 0", "agent 9", "agent 19"):
        alone = engine.agent(f"{name} alone").ask(messages[name], max_tokens=40)
        assert alone.token_ids == together[name].token_ids


def test_where_a_prompts_computation_is_paused_changes_no_bit(open_engine, slices):
    """Layer by layer between another agent's tokens, or at once: the same blocks, and the same reply."""
    at_once = open_engine(step_ms=60_000)
    wanted = at_once.agent("a").ask(LONG, max_tokens=1)
    assert all(slices)
    slices.clear()
    paused = open_engine(store="other", step_ms=1e-3)
    other = paused.agent("b").stream("Count.", max_tokens=900)
    next(event for event in other if event.text)
    reply = paused.agent("a").ask(LONG, max_tokens=1)
    other.close()
    assert len(slices) > 10
    assert wanted.token_ids == reply.token_ids
    assert block_bytes(at_once, "a") == block_bytes(paused, "a")


@pytest.fixture
def slices(monkeypatch):
    """Whether each slice of prefill was the last of its chunk."""
    ended = []
    advance = PrefillChunk.advance

    def counted(self, seconds):
        ended.append(advance(self, seconds))
        return ended[-1]

    monkeypatch.setattr(PrefillChunk, "advance", counted)
    return ended


def block_bytes(engine, name):
    """The payloads of an agent's blocks; all but its snapshot, which decode steps wrote."""

    def read(session):
        found = session.store.find(session.parts.realm, session.head_tokens())
        blocks = [session.store.read(block) for block in found.blocks]
        return [{name: part.tobytes() for name, part in block.items()} for block in blocks]

    found = engine.with_session(name, read)
    assert found
    return found


def test_a_prompt_that_is_cancelled_between_two_layers_leaves_the_agent_as_it_was(open_engine):
    """Its tokens, its blocks and its next reply, though its chunk was never finished."""
    engine = open_engine(step_ms=1e-3)
    agent = engine.agent("a")
    agent.ask(LONG, max_tokens=5)
    before = agent.turns, agent.status.n_tokens, block_bytes(engine, "a")
    wanted = agent.fork("twin").ask("Go on.", max_tokens=20)
    stream = agent.stream(LONG, max_tokens=5)
    scheduler = engine._parts.scheduler
    for _ in range(1000):
        if engine._owner.call(lambda: scheduler._slice is not None):
            break
    engine._owner.call(stream.cancel)
    with pytest.raises(Cancelled):
        list(stream)
    assert before == (agent.turns, agent.status.n_tokens, block_bytes(engine, "a"))
    assert wanted.token_ids == agent.ask("Go on.", max_tokens=20).token_ids
    agent.delete()
    engine.agent("twin").delete()
    assert 0 == engine.status().hot_bytes


@pytest.mark.parametrize("step_ms", [0, -1, float("nan"), float("inf")])
def test_a_bound_that_cannot_be_is_refused(step_ms, open_engine):
    """Before the model is loaded."""
    with pytest.raises(InputError, match="step_ms"):
        open_engine(step_ms=step_ms)


def test_status_shows_the_gaps_between_tokens_and_the_prefill_rate(open_engine):
    """They are measured: None before there was anything to measure, and more gaps with more tokens."""
    engine = open_engine()
    assert engine.status().inter_token is None
    engine.agent("a").ask(LONG, max_tokens=20)
    status = engine.status()
    assert 19 >= status.inter_token.n > 0
    assert 0 < status.inter_token.p50_ms <= status.inter_token.p95_ms <= status.inter_token.p99_ms
    assert status.inter_token.p99_ms <= status.inter_token.max_ms
    assert status.prefill_tokens_per_second > 0
    assert status.to_dict()["inter_token"]["n"] == status.inter_token.n


def test_a_reply_says_what_computing_again_would_have_cost(open_engine):
    """By the rate that was measured, for the tokens that were reused; nothing where nothing was."""
    engine = open_engine()
    agent = engine.agent("a")
    first = agent.ask(LONG, max_tokens=5).metrics
    assert (0, 0) == (first.recompute_ms, first.saved_ms)
    agent.evict()
    metrics = agent.ask("Go on.", max_tokens=5).metrics
    rate = engine._parts.scheduler.rate
    assert metrics.recompute_ms == pytest.approx(rate.seconds(0, metrics.reused_tokens) * 1e3)
    assert metrics.saved_ms == pytest.approx(metrics.recompute_ms - metrics.restore_ms)


# -- how requests end


def test_a_second_interrupt_returns_at_once(engine, interruptible):
    """The first one waits for the step to end; if that hangs, the second does not wait, and the request still ends."""
    agent = engine.agent("a")
    agent.ask("Hello.", max_tokens=2)
    stream = agent.stream("Go on.", max_tokens=900)
    next(event for event in stream if event.text)
    hangs, go_on = threading.Event(), threading.Event()
    engine._owner.submit(lambda: hangs.set() or go_on.wait(60))
    hangs.wait(30)
    interrupt_main(lambda: main_waits() and not stream.cancelled)
    interrupt_main(lambda: main_waits() and stream.cancelled)
    with pytest.raises(KeyboardInterrupt) as raised:
        list(stream)
    assert not go_on.is_set()  # the step hangs on
    assert isinstance(raised.value.__context__, KeyboardInterrupt)
    go_on.set()
    assert 1 == len(agent.turns)
    agent.ask("Go on.", max_tokens=2)
    assert ["Hello.", "Go on."] == [turn.prompt for turn in agent.turns]


def test_a_request_can_be_cancelled_from_any_thread(engine):
    """`stream.cancel()` returns at once; who reads the stream gets Cancelled, and others go on."""
    agent = engine.agent("a")
    agent.ask("Hello.", max_tokens=2)
    other = engine.agent("b").stream("Count.", max_tokens=100)
    stream = agent.stream("Go on.", max_tokens=900)
    assert not stream.cancelled
    threading.Timer(0.2, stream.cancel).start()
    with pytest.raises(Cancelled):
        list(stream)
    assert stream.cancelled
    assert ["Hello."] == [turn.prompt for turn in agent.turns]
    assert list(other)[-1].reply is not None
    stream.cancel()
    assert [] == list(stream)


def test_a_cancel_that_comes_too_late_changes_nothing(engine):
    """The turn is there."""
    agent = engine.agent("a")
    stream = agent.stream("Hello.", max_tokens=3)
    events = list(stream)
    stream.cancel()
    assert not stream.cancelled
    assert events[-1].reply.turn == agent.turns[-1].id


@pytest.fixture
def four(engine):
    """Four agents with a turn each, and what each says next."""
    expected = {}
    for name in ("bad", "a", "b", "c"):
        agent = engine.agent(name)
        agent.ask(LONG, max_tokens=4)
        expected[name] = agent.fork(f"{name} twin").ask("Go on.", max_tokens=30).token_ids
    return expected


def ask_four(engine, expected):
    return {name: engine.agent(name).stream("Go on.", max_tokens=30) for name in expected}


def assert_others_are_served(streams, expected):
    for name in "abc":
        assert expected[name] == list(streams[name])[-1].reply.token_ids


@pytest.mark.parametrize("what", ["sampler", "pool"])
def test_an_error_in_one_request_of_a_batch_ends_that_request_alone(what, engine, four, monkeypatch):
    """A bad sampler and an exhausted pool are its caller's; its agent is as it was, and the others do not notice."""
    streams = {}
    kind, name = {"sampler": (Sampler, "__call__"), "pool": (SequenceState, "begin_step")}[what]
    call = getattr(kind, name)

    def broken(self, argument):
        request = streams["bad"]._request
        if self in (request.sample, request.sequence) and len(request.generated) == 5:
            return engine._parts.pool.allocate(10**12) if what == "pool" else 1 / 0
        return call(self, argument)

    before = engine.agent("bad").status.n_tokens
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, broken)
        engine._owner.call(lambda: streams.update(ask_four(engine, four)))  # no step comes between
        with pytest.raises(ZeroDivisionError if what == "sampler" else MemoryBudgetError):
            list(streams["bad"])
        assert_others_are_served(streams, four)
    assert (1, before) == (len(engine.agent("bad").turns), engine.agent("bad").status.n_tokens)
    assert four["bad"] == engine.agent("bad").ask("Go on.", max_tokens=30).token_ids


def test_ask_all_raises_a_fault_when_the_others_have_finished(engine, monkeypatch):
    """Whatever kind of error it is, it is not theirs."""
    session = {name: engine.agent(name) and engine.with_session(name, lambda session: session) for name in "ab"}
    take = Request.take

    def broken(self, token_id):
        if self.group is session["a"] and len(self.generated) == 2:
            raise ZeroDivisionError("a fault")
        take(self, token_id)

    monkeypatch.setattr(Request, "take", broken)
    with pytest.raises(ZeroDivisionError):
        engine.ask_all({"a": "Hello.", "b": "Hello."}, max_tokens=20)
    assert [0, 1] == [len(engine.agent(name).turns) for name in "ab"]


def test_a_damaged_block_in_a_batch_is_computed_again_and_the_others_do_not_notice(engine, four):
    """Its reply is the same, and says what was set aside."""
    folder = engine.with_session("bad", lambda session: session.evict() or session.store.root)
    victim = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    victim.unlink()
    streams = ask_four(engine, four)
    reply = list(streams["bad"])[-1].reply
    assert reply.metrics.notes
    assert reply.metrics.reused_tokens < 256
    assert four["bad"] == reply.token_ids
    assert_others_are_served(streams, four)


def test_after_the_owner_threads_death_the_next_call_goes_on(open_engine, monkeypatch):
    """Who waits gets an error at once; agents are as they were saved, and say what they would have said."""
    engine = open_engine()
    agent = engine.agent("a")
    agent.ask(LONG, max_tokens=10)
    wanted = agent.fork("twin").ask("Go on.", max_tokens=30)
    stream = agent.stream("Go on.", max_tokens=900)
    waiting = engine.agent("b").stream("Hello.", max_tokens=900)
    next(event for event in stream if event.text)
    died = engine._owner._thread
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "busy", property(lambda self: sys.exit("killed")))
        with pytest.raises(EngineClosed, match="died"):
            list(stream)
        with pytest.raises(EngineClosed, match="died"):
            list(waiting)
        died.join(10)
    assert not died.is_alive()
    reply = agent.ask("Go on.", max_tokens=30)
    assert wanted.token_ids == reply.token_ids
    assert Residency.WARM is reply.metrics.residency
    assert [LONG, "Go on."] == [turn.prompt for turn in agent.turns]
    assert [] == engine.verify().problems
    engine.close()
    assert 2 == len(open_engine().agent("a").turns)
