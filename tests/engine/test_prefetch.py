"""Prefetch: who usually comes next is restored meanwhile, and nobody is the worse for it."""

import threading
import time

import pytest

from amem import Cancelled, Engine, InputError, MemoryBudgetError, Residency, StoreError
from amem.restoring import Restore

LONG = "a list of many words " * 30
NAMES = "abcd"


@pytest.fixture
def budget_for(open_engine):
    """A memory budget that holds some agents after a turn of LONG and a little more."""

    def measure(n, **options):
        engine = open_engine(store="probe", **options)
        engine.agent("probe").ask(LONG, max_tokens=4)
        hot = engine.agent("probe").status.hot_bytes
        room = engine._parts.sequence_nbytes(900)
        engine.close()
        return room + (n - 1) * hot

    return measure


def rounds(engine, n=1, message="Go on."):
    """Every agent in turn; the replies."""
    return [engine.agent(name).ask(message, max_tokens=4) for _ in range(n) for name in NAMES]


def settle(engine):
    """Wait until no restore is under way."""
    while engine._owner.call(lambda: bool(engine._parts.scheduler._later)):
        pass


def test_agents_that_take_turns_find_themselves_in_memory(open_engine, budget_for):
    """Although the budget holds only two of the four; without prefetch each of them is restored by its own request."""
    budget = budget_for(2)
    replies = {}
    for on in (False, True):
        engine = open_engine(store=f"store {on}", memory=budget, prefetch=on)
        rounds(engine, message=LONG)
        replies[on] = rounds(engine, 2)
        status = engine.status()
        assert status.peak_hot_bytes <= budget
        assert all(reply.metrics.residency is Residency.WARM for reply in replies[on]) is not on
        if on:
            assert 7 <= status.prefetch.hits <= status.prefetch.restored
            assert status.prefetch.misses <= 1
        else:
            assert status.prefetch is None
    assert [reply.token_ids for reply in replies[True]] == [reply.token_ids for reply in replies[False]]


def test_after_a_restart_the_next_agent_is_restored_on_a_guess_and_its_lock_is_free(open_engine):
    """The order of the last run is known; the guess is used if nothing has changed since."""
    engine = open_engine()
    rounds(engine, message=LONG)
    wanted = engine.agent("b").fork("twin").ask("Go on.", max_tokens=8)
    engine.agent("twin").delete()
    engine.close()
    engine = open_engine()
    engine.agent("a").ask("Go on.", max_tokens=4)
    settle(engine)
    (status,) = (agent for agent in engine.status() if agent.name == "b")
    assert Residency.HOT is status.residency
    with Engine(engine._opened.model_path, engine._opened.root, memory="200MB") as other:
        assert 1 == len(other.agent("b").turns)  # no AgentLocked
    reply = engine.agent("b").ask("Go on.", max_tokens=8)
    assert wanted.token_ids == reply.token_ids
    assert Residency.HOT is reply.metrics.residency
    assert reply.metrics.reused_tokens == wanted.metrics.reused_tokens
    assert 1 == engine.status().prefetch.hits


def test_a_guess_that_another_process_has_made_wrong_is_not_used(open_engine):
    """The agent has moved on meanwhile: its own blocks are restored, and nothing else."""
    engine = open_engine()
    rounds(engine, message=LONG)
    engine.close()
    engine = open_engine()
    engine.agent("a").ask("Go on.", max_tokens=4)
    settle(engine)
    with Engine(engine._opened.model_path, engine._opened.root, memory="200MB") as other:
        other.agent("b").ask("Something else.", max_tokens=9)
        wanted = other.agent("b").fork("twin").ask("Go on.", max_tokens=8)
    reply = engine.agent("b").ask("Go on.", max_tokens=8)
    assert wanted.token_ids == reply.token_ids
    assert Residency.WARM is reply.metrics.residency
    settle(engine)
    assert engine.status().hot_bytes == sum(agent.hot_bytes for agent in engine.status())  # the guess's are free


@pytest.fixture
def slow_reads(monkeypatch):
    """Reads wait for a sign; which blocks of which agents were read."""
    go_on, read = threading.Event(), []
    original = Restore._read_block

    def waiting(self, buffers, index):
        read.append((self._session.name, index))
        go_on.wait(30)
        original(self, buffers, index)

    monkeypatch.setattr(Restore, "_read_block", waiting)
    yield go_on, read
    go_on.set()


