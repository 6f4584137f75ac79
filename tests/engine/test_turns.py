"""An agent's turns are a tree: moving in it is free, a cell that runs again finds its past, a full context can go on."""

import contextlib
import re

import numpy as np
import pytest

from amem import ContextOverflow, InputError, Match, Residency, StoreFull, UnknownTurn
from amem.store import AgentStore

LONG = "a list of many words " * 30
CELLS = {"one": LONG, "two": "And then? " * 9, "three": LONG + "!", "four": "The end."}
SHORT = {"one": "Hello.", "two": "And then?"}  # less than a group: there is no boundary from which to go on


class Counters:
    """What the model computed and the store wrote since the last look."""

    def __init__(self, engine, monkeypatch):
        self._engine = engine
        self.n_steps = 0
        runner = engine._parts.scheduler._runner
        for name in ("prefill", "decode"):
            monkeypatch.setattr(runner, name, self._counting(getattr(runner, name)))
        self._seen = self._now()

    def _counting(self, step):
        def counted(*args):
            self.n_steps += 1
            return step(*args)

        return counted

    def _now(self):
        written = self._engine._parts.store.written
        return {
            "steps of the model": self.n_steps,
            "payload bytes written": written.payload,
            "blocks": self._engine.verify().blocks,
        }

    def since(self):
        """What came in addition."""
        before, self._seen = self._seen, self._now()
        return {name: self._seen[name] - before[name] for name in before}


NOTHING = {"steps of the model": 0, "payload bytes written": 0, "blocks": 0}


@pytest.fixture
def planner(engine):
    """An agent with three long turns."""
    agent = engine.agent("planner", system="Be brief.")
    for prompt in (LONG, "Two. " * 40, "Three."):
        agent.ask(prompt, max_tokens=8)
    return agent


def run_all(agent, cells, execution, **options):
    """A notebook's cells from top to bottom."""
    return [
        agent.ask(prompt, max_tokens=12, cell_id=cell, execution=f"{cell} {execution}", **options)
        for cell, prompt in cells.items()
    ]


# -- moving in the tree ----------------------------------------------------------------------------------------------


def test_moving_in_the_tree_computes_and_copies_nothing(engine, planner, monkeypatch):
    """Rewind, checkout, named snapshots: no step of the model, no payload byte, no new block."""
    counters = Counters(engine, monkeypatch)
    third = planner.turns[-1].id
    planner.snapshot("end")
    planner.rewind()
    planner.rewind(to=planner.turns[0].id)
    planner.checkout(third)
    planner.rewind(3)
    planner.checkout("end")
    planner.forget_snapshot("end")
    assert NOTHING == counters.since()
    assert third == planner.turns[-1].id


def test_a_fork_computes_nothing_and_shares_every_block(engine, planner, monkeypatch):
    """In memory it takes an open group of its own, on disk its own list of turns: all payload files are links."""
    counters = Counters(engine, monkeypatch)
    hot = engine.status().hot_bytes
    fork = planner.fork("variant")
    past = planner.fork("past", at=planner.turns[0].id)
    n_linked = sum(engine.with_session(name, lambda session: session.store.n_blocks) for name in ("variant", "past"))
    assert NOTHING | {"blocks": n_linked} == counters.since()
    assert engine._parts.layout.open_nbytes == engine.status().hot_bytes - hot
    for agent in (fork, past):
        folder = engine.with_session(agent.name, lambda session: session.store.root)
        links = [file.stat().st_nlink for file in folder.glob("*.safetensors")]
        assert links
        assert min(links) >= 2
    assert planner.turns[0].prompt == past.turns[-1].prompt


