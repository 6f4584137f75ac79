"""How requests and engines end: closed early, dropped, interrupted, or not closed at all."""

import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from amem import Engine, InputError, MemoryBudgetError
from tests.engine.interrupts import interrupt_main, main_queues, main_waits

LONG = "a list of many words " * 30

ENDINGS = {
    "idle": 'engine.agent("p").ask("h", max_tokens=2)',
    "streaming": 'stream = engine.agent("p").stream("h", max_tokens=900); next(stream)',
    "error in the loop": 'for event in engine.agent("p").stream("h", max_tokens=900): raise SystemExit(0)',
    "another thread asks": (
        "def ask():\n"
        '    try: engine.agent("p").ask("h", max_tokens=300)\n'
        "    except Exception: pass\n"
        "thread = threading.Thread(target=ask); thread.start(); time.sleep(0.3)"
    ),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_program_that_never_closes_its_engine_ends_cleanly(ending, tiny_model_path, tmp_path):
    """No abort, no hang, and the agent's lock is free."""
    script = (
        "import threading, time\nfrom amem import Engine\n"
        f"engine = Engine({str(tiny_model_path)!r}, {str(tmp_path / 'store')!r}, memory='200MB')\n{ending}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert 0 == done.returncode, done.stderr
    assert "terminate" not in done.stderr
    with Engine(tiny_model_path, tmp_path / "store", memory="200MB") as engine:
        engine.agent("p").ask("h", max_tokens=2)
        assert [] == engine.verify().problems


def test_an_engine_that_is_dropped_frees_its_agents(tiny_model_path, tmp_path):
    """A cell that makes an engine can run twice."""
    engine = Engine(tiny_model_path, tmp_path / "store", memory="200MB")
    engine.agent("p").ask("h", max_tokens=2)
    del engine
    gc.collect()
    with Engine(tiny_model_path, tmp_path / "store", memory="200MB") as engine:
        assert 1 == len(engine.agent("p").turns)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_stream_that_was_never_started_is_cancelled_too(how, engine):
    """Nothing is committed behind the caller's back."""
    agent = engine.agent("p")
    stream = agent.stream("Never mind.", max_tokens=900)
    if how == "close":
        stream.close()
    del stream
    agent.ask("Next.", max_tokens=2)
    assert ["Next."] == [turn.prompt for turn in agent.turns]


def test_an_interrupted_batch_commits_nothing_afterwards(engine, interruptible):
    """All of its requests are cancelled, not only the one that was waited for."""
    engine.agent("c"), engine.agent("d")
    interrupt_main(main_waits)
    with pytest.raises(KeyboardInterrupt):
        engine.ask_all({"c": "hi", "d": "hi"}, max_tokens=900)
    assert [0, 0] == [len(engine.agent(name).turns) for name in "cd"]
    assert not any(engine.with_session(name, lambda session: session.is_asked) for name in "cd")


def test_a_batch_with_one_refused_message_asks_nobody(engine):
    """It is refused before anything changes."""
    with pytest.raises(InputError, match="empty"):
        engine.ask_all({"a": "hi", "b": " "}, max_tokens=300)
    assert [] == engine.agent("a").turns


def test_an_interrupt_while_a_request_is_queued_leaves_nothing(engine, interruptible):
    """Also when the engine is busy with something else just then."""
    agent = engine.agent("p")
    go_on = threading.Event()
    engine._owner.submit(lambda: go_on.wait(60))
    interrupt_main(main_queues)
    with pytest.raises(KeyboardInterrupt):
        agent.ask("hi", max_tokens=3)
    go_on.set()
    agent.ask("Next.", max_tokens=2)
    assert ["Next."] == [turn.prompt for turn in agent.turns]


def test_a_waiting_request_keeps_its_agent(open_engine):
    """Deleting or moving an agent that is asked is refused, even if its turn has not come."""
    engine = open_engine(max_batch=1)
    engine.agent("w2").ask("before", max_tokens=2)
    first = engine.agent("w1").stream("one", max_tokens=300)
    second = engine.agent("w2").stream("two", max_tokens=2)
    for change in (engine.agent("w2").delete, engine.agent("w2").rewind, engine.agent("w2").evict):
        with pytest.raises(InputError, match="answering"):
            change()
    first.close()
    assert 2 == len([event for event in second if event.reply] + engine.agent("w2").turns) - 1


def test_a_look_at_the_status_changes_no_order_of_use(open_engine):
    """Or the disk quota would take the newest agent first."""
    engine = open_engine()
    for name in ("old", "mid", "new"):
        engine.agent(name).ask("hi", max_tokens=2)
    engine.close()
    engine = open_engine()
    before = engine.agents()
    engine.status()
    assert before == engine.agents() == ["new", "mid", "old"]


def test_what_fits_one_after_the_other_fits_as_a_batch(open_engine):
    """The idle state of an agent that only waits makes room, and is restored in its turn."""
    probe = open_engine()
    budget = int(1.3 * probe._parts.sequence_nbytes(900))
    probe.close()
    engine = open_engine(memory=budget)
    for name in "ab":
        engine.agent(name).ask("hello " * 150, max_tokens=8)
    replies = engine.ask_all({"a": "more " * 60, "b": "more " * 60}, max_tokens=20)
    assert {"a", "b"} == replies.keys()
    assert engine.status().peak_hot_bytes <= budget


def test_a_fork_without_room_is_warm(open_engine):
    """It needs no memory until it is asked."""
    engine = open_engine(memory="1MB")
    agent = engine.agent("p")
    agent.ask(LONG, max_tokens=4)
    agent.pin()
    forks = [agent.fork(f"fork {i}") for i in range(8)]
    for fork in forks:
        fork.pin()
        assert 1 == len(fork.turns)
    forks[-1].delete()
    with pytest.raises(MemoryBudgetError, match="unpin"):
        engine.agent("other").ask("word " * 700, max_tokens=200)


@pytest.mark.parametrize("call", [lambda e: e.delete("typo"), lambda e: e.fork("typo", "x")])
def test_a_name_that_is_not_there_makes_no_agent(engine, call):
    """A typing error is said."""
    with pytest.raises(InputError, match="no agent 'typo'"):
        call(engine)
    assert [] == engine.agents()


def test_a_deleted_agent_does_not_come_back_by_being_looked_at(engine):
    """Only asking it, or engine.agent, makes it anew."""
    agent = engine.agent("p")
    agent.delete()
    with pytest.raises(InputError, match="no agent"):
        agent.turns  # noqa: B018  # a property
    assert [] == engine.agents()


@pytest.mark.parametrize(
    "options",
    [{"stop": 5}, {"stop": None}, {"stop": [b"x"]}, {"stop": ["\ud800"]}, {"cell_id": 5}, {"execution": 3},
     {"cell_id": "\ud800"}, {"system": 5}, {"system": "\ud800"}, {"message": "half \ud800"}],
)  # fmt: skip
def test_what_cannot_be_saved_is_refused_at_once(engine, options):
    """Not after a whole reply was generated."""
    message = options.pop("message", "Hi.")
    with pytest.raises(InputError):
        engine.agent("p").ask(message, max_tokens=2, **options)
    with pytest.raises(InputError):
        engine.agent("q", system="\ud800")
    assert ["p"] == engine.agents()


@pytest.mark.parametrize("options", [{"memory": 0}, {"store": "~nosuch_user/x"}, {"model": "~nosuch_user/x"}])
def test_engine_options_that_lead_nowhere_are_refused(options, tiny_model_path, tmp_path):
    """None is taken for another, or ends in a traceback."""
    from amem import AmemError

    with pytest.raises(AmemError):
        Engine(**{"model": tiny_model_path, "store": tmp_path / "store", **options})


def test_an_interrupted_load_is_not_waited_for(tiny_model_path, tmp_path):
    """The caller goes on at once; what was loaded is let go of, and the next engine finds the store free."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(_sentence):
        inside.set()
        go_on.wait(60)

    def interrupt():
        inside.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    before = set(threading.enumerate())
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        Engine(tiny_model_path, tmp_path / "store", memory="200MB", progress=slow)
    assert not go_on.is_set()  # the load still waits for this, and we do not
    interrupter.join()
    (owner,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "amem-owner"]
    go_on.set()
    owner.join(60)
    assert not owner.is_alive()
    with Engine(tiny_model_path, tmp_path / "store", memory="200MB") as engine:
        assert engine.agents() == []
