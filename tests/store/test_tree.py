"""The prefix tree against a model that compares everything with everything."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from amem.store import Store
from tests.store.samples import OTHER, REALM, SCRATCH, SPACE, check, say

# Runs of one token, so that histories share prefixes that end inside groups, inside blocks and on their boundaries.
RUNS = st.lists(
    st.tuples(st.integers(1, 2), st.sampled_from([1, 5, 63, 64, 65, 127, 128, 192, 255, 256, 257])), max_size=4
).map(lambda runs: np.concatenate([np.full(n, token, np.int32) for token, n in runs] or [np.empty(0, np.int32)]))


def common(a, b):
    """How many tokens two histories share at their start."""
    n = min(len(a), len(b))
    differs = np.nonzero(a[:n] != b[:n])[0]
    return int(differs[0]) if len(differs) else n


class Model(RuleBasedStateMachine):
    """Histories that were committed, by agent, realm and turn; each keeps whole groups and its exact end."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=SCRATCH))
        self.store = Store(self.folder)
        self.agents = {}
        self.histories = {}

    @initialize()
    def start(self):
        self.add("a", self.store.open("a", SPACE), {})

    def add(self, name, agent, histories):
        self.agents[name] = agent
        self.histories[name] = histories

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.agents)))

    @rule(data=st.data(), ids=RUNS, realm=st.sampled_from([REALM, REALM, OTHER]))
    def commit(self, data, ids, realm):
        name = self.pick(data)
        mine = [turn for turn, (of, _) in self.histories[name].items() if of == realm]
        parent = data.draw(st.sampled_from([None, *mine]))
        turn = say(self.agents[name], parent, ids, realm)
        before = self.histories[name][parent][1] if parent else np.empty(0, np.int32)
        self.histories[name][turn.id] = (realm, np.concatenate([before, ids]))

    @rule(data=st.data(), ids=RUNS, cut=st.integers(0, 700), realm=st.sampled_from([REALM, OTHER]))
    def find(self, data, ids, cut, realm):
        name = self.pick(data)
        known = [np.empty(0, np.int32), *(history for _, history in self.histories[name].values())]
        base = known[data.draw(st.integers(0, len(known) - 1))]
        wanted = np.concatenate([base[:cut], ids])
        mine = [history for of, history in self.histories[name].values() if of == realm]
        ends = [len(h) for h in mine if len(h) <= len(wanted) and common(h, wanted) == len(h)]
        groups = [common(h, wanted) // 64 * 64 for h in mine]
        assert max([0, *ends, *groups]) == check(self.agents[name], wanted, realm)
        assert max([0, *ends]) == self.agents[name].find(realm, wanted, exact=True).n_tokens

    @precondition(lambda self: any(self.histories.values()))
    @rule(data=st.data())
    def move(self, data):
        name = self.pick(data)
        self.agents[name].set_head(data.draw(st.sampled_from([None, *self.histories[name]])))

    @precondition(lambda self: len(self.agents) < 3)
    @rule(data=st.data())
    def fork(self, data):
        name = self.pick(data)
        agent, new = self.agents[name], f"{name}+{len(self.agents)}"
        at = data.draw(st.sampled_from([None, *self.histories[name]]))
        turns = agent.path(at or agent.head) if at or agent.head else []
        before = self.store.written.payload
        self.add(new, agent.fork(new, SPACE, at), {turn: self.histories[name][turn] for turn in turns})
        assert before == self.store.written.payload

    @rule()
    def reopen(self):
        self.store.close()
        self.store = Store(self.folder)
        self.agents = {name: self.store.open(name, SPACE, create=False) for name in self.agents}

    @invariant()
    def tokens_are_those_of_the_turns(self):
        for name, agent in self.agents.items():
            assert set(self.histories[name]) == set(agent.turns())
            for turn, (realm, history) in self.histories[name].items():
                assert np.array_equal(history, agent.path_tokens(turn, realm))
                assert len(history) == agent.realization(turn, realm).n_tokens

    def teardown(self):
        assert self.store.reports == []
        self.store.close()
        shutil.rmtree(self.folder)


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=25, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@given(st.lists(RUNS, min_size=1, max_size=5), st.integers(0, 1200))
@settings(max_examples=15, deadline=None)
def test_a_limit_is_a_shorter_question(histories, limit):
    """find(ids, limit=n) is find(ids[:n])."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder, Store(Path(folder)) as store:
        agent = store.open("a", SPACE)
        for history in histories:
            say(agent, None, history)
        wanted = np.concatenate(histories)
        assert agent.find(REALM, wanted, limit=limit).n_tokens == agent.find(REALM, wanted[:limit]).n_tokens


def test_many_siblings_cost_nothing(store):
    """The rows that a search reads do not grow with the number of branches that share its first groups."""
    agent = store.open("a", SPACE)
    rng = np.random.default_rng(0)
    shared = np.arange(300)
    counts = []
    for branches in (2, 60):
        for _ in range(branches):
            say(agent, None, np.concatenate([shared, rng.integers(1000, 9000, 100)]))
        read = []
        agent._database._connection.set_trace_callback(read.append)
        assert agent.find(REALM, np.concatenate([shared, np.arange(100)])).n_tokens == 256
        agent._database._connection.set_trace_callback(None)
        counts.append(len(read))
    assert counts[0] == counts[1]