def test_a_fork_replaces_an_agent_only_where_that_is_asked_for(planner):
    """Nothing is deleted before the new one can be made, and no agent is replaced by its own fork."""
    variant = planner.fork("variant")
    variant.ask("Go on.", max_tokens=3)
    n_turns = len(planner.turns)
    with pytest.raises(InputError, match="exists already"):
        planner.fork("variant")
    with pytest.raises(UnknownTurn):
        planner.fork("variant", at=99, replace=True)
    with pytest.raises(InputError, match="own fork"):
        planner.fork("planner", replace=True)
    assert n_turns + 1 == len(variant.turns)
    with contextlib.closing(variant.stream("Go on.", max_tokens=100)) as events:
        next(events)
        with pytest.raises(InputError, match="answering"):
            planner.fork("variant", replace=True)
    assert n_turns == len(planner.fork("variant", replace=True).turns) == len(planner.turns)
    metrics = planner.fork("variant", replace=True).ask("Go on.", max_tokens=3).metrics
    assert metrics.reused_tokens == planner.turns[-1].n_tokens


@pytest.mark.parametrize("keep_last", [None, 1])
def test_a_fork_that_cannot_be_made_replaces_nobody(engine, planner, monkeypatch, keep_last):
    """The disk may be full: the agent that was to be replaced is as it was, and nothing is left of the fork."""
    variant = planner.fork("variant")
    variant.ask("Go on.", max_tokens=3)
    turns, names, used = variant.turns, engine.agents(), engine.status().hot_bytes
    with monkeypatch.context() as patch:

        def full(*_args, **_options):
            raise StoreFull("no space left")

        patch.setattr(AgentStore, "fork_into" if keep_last is None else "commit", full)
        with pytest.raises(StoreFull):
            planner.fork("variant", keep_last=keep_last, replace=True)
    assert turns == variant.turns
    assert (names, used) == (engine.agents(), engine.status().hot_bytes)
    planner.fork("variant", keep_last=keep_last, replace=True)
    assert sorted(names) == sorted(engine.agents())
    assert "Go on." not in [turn.prompt for turn in variant.turns]
    assert [] == engine.verify().problems


def test_after_moving_only_the_new_message_is_computed(engine, planner):
    """Wherever the head was moved to, its whole past is found."""
    for place in (planner.turns[0], planner.turns[2], planner.turns[1]):
        planner.checkout(place.id)
        metrics = planner.ask("Go on.", max_tokens=3).metrics
        assert place.n_tokens == metrics.reused_tokens
        assert Match.EXTEND is metrics.match


def test_named_snapshots_are_places_to_go_back_to(open_engine):
    """By name, after a restart too; a fork has those that lie on its path."""
    engine = open_engine()
    agent = engine.agent("planner")
    first = agent.ask("One.", max_tokens=3).turn
    agent.snapshot("before")
    second = agent.ask("Two.", max_tokens=3).turn
    agent.snapshot("after")
    assert {"before": first, "after": second} == agent.snapshots
    engine.close()
    agent = open_engine().agent("planner")
    agent.rewind(to="before")
    assert [first] == [turn.id for turn in agent.turns]
    agent.checkout("after")
    fork = agent.fork("variant", at="before")
    assert {"before": first} == fork.snapshots
    assert first == fork.turns[-1].id
    fork.ask("Another two.", max_tokens=3)
    assert {"before": first} == fork.snapshots
    agent.forget_snapshot("before")
    assert {"after": second} == agent.snapshots
    assert 2 == len(agent.tree())


def test_places_that_are_not_there_are_refused(planner):
    """With what there is; the head stays."""
    head = planner.turns[-1].id
    planner.snapshot("here")
    with pytest.raises(UnknownTurn, match="its snapshots are here"):
        planner.checkout("there")
    with pytest.raises(UnknownTurn, match="no turn 99"):
        planner.rewind(to=99)
    with pytest.raises(UnknownTurn, match="no turn 99"):
        planner.fork("x", at=99)
    with pytest.raises(UnknownTurn, match="no snapshot"):
        planner.forget_snapshot("there")
    with pytest.raises(InputError, match="already"):
        planner.snapshot("here", at=planner.turns[0].id)
    for name in ("", "  ", "12", "x" * 129, 7):
        with pytest.raises(InputError, match="not a number"):
            planner.snapshot(name)
    planner.rewind(to=planner.turns[0].id)
    with pytest.raises(UnknownTurn, match="use checkout"):
        planner.rewind(to=head)


