"""Rules 1, 2, 4 and 5 of the design over any mix of turns, forks, evictions, restarts and quotas."""

import contextlib
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amem import Cancelled, Engine
from tests.store.samples import SCRATCH

NAMES = ["planner", "critic", "writer"]
names = st.sampled_from(NAMES)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), names, st.integers(1, 120)),
        st.tuples(st.just("cancel"), names, st.integers(1, 120)),
        st.tuples(st.just("fork"), names, names),
        st.tuples(st.sampled_from(["evict", "restore", "rewind", "delete"]), names),
        st.tuples(st.just("restart")),
    ),
    min_size=3,
    max_size=12,
)


class Story:
    """An engine, and what its agents must remember: the prompts on each one's path."""

    def __init__(self, model, root, disk):
        self.open = lambda: Engine(model, root, memory="200MB", disk=disk, prefetch=False)
        self.engine = self.open()
        self.said = {}

    def do(self, what, name=None, given=None):
        if what == "restart":
            if all(self.engine.agent(name).status.saved for name in self.said):  # the rest is this process's alone
                self.engine.close()
                self.engine = self.open()
        elif what == "ask":
            self.ask(name, given)
        elif name in self.said:
            self.change(what, name, given)

    def ask(self, name, n_words):
        message = f"{name} {len(self.said.get(name, []))} " + "word " * n_words
        self.engine.agent(name).ask(message, max_tokens=6)
        self.said.setdefault(name, []).append(message)

    def cancel(self, agent, message):
        stream = agent.stream(message, max_tokens=50)
        with contextlib.suppress(Cancelled):
            for event in stream:
                stream.cancel()
                if event.reply is not None:  # it came too late
                    self.said[agent.name].append(message)

    def change(self, what, name, given):
        agent = self.engine.agent(name)
        if what == "cancel":
            self.cancel(agent, f"never {len(self.said[name])} " + "word " * given)
        elif what == "fork":
            if given not in self.said:
                agent.fork(given)
                self.said[given] = list(self.said[name])
        elif what == "rewind":
            if self.said[name]:
                agent.rewind()
                self.said[name].pop()
        else:
            getattr(agent, what)()
            if what == "delete":
                del self.said[name]

    def check(self):
        engine = self.engine
        status = engine.status()
        assert set(self.said) == {agent.name for agent in status.agents}
        assert status.disk_bytes <= status.disk_quota
        assert status.peak_hot_bytes <= status.memory_budget
        for name, prompts in self.said.items():
            agent = engine.agent(name)
            assert prompts == [turn.prompt for turn in agent.turns]
            n_ids, n_hot = engine.with_session(name, counts)
            assert n_ids == agent.status.n_tokens == sum(b.n_tokens for b in agent.block_map().layers[0].blocks)
            assert n_hot in (None, n_ids)


def counts(session):
    stands = session.hot is not None and session.hot_turn == session.store.head
    return len(session.head_tokens()), session.hot.n_tokens if stands else None


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(plan=steps, disk=st.sampled_from([400_000, 700_000, 1_500_000, 10**9]))
def test_ids_and_budgets_agree_after_every_step(tiny_model_path, plan, disk):
    """As many ids as tokens in K and V; nothing but its own turns in an agent; disk and memory within their bounds."""
    root = Path(tempfile.mkdtemp(dir=SCRATCH))
    story = Story(tiny_model_path, root, disk)
    try:
        for step in plan:
            story.do(*step)
            story.check()
        assert [] == story.engine.verify().problems
        for name in story.said:
            story.engine.agent(name).evict()
        assert 0 == story.engine.status().hot_bytes
        for name in list(story.said):
            story.do("ask", name, 3)
        story.check()
    finally:
        story.engine.close()
        shutil.rmtree(root)


def canary(engine, name, message):
    """An agent's tokens, and every bit that is stored of its head."""
    agent = engine.agent(name)
    ids = [agent.ask(message, max_tokens=10).token_ids, agent.ask("Go on.", max_tokens=10).token_ids]

    def bits(session):
        known = session.head_realization()
        found = session.store.find(session.parts.realm, session.head_tokens())
        records = [*found.blocks, session.store.snapshot(known.snapshot)]
        return [{key: part.tobytes() for key, part in session.store.read(record).items()} for record in records]

    return ids, engine.with_session(name, bits)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(same=st.booleans(), others=st.lists(st.integers(1, 100), min_size=1, max_size=3), evict=st.booleans())
def test_no_bit_of_an_agent_depends_on_who_else_is_stored(tiny_model_path, same, others, evict):
    """Alone, or after agents with other or the very same text: the same tokens, the same bits on disk, nothing reused."""
    message, found = "a list of many words " * 20, []
    for crowd in ([], others):
        root = Path(tempfile.mkdtemp(dir=SCRATCH))
        try:
            with Engine(tiny_model_path, root, memory="200MB", prefetch=False) as engine:
                for number, n_words in enumerate(crowd):
                    other = engine.agent(f"other {number}")
                    other.ask(message if same else "word " * n_words, max_tokens=10)
                    if evict:
                        other.evict()
                found.append(canary(engine, "canary", message))
                if crowd:
                    assert 0 == engine.agent("second").ask(message, max_tokens=1).metrics.reused_tokens
        finally:
            shutil.rmtree(root)
    assert found[0] == found[1]
