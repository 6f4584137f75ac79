"""No mix of pins, running and waiting requests, restores and forks deadlocks a real engine or passes its budget."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amem import AmemError, Cancelled, Engine, MemoryBudgetError

NAMES = [f"agent {i}" for i in range(5)]
names = st.sampled_from(NAMES)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), names, st.integers(1, 60), st.integers(1, 24)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["pin", "unpin", "evict", "prefetch"]), names),
        st.tuples(st.just("fork"), names, names),
    ),
    min_size=4,
    max_size=24,
)


@pytest.fixture(scope="module")
def engine(tiny_model_path, tmp_path_factory):
    """One engine for all examples; its budget and its agents are set by each."""
    with Engine(tiny_model_path, tmp_path_factory.mktemp("store"), memory="200MB", max_batch=3, step_ms=1) as engine:
        yield engine


def end_of(request):
    """A reply or an error; a deadlock would be neither."""
    last = time.monotonic() + 120
    while time.monotonic() < last:
        event = request.events.get_nowait()
        if event is None:
            time.sleep(0.002)
        elif isinstance(event, BaseException) or event.reply is not None:
            return event
    raise TimeoutError("the request does not end")


def do(engine, asked, step):
    """One step; what is refused is refused with an error of amem, at once."""
    what, *given = step
    if what == "ask":
        name, words, max_tokens = given
        asked.append(engine.submit(name, "word " * words, max_tokens=max_tokens).result())
    elif what == "cancel":
        for request in asked[given[0] : given[0] + 1]:
            request.cancel()
    elif what == "wait":
        for request in asked[given[0] : given[0] + 1]:
            request.ended = getattr(request, "ended", None) or end_of(request)
    elif what == "fork":
        engine.fork(given[0], given[1])
    elif what == "prefetch":
        engine.prefetch(given[0])
    else:
        getattr(engine.agent(given[0]), what)()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(budget=st.floats(1.05, 4), plan=steps)
def test_every_request_ends_and_the_budget_holds(engine, budget, plan):
    """With a reply, or an error that says why; afterwards nothing is held but what agents show, and all of it is free."""
    pool = engine._parts.pool
    assert 0 == pool.used
    pool.total, pool.peak = int(budget * engine._parts.sequence_nbytes(150)), 0
    asked = []
    for step in plan:
        try:
            do(engine, asked, step)
        except AmemError:
            assert step[0] != "ask"
    ends = [getattr(request, "ended", None) or end_of(request) for request in asked]
    for request, end in zip(asked, ends, strict=True):
        assert not isinstance(end, BaseException) or isinstance(end, (MemoryBudgetError, Cancelled))
        assert not isinstance(end, Cancelled) or request.cancelled
    while engine._owner.call(lambda: engine._parts.scheduler.busy):
        pass
    assert pool.peak <= pool.total
    for name in engine.agents():
        agent = engine.agent(name)
        tokens = engine.with_session(name, lambda session: session.hot.n_tokens if session.hot else None)
        assert tokens in (None, agent.status.n_tokens)
        agent.delete()
    assert 0 == pool.used