@pytest.mark.parametrize("place", [1.0, True, float("nan"), b"1", [1]])
def test_what_is_no_whole_number_is_no_turn(place, planner):
    """Python finds 1.0 and True where 1 is; a store that took them could not be read any more."""
    head = planner.turns[-1].id
    for move in (planner.checkout, lambda at: planner.rewind(to=at), lambda at: planner.snapshot("s", at=at)):
        with pytest.raises(UnknownTurn, match="has no turn"):
            move(place)
    with pytest.raises(
        InputError, match=r"has [1-9] turns? to rewind, so .* is not possible: give a whole number from 1"
    ):
        planner.rewind(place)
    planner.checkout(np.int64(head))
    assert head == planner.turns[-1].id
    assert {} == planner.snapshots


def test_an_agent_without_turns_has_nothing_to_name(engine):
    """It says so."""
    with pytest.raises(InputError, match="no turn yet"):
        engine.agent("planner").snapshot("start")


# -- cells -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", [CELLS, SHORT], ids=["long", "short"])
def test_run_all_unchanged_is_a_walk_through_what_is_there(open_engine, monkeypatch, cells):
    """After a restart: each cell EXACT or EXTEND, at most a group computed, equal replies, no block written."""
    engine = open_engine()
    first = run_all(engine.agent("planner"), cells, 1)
    tree = engine.agent("planner").tree()
    engine.close()
    engine = open_engine()
    counters = Counters(engine, monkeypatch)
    again = run_all(engine.agent("planner"), cells, 2)
    assert [reply.token_ids for reply in first] == [reply.token_ids for reply in again]
    assert all(reply.metrics.match in (Match.EXACT, Match.EXTEND) for reply in again)
    assert all(reply.metrics.computed_tokens <= 64 for reply in again)
    assert tree == engine.agent("planner").tree()
    assert {"payload bytes written": 0, "blocks": 0} == {
        name: value for name, value in counters.since().items() if name != "steps of the model"
    }


def test_edit_the_first_cell_and_run_all_rebuilds_the_later_turns_on_it(engine):
    """The earlier try stays as a branch, and the reply says which turns were left there."""
    agent = engine.agent("planner")
    before = run_all(agent, CELLS, 1)
    edited = run_all(agent, CELLS | {"one": LONG + "Differently."}, 2)
    assert [LONG + "Differently.", *list(CELLS.values())[1:]] == [turn.prompt for turn in agent.turns]
    left = ", ".join(str(reply.turn) for reply in before)
    assert any(f"left on another branch: turns {left}" in note for note in edited[0].metrics.notes)
    assert not any("branch" in note for reply in edited[1:] for note in reply.metrics.notes)
    assert Match.DIVERGE is edited[0].metrics.match
    assert 2 * len(CELLS) == len(agent.tree())
    assert {reply.turn for reply in before}.isdisjoint(turn.id for turn in agent.turns)


def test_an_edit_that_is_undone_finds_the_first_try_again(engine, monkeypatch):
    """Its turns, its blocks, its replies."""
    agent = engine.agent("planner")
    first = run_all(agent, CELLS, 1)
    run_all(agent, CELLS | {"one": LONG + "Differently."}, 2)
    tree = agent.tree()
    counters = Counters(engine, monkeypatch)
    back = run_all(agent, CELLS, 3)
    assert [reply.turn for reply in first] == [reply.turn for reply in back]
    assert len(tree) == len(agent.tree())
    assert 0 == counters.since()["payload bytes written"]


def test_a_cell_in_the_middle_is_edited_from_where_it_differs(engine):
    """What lies before it is reused whole."""
    agent = engine.agent("planner")
    run_all(agent, CELLS, 1)
    before = agent.turns[1].n_tokens
    metrics = agent.ask(LONG + "?", max_tokens=4, cell_id="three", execution="three 2").metrics
    assert metrics.reused_tokens >= before
    assert metrics.computed_tokens <= 64 + 8
    assert 3 == len(agent.turns)


