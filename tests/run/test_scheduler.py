"""Iteration-level scheduling, with a scripted runner: who is served when, and whom an error reaches."""

from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amem.errors import Cancelled, CorruptState, MemoryBudgetError
from amem.kv.pool import Pool
from amem.run.scheduler import Scheduler
from tests.run.scripted import EOS, Machine, ending


def machine(budget=10**6, *, max_batch=16, chunk=64, step_s=0.5, **options):
    """A scheduler over a scripted runner."""
    made = Machine(Pool(budget), **options)
    made.scheduler = Scheduler(made, prefill_chunk=chunk, max_batch=max_batch, step_s=step_s)
    return made


def ask_some(made, names, **options):
    return {name: made.ask(made.agent(name), **options) for name in names}


def test_a_newcomer_is_admitted_while_others_decode():
    """It joins the batch when its prompt is computed, and they go on meanwhile."""
    made = machine()
    a = made.ask(made.agent("a"), max_tokens=8)
    for _ in range(4):
        made.scheduler.step()
    b = made.ask(made.agent("b"), n_prompt=130, max_tokens=3)
    made.run()
    assert ["a"] in made.log
    assert ["a", "b"] in made.log
    between = made.log[made.log.index(["a"]) : made.log.index(["a", "b"])]
    assert between.count("prefill") >= 3  # two whole chunks and the rest
    assert all(step == "prefill" or step == ["a"] for step in between)
    assert "cdefghij" == ending(a)
    assert "cde" == ending(b)


@pytest.mark.parametrize(("n", "max_batch"), [(16, 16), (40, 16), (40, 32), (3, 1)])
def test_as_many_decode_together_as_max_batch_says(n, max_batch):
    """16, and beyond, and never more."""
    made = machine(max_batch=max_batch)
    asked = ask_some(made, [str(i) for i in range(n)], max_tokens=60)
    made.run()
    assert min(n, max_batch) == max(len(step) for step in made.log if step != "prefill")
    assert 1 == len({ending(request) for request in asked.values()})


@pytest.mark.parametrize("slices", [1, 7])
def test_between_two_slices_of_a_prompt_all_others_get_a_token(slices):
    """However long a chunk takes, a reply waits for a slice of it."""
    made = machine(slices=slices)
    made.ask(made.agent("a"), max_tokens=100)
    for _ in range(slices + 1):
        made.scheduler.step()
    made.log.clear()
    made.ask(made.agent("b"), n_prompt=64 * 3 + 1, max_tokens=2)
    made.run()
    joined = next(i for i, step in enumerate(made.log) if "b" in step)
    assert ["prefill", ["a"]] * (3 * slices - 1) + ["prefill"] == made.log[made.log.index("prefill") : joined]


def test_prefill_gets_what_the_decode_step_leaves_of_the_bound():
    """A slice and a decode step together stay within it; alone, prefill may use all of it."""
    made = machine(step_s=0.5)
    made.scheduler._decode_s = 0.2
    made.ask(made.agent("a"), max_tokens=50)
    made.scheduler.step()
    assert [0.5] == made.waits
    made.scheduler._decode_s = 0.2
    made.ask(made.agent("b"), n_prompt=100)
    made.scheduler.step()
    assert pytest.approx(0.3) == made.waits[-1]


def test_slow_decoding_leaves_prefill_a_quarter():
    """Or a newcomer would never get its first token."""
    made = machine(step_s=0.5)
    made.ask(made.agent("a"), max_tokens=50)
    made.scheduler.step()
    made.scheduler._decode_s = 9.0
    made.ask(made.agent("b"), n_prompt=100)
    made.scheduler.step()
    assert 0.125 == made.waits[-1]


def test_while_bytes_are_read_others_decode():
    """And a request is ready for prefill when its own are in."""
    made = machine()
    bytes_of_b = Future()
    a = made.ask(made.agent("a"), max_tokens=20)
    b = made.ask(made.agent("b"), max_tokens=2, reading=bytes_of_b)
    for _ in range(10):
        made.scheduler.step()
    assert made.log.count(["a"]) >= 8
    assert not any("b" in step for step in made.log)
    bytes_of_b.set_result(None)
    made.run()
    assert "cd" == ending(b)
    assert 20 == len(ending(a))


def test_requests_to_one_agent_wait_for_one_another():
    """The second starts where the first ended."""
    made = machine()
    agent = made.agent("a")
    first, second = made.ask(agent, n_prompt=10, max_tokens=4), made.ask(agent, n_prompt=3, max_tokens=2)
    made.run()
    assert [4, 2] == [len(ending(request)) for request in (first, second)]
    assert 10 + 4 + 3 + 2 == agent.n_tokens