@pytest.mark.parametrize("restart", [False, True])
def test_a_request_joins_the_restore_that_is_under_way(restart, open_engine, slow_reads):
    """Nothing is read twice, and the wait is only for the rest."""
    go_on, read = slow_reads
    engine = open_engine()
    rounds(engine, message=LONG)
    wanted = engine.agent("b").fork("twin").ask("Go on.", max_tokens=8)
    engine.agent("twin").delete()
    if restart:
        engine.close()
        engine = open_engine()
        go_on.set()
        engine.agent("a").restore()
        go_on.clear()
    else:
        engine.agent("b").evict()
    read.clear()
    engine.agent("a").ask("Go on.", max_tokens=4)
    stream = engine.agent("b").stream("Go on.", max_tokens=8)
    engine.agent("c").turns  # noqa: B018  # the request is in the scheduler by now
    go_on.set()
    assert wanted.token_ids == list(stream)[-1].reply.token_ids
    assert 1 == read.count(("b", 0))
    assert 1 == engine.status().prefetch.hits
    engine.close()
    assert 2 == len(open_engine().agent("b").turns)


def test_a_restore_under_way_makes_room_for_a_request(open_engine, budget_for, slow_reads):
    """It was only a guess: who was asked goes first, and the budget is kept."""
    go_on, _ = slow_reads
    budget = budget_for(2)
    engine = open_engine(memory=budget)
    go_on.set()
    rounds(engine, message=LONG)
    settle(engine)
    engine.agent("b").evict()
    go_on.clear()
    engine.agent("a").evict()
    engine.prefetch("b")
    threading.Timer(0.2, go_on.set).start()
    reply = engine.agent("new").ask(LONG * 2, max_tokens=300)
    assert reply.token_ids
    assert engine.status().peak_hot_bytes <= budget
    assert Residency.WARM is engine.agent("b").status.residency


def test_a_request_that_is_cancelled_while_its_bytes_are_read_holds_nothing(engine, slow_reads):
    """Neither its room nor what was read; the next one reads anew."""
    go_on, _ = slow_reads
    agent = engine.agent("a")
    agent.ask(LONG, max_tokens=4)
    wanted = agent.fork("twin").ask("Go on.", max_tokens=8)
    engine.agent("twin").delete()
    agent.evict()
    stream = agent.stream("Go on.", max_tokens=8)
    while stream._request.reading is None:
        time.sleep(0.001)
    assert engine._parts.pool.used > 0
    stream.cancel()
    threading.Timer(0.1, go_on.set).start()
    with pytest.raises(Cancelled):
        list(stream)
    assert 0 == engine._owner.call(lambda: engine._parts.pool.used)
    assert wanted.token_ids == agent.ask("Go on.", max_tokens=8).token_ids


def test_nobody_is_restored_while_requests_wait(open_engine, budget_for):
    """Those who wait are known to be next."""
    engine = open_engine(max_batch=1)
    rounds(engine, message=LONG)
    settle(engine)
    for name in NAMES:
        engine.agent(name).evict()
    before = engine.status().prefetch.restored
    streams = engine._owner.call(lambda: [engine.agent(name).stream("Go on.", max_tokens=4) for name in "abc"])
    assert 3 == sum(event.reply is not None for stream in streams for event in stream)
    assert engine.status().prefetch.restored <= before + 1  # d, after c


def test_a_damaged_block_found_by_a_guess_is_told_with_the_next_reply(open_engine, tmp_path):
    """And the reply is what it is without damage."""
    engine = open_engine()
    rounds(engine, message=LONG)
    wanted = engine.agent("b").fork("twin").ask("Go on.", max_tokens=8)
    engine.agent("twin").delete()
    folder = engine.with_session("b", lambda session: session.evict() or session.store.root)
    max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size).unlink()
    engine.agent("a").ask("Go on.", max_tokens=4)
    settle(engine)
    reply = engine.agent("b").ask("Go on.", max_tokens=8)
    assert wanted.token_ids == reply.token_ids
    assert any("block" in note for note in reply.metrics.notes)


def test_a_restore_in_the_background_returns_before_it_is_done(engine, slow_reads):
    """The other one waits, and both end with the agent in memory."""
    go_on, _ = slow_reads
    agent = engine.agent("a")
    agent.ask(LONG, max_tokens=4)
    agent.evict()
    agent.restore(background=True)
    assert Residency.WARM is agent.status.residency
    go_on.set()
    agent.restore()
    assert Residency.HOT is agent.status.residency
    assert engine.prefetch("a").done()


def test_who_stops_waiting_for_a_restore_disturbs_nobody(engine, slow_reads):
    """Neither requests that run beside it, nor the restore, nor the engine's end."""
    go_on, _ = slow_reads
    agent, other = engine.agent("a"), engine.agent("b")
    agent.ask(LONG, max_tokens=4)
    agent.evict()
    stream = other.stream("Tell me.", max_tokens=20)
    next(iter(stream))
    assert not engine.prefetch("a").cancel()
    go_on.set()
    assert list(stream)[-1].reply is not None
    agent.restore()
    assert Residency.HOT is agent.status.residency