@pytest.mark.parametrize("cell", ["vscode-notebook-cell:/home/me/plan.ipynb#W2sZmlsZQ%3D%3D", "a b/ü"])
def test_any_kind_of_cell_id_tells_cells_apart(engine, cell):
    """VS Code sends a URI."""
    agent = engine.agent("planner")
    agent.ask("One.", max_tokens=3, cell_id=cell, execution="1")
    agent.ask("Two.", max_tokens=3, cell_id=cell + "3", execution="2")
    agent.ask("One!", max_tokens=3, cell_id=cell, execution="3")
    assert ["One!"] == [turn.prompt for turn in agent.turns]
    assert 3 == len(agent.tree())


def test_a_uri_of_an_earlier_session_may_be_another_cells_and_says_so(open_engine):
    """VS Code numbers its cells anew when a notebook is opened: what was left behind is named, with the way back."""
    cell = "vscode-notebook-cell:/plan.ipynb#W2"
    engine = open_engine()
    turn = engine.agent("planner").ask("One.", max_tokens=3, cell_id=cell, execution="1").turn
    engine.close()
    agent = open_engine().agent("planner")
    unchanged = agent.ask("One.", max_tokens=3, cell_id=cell, execution="2").metrics
    assert not any("checkout" in note for note in unchanged.notes)
    edited = agent.ask("Other.", max_tokens=3, cell_id=cell, execution="3").metrics
    assert not any("checkout" in note for note in edited.notes)
    engine = agent._engine
    agent.checkout(turn)
    engine.close()
    agent = open_engine().agent("planner")
    other = agent.ask("Something else.", max_tokens=3, cell_id=cell, execution="4").metrics
    assert any(f"checkout {turn}" in note and "--append" in note for note in other.notes)


def test_without_a_cell_id_a_message_is_added(engine):
    """As front ends without ids send it: nothing is replaced."""
    agent = engine.agent("planner")
    for _ in range(2):
        agent.ask("One.", max_tokens=3, execution="1")
    assert ["One.", "One."] == [turn.prompt for turn in agent.turns]


# -- recorded replies ------------------------------------------------------------------------------------------------


def test_a_recorded_reply_is_given_without_a_step_of_the_model(open_engine, monkeypatch):
    """After a restart, with its tokens, for each cell of the notebook."""
    engine = open_engine()
    first = run_all(engine.agent("planner"), CELLS, 1)
    engine.close()
    engine = open_engine()
    counters = Counters(engine, monkeypatch)
    agent = engine.agent("planner")
    agent.rewind(len(CELLS))
    again = run_all(agent, CELLS, 2, cached=True)
    assert NOTHING == counters.since()
    assert [(r.text, r.token_ids, r.turn, r.finish_reason) for r in first] == [
        (r.text, r.token_ids, r.turn, r.finish_reason) for r in again
    ]
    assert all(reply.metrics.match is Match.EXACT for reply in again)
    assert all("recorded reply" in reply.metrics.notes[0] for reply in again)
    assert all(0 == reply.metrics.computed_tokens == reply.metrics.generated_tokens for reply in again)
    assert first[-1].turn == agent.turns[-1].id
    assert Match.EXTEND is agent.ask("Go on.", max_tokens=3).metrics.match


def test_a_recorded_reply_is_streamed_as_one_piece(engine):
    """Events as ever, the reply last."""
    agent = engine.agent("planner")
    first = agent.ask("One.", max_tokens=5, cell_id="a", execution="1")
    events = list(agent.stream("One.", max_tokens=5, cell_id="a", execution="2", cached=True))
    assert first.text == "".join(event.text for event in events) == events[-1].reply.text


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("One!", {}),
        ("One.", {"max_tokens": 6}),
        ("One.", {"temperature": 0.5}),
        ("One.", {"seed": "random"}),
        ("One.", {"system": "Other."}),
        ("One.", {"append": True}),
    ],
)
def test_what_is_not_recorded_is_computed(engine, message, options):
    """Another prompt, other settings, another system text, another parent."""
    agent = engine.agent("planner")
    agent.ask("One.", max_tokens=5, cell_id="a", execution="1", system="Be brief.")
    again = agent.ask(message, cell_id="a", execution="2", cached=True, **{"max_tokens": 5, **options})
    assert again.metrics.generated_tokens > 0
    assert 2 == len(agent.tree())