def test_a_large_request_does_not_starve():
    """Small ones that came later do not pass it, or it would wait for ever while they keep coming."""
    made = machine(100)
    small = ask_some(made, ["s0", "s1"], n_prompt=10, max_tokens=20)
    for _ in range(5):
        made.scheduler.step()
    large = made.ask(made.agent("large"), n_prompt=60, max_tokens=20)
    made.scheduler.step()
    later = ask_some(made, [f"later {i}" for i in range(6)], n_prompt=5, max_tokens=30)
    made.run()
    order = [name for step in made.log if step != "prefill" for name in step]
    assert order.index("large") < min(order.index(name) for name in later)
    for request in [large, *small.values(), *later.values()]:
        assert isinstance(ending(request), str)


def test_idle_agents_go_the_least_recently_used_first_and_pinned_ones_stay():
    """Nobody else is touched."""
    made = machine(100)
    for name in "abc":
        made.ask(made.agent(name), n_prompt=10, max_tokens=10)
        made.run()
    a, b, c = made.agents
    a.pinned = True
    made.ask(made.agent("d"), n_prompt=20, max_tokens=35)
    made.run()
    assert [0, 1, 0] == [agent.n_evicted for agent in (a, b, c)]
    assert made.pool.used == sum(agent.hot_bytes for agent in made.agents)


def test_what_cannot_fit_is_refused_when_nobody_is_left_to_wait_for():
    """And those behind it are served."""
    made = machine(100)
    pinned = made.agent("pinned", pinned=True)
    made.ask(pinned, n_prompt=40, max_tokens=10)
    running = made.ask(made.agent("running"), n_prompt=10, max_tokens=30)
    made.scheduler.step()
    huge = made.ask(made.agent("huge"), n_prompt=50, max_tokens=20)
    behind = made.ask(made.agent("behind"), n_prompt=10, max_tokens=10)
    made.run()
    assert isinstance(ending(huge), MemoryBudgetError)
    assert 30 == len(ending(running))
    assert 10 == len(ending(behind))
    assert pinned.hot_bytes


# -- ends


def bad_sampler(logits):
    raise ZeroDivisionError("a bad sampler")


def test_a_bad_sampler_ends_its_request_alone():
    """Its caller gets the error, its agent is as it was, and the others get all their tokens."""
    made = machine()
    asked = ask_some(made, "abc", max_tokens=6)
    bad = made.ask(made.agent("bad"), sample=bad_sampler)
    made.run()
    assert isinstance(ending(bad), ZeroDivisionError)
    assert 1 == bad.work.aborted
    assert ["cdefgh"] * 3 == [ending(request) for request in asked.values()]
    assert made.pool.used == sum(agent.hot_bytes for agent in made.agents)


@pytest.mark.parametrize("error", [MemoryBudgetError("the pool is exhausted"), RuntimeError("a fault")])
def test_an_error_in_a_batch_ends_who_has_it(error):
    """The step is made again one by one, from where each stood: nobody loses or repeats a token."""
    made = machine()
    asked = ask_some(made, "abc", max_tokens=6)
    made.ask(made.agent("bad"), max_tokens=6)
    for _ in range(5):
        made.scheduler.step()
    made.fails = lambda names: error if "bad" in names else None
    bad = next(r for r in made.scheduler._active if r.group.name == "bad")
    made.run()
    assert error is ending(bad)
    assert ["cdefgh"] * 3 == [ending(request) for request in asked.values()]
    assert [16] * 3 == [request.group.n_tokens for request in asked.values()]


def test_who_cannot_be_rolled_back_ends_with_the_batchs_error():
    """Rather than go on with a state that nobody knows."""
    made = machine()
    asked = ask_some(made, "ab", max_tokens=6)
    for _ in range(3):
        made.scheduler.step()
    asked["b"].sequence.recurrent = True
    failed = []

    def once(names):
        if not failed:
            failed.append(names)
            return RuntimeError("a fault")
        return None

    made.fails = once
    made.run()
    assert "cdefgh" == ending(asked["a"])
    assert isinstance(ending(asked["b"]), RuntimeError)


def test_damaged_bytes_end_their_request_alone():
    """Where the store could not find anything to go on with."""
    made = machine()
    damaged = Future()
    damaged.set_exception(CorruptState("a damaged block"))
    asked = ask_some(made, "abc", max_tokens=6)
    bad = made.ask(made.agent("bad"), reading=damaged)
    made.run()
    assert isinstance(ending(bad), CorruptState)
    assert ["cdefgh"] * 3 == [ending(request) for request in asked.values()]


@pytest.mark.parametrize("n_steps", range(12))
def test_cancel_takes_effect_at_the_next_step_wherever_the_request_is(n_steps):
    """Waiting, reading, between two slices of its prompt, decoding: all it held is free, and others do not notice."""
    made = machine(slices=3)
    a = made.ask(made.agent("a"), max_tokens=30)
    b = made.ask(made.agent("b"), n_prompt=100, max_tokens=30)
    for _ in range(n_steps):
        made.scheduler.step()
    b.cancel()
    made.scheduler.step()
    assert isinstance(ending(b), Cancelled)
    assert 1 == b.work.aborted
    made.run()
    assert 30 == len(ending(a))
    assert made.pool.used == made.agents[0].hot_bytes