def test_a_request_that_takes_over_a_damaged_restore_keeps_what_is_good(engine, slow_reads):
    """As one that began to read by itself: only what lies after the damage is computed again."""
    go_on, _ = slow_reads
    agent = engine.agent("a")
    agent.ask(LONG, max_tokens=4)
    agent.evict()
    folder = engine.with_session("a", lambda session: session.store.root)
    victim = min(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[-8] ^= 4
    victim.write_bytes(data)
    agent.restore(background=True)
    stream = agent.stream("Go on.", max_tokens=4)
    go_on.set()
    reply = [event.reply for event in stream if event.reply][-1]
    assert reply.metrics.notes
    assert reply.metrics.reused_tokens > 0


def test_a_restore_that_cannot_be_is_refused(open_engine, budget_for):
    """There is no such agent, it is answering, or pinned agents leave no room: they are named."""
    engine = open_engine(memory=budget_for(1), prefetch=False)
    with pytest.raises(InputError, match="no agent"):
        engine.prefetch("nobody")
    for name in "ab":
        engine.agent(name).ask(LONG, max_tokens=400)  # more than half of the budget each
    engine.agent("b").pin()
    engine.agent("a").evict()
    with pytest.raises(MemoryBudgetError, match="'b'"):
        engine.agent("a").restore()
    stream = engine.agent("b").stream("Go on.", max_tokens=200)
    with pytest.raises(InputError, match="answering"):
        engine.prefetch("b")
    stream.close()


def test_a_restore_that_is_waited_for_ends_with_the_engine(open_engine, slow_reads):
    """Nobody waits for good."""
    go_on, _ = slow_reads
    engine = open_engine()
    engine.agent("a").ask(LONG, max_tokens=4)
    engine.agent("a").evict()
    done = engine.prefetch("a")
    threading.Timer(0.2, go_on.set).start()
    engine.close()
    assert done.done()


@pytest.mark.parametrize("io_threads", [0, 1])
def test_without_io_threads_blocks_are_read_between_two_steps(io_threads, open_engine, monkeypatch):
    """The same bytes, and the same reply."""
    readers = set()
    original = Restore._read_block

    def seen(self, buffers, index):
        readers.add(threading.current_thread().name.split("_")[0])
        original(self, buffers, index)

    monkeypatch.setattr(Restore, "_read_block", seen)
    engine = open_engine(io_threads=io_threads)
    agent = engine.agent("a")
    agent.ask(LONG, max_tokens=4)
    wanted = agent.fork("twin").ask("Go on.", max_tokens=8)
    agent.evict()
    assert wanted.token_ids == agent.ask("Go on.", max_tokens=8).token_ids
    assert {"amem-read" if io_threads else "amem-owner"} == readers


def test_io_threads_cannot_be_negative(open_engine):
    """It is said before a model is loaded."""
    with pytest.raises(InputError, match="io_threads"):
        open_engine(io_threads=-1)


def test_an_index_that_cannot_be_used_fails_no_request(engine, monkeypatch):
    """Only the guess is lost."""

    def broken(*_):
        raise StoreError("the index is locked")

    for method in ("record_transition", "likely_next"):
        monkeypatch.setattr(engine._parts.store, method, broken)
    assert 2 == len(engine.ask_all({"a": "Hello.", "b": "Hello."}, max_tokens=4))
    assert 0 == engine.status().prefetch.restored


def test_waiting_for_others_counts_as_queue_and_not_as_restore(open_engine, slow_reads):
    """Where a request's bytes are in and the engine is busy, the restore has ended; the parts still add up."""
    go_on, _ = slow_reads
    engine = open_engine(prefetch=False)
    agent = engine.agent("a")
    agent.ask(LONG, max_tokens=4)
    agent.evict()
    stream = agent.stream("Go on.", max_tokens=4)
    request = stream._request
    while request.reading is None:
        time.sleep(0.001)
    busy = threading.Event()
    engine._owner.submit(lambda: busy.wait(30))
    go_on.set()
    while not request.bytes_in:
        time.sleep(0.001)
    time.sleep(0.3)
    busy.set()
    metrics = list(stream)[-1].reply.metrics
    assert metrics.queue_ms >= 300
    parts = metrics.queue_ms + metrics.match_ms + metrics.restore_ms + metrics.prefill_ms + metrics.first_decode_ms
    assert metrics.ttft_ms == pytest.approx(parts)