# -- the system text -------------------------------------------------------------------------------------------------


def test_another_system_text_is_refused_outside_the_first_turns_cell(engine):
    """Before anything changes; the cell of the first turn may change it."""
    agent = engine.agent("planner")
    agent.ask("One.", max_tokens=3, system="A.", cell_id="one", execution="1")
    agent.ask("Two.", max_tokens=3, cell_id="two", execution="2")
    tree = agent.tree()
    for cell, execution in (("two", "3"), ("new", "4"), (None, None), ("two", "2")):
        with pytest.raises(InputError, match=r"another system text.*cell of its first turn"):
            agent.ask("Two.", max_tokens=3, system="B.", cell_id=cell, execution=execution)
    assert tree == agent.tree()
    agent.ask("Two.", max_tokens=3, system="A.", cell_id="two", execution="5")
    agent.ask("One.", max_tokens=3, system="B.", cell_id="one", execution="6")
    assert "B." == agent.system


# -- a full context --------------------------------------------------------------------------------------------------


def test_a_full_context_names_the_fork_that_goes_on(engine):
    """And that fork can be asked: it holds the system text and the last turns, and nothing of the rest."""
    agent = engine.agent("planner", system="Be brief.")
    for number in range(5):
        agent.ask(f"Number {number}. " + "word " * 140, max_tokens=20)
    before = agent.tree()
    with pytest.raises(ContextOverflow, match=r"keep_last=\d+") as raised:
        agent.ask("And so on?", max_tokens=1900)
    assert before == agent.tree()
    n_last = int(re.search(r"keep_last=(\d+)", str(raised.value))[1])
    assert 1 <= n_last < 5
    fork = agent.fork("on", keep_last=n_last)
    assert Residency.COLD is fork.status.residency
    assert "Be brief." == fork.system
    assert [turn.prompt for turn in agent.turns[-n_last:]] == [turn.prompt for turn in fork.turns]
    assert [turn.reply for turn in agent.turns[-n_last:]] == [turn.reply for turn in fork.turns]
    with contextlib.closing(fork.stream("And so on?", max_tokens=1900)) as events:
        assert next(events)
    with pytest.raises(ContextOverflow):
        agent.fork("more", keep_last=n_last + 1).ask("And so on?", max_tokens=1900)
    reply = fork.ask("And so on?", max_tokens=3)
    assert Match.COLD is reply.metrics.match
    assert Match.EXTEND is fork.ask("And on.", max_tokens=3).metrics.match


def test_a_shorter_fork_keeps_the_replies_tokens_as_they_were_generated(engine, replies):
    """It is text at another position: computed again, from the very same tokens of each turn."""
    agent = engine.agent("planner", system="Be brief.")
    said = [[70, 71, 72, 2], [80, 81, 82, 2], [90, 91, 92]]
    for number, ids in enumerate(said):
        replies.say(ids)
        agent.ask(f"Number {number}.", max_tokens=len(ids))
    fork = agent.fork("on", keep_last=2)
    ids = engine.with_session("on", lambda session: session.head_tokens().tolist())
    text = engine._parts.prompter.decode(ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nNumber 1.")
    for reply in said[1:]:
        assert any(ids[at : at + len(reply)] == reply for at in range(len(ids)))
    assert "Number 0" not in text
    fork.ask("Go on.", max_tokens=3)
    assert 3 == len(fork.turns)
    agent.ask("Go on.", max_tokens=3)
    assert 4 == len(agent.turns)


def test_a_fork_that_keeps_all_turns_is_a_fork(planner):
    """Nothing is computed again."""
    fork = planner.fork("all", keep_last=9)
    assert Match.EXTEND is fork.ask("Go on.", max_tokens=3).metrics.match


@pytest.mark.parametrize("keep_last", [0, -1, 1.5, True, "2"])
def test_a_count_of_turns_that_cannot_be_is_refused(planner, keep_last):
    """And no agent is made."""
    with pytest.raises(InputError, match="keep_last"):
        planner.fork("x", keep_last=keep_last)
    assert ["planner"] == planner._engine.agents()