def test_in_the_middle_of_a_chunk_there_is_nothing_to_roll_back_to():
    """Its K and V are not there yet, so the checkpoint is withdrawn: the state is dropped instead."""
    made = machine(slices=5)
    request = made.ask(made.agent("a"), n_prompt=100)
    for _ in range(3):
        made.scheduler.step()
    seen = []
    request.work.abort = lambda request: seen.append(request.checkpoint)
    request.cancel()
    made.scheduler.step()
    assert [None] == seen
    other = made.ask(made.agent("b"), max_tokens=3)
    made.run()
    assert "cde" == ending(other)


def test_when_all_fail_everyone_is_told_even_if_cleaning_up_fails_too():
    """Nobody waits for an answer that does not come."""
    made = machine()
    asked = list(ask_some(made, "abc").values())
    made.scheduler.step()
    asked[0].work.abort = bad_sampler
    reading = made.scheduler.after(Future(), lambda: None)
    error = RuntimeError("all is lost")
    made.scheduler.fail_all(error)
    assert [error] * 3 == [ending(request) for request in asked]
    assert error is reading.exception(timeout=0)
    assert not made.scheduler.busy


def test_a_job_that_waits_for_bytes_runs_between_steps_and_its_error_is_its_own():
    """A restore in the background cannot disturb requests."""
    made = machine()
    request = made.ask(made.agent("a"), max_tokens=4)
    good, bad = Future(), Future()
    ran = []
    done = made.scheduler.after(good, lambda: ran.append(len(made.log)))
    failed = made.scheduler.after(bad, lambda: bad_sampler(None))
    made.scheduler.step()
    assert not ran
    good.set_result(None)
    bad.set_result(None)
    made.run()
    assert ran
    assert done.done()
    assert isinstance(failed.exception(), ZeroDivisionError)
    assert "cdef" == ending(request)


# -- no deadlock, whatever the mix

requests = st.fixed_dictionaries(
    {
        "agent": st.integers(0, 5),
        "n_prompt": st.integers(1, 150),
        "max_tokens": st.integers(1, 40),
        "at": st.integers(0, 30),
        "cancel_after": st.none() | st.integers(0, 30),
        "stops_early": st.booleans(),
        "bad": st.sampled_from(["", "", "", "sampler", "bytes"]),
        "reading": st.integers(0, 4),  # steps until its bytes are in
    }
)


@settings(max_examples=150, deadline=None)
@given(
    budget=st.integers(40, 400),
    max_batch=st.integers(1, 6),
    slices=st.integers(1, 3),
    plan=st.lists(requests, min_size=1, max_size=12),
    pins=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5), st.booleans()), max_size=8),
)
def test_every_request_ends_whatever_runs_waits_is_pinned_or_cancelled(budget, max_batch, slices, plan, pins):
    """With its reply or one error; the budget holds at each step, and only idle agents' states remain."""
    made = machine(budget, max_batch=max_batch, slices=slices)
    agents = [made.agent(str(i)) for i in range(6)]
    asked, reading = [], []
    for now in range(40):
        asked += [(wanted, _ask(made, agents, wanted, reading)) for wanted in plan if wanted["at"] == now]
        _deliver(reading, now)
        for then, which, pinned in pins:
            if then == now:
                agents[which].pinned = pinned
        for wanted, request in asked:
            if wanted["cancel_after"] is not None and wanted["at"] + wanted["cancel_after"] == now:
                request.cancel()
        made.scheduler.step()
        assert made.pool.used <= made.pool.total
    made.run()
    for wanted, request in asked:
        end = ending(request)
        assert isinstance(end, (str, MemoryBudgetError, *ERRORS[wanted["bad"]])) or (
            isinstance(end, Cancelled) and wanted["cancel_after"] is not None
        )
    assert made.pool.used == sum(agent.hot_bytes for agent in agents)


ERRORS = {"": (), "sampler": (ZeroDivisionError,), "bytes": (CorruptState,)}


def _ask(made, agents, wanted, reading):
    bytes_in = Future()
    reading.append((wanted["at"] + wanted["reading"], bytes_in, wanted["bad"] == "bytes"))
    sample = (
        bad_sampler if wanted["bad"] == "sampler" else (lambda logits: EOS_TOKEN) if wanted["stops_early"] else None
    )
    options = {name: wanted[name] for name in ("n_prompt", "max_tokens")}
    return made.ask(agents[wanted["agent"]], sample=sample, reading=bytes_in, **options)


def _deliver(reading, now):
    for due in [due for due in reading if due[0] <= now]:
        reading.remove(due)
        if due[2]:
            due[1].set_exception(CorruptState("damaged"))
        else:
            due[1].set_result(None)


class _Eos:
    def tolist(self):
        return EOS


EOS_TOKEN = _Eos()
