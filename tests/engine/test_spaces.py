"""Agents that move to another space, as those of a renamed notebook do."""

import pytest

from amem import AgentLocked, InputError, Match


def test_an_adopted_agent_goes_on_from_its_state(open_engine):
    """All branches come along, nothing is computed again, and the old space is empty, in other engines too."""
    with open_engine(space="old.ipynb") as engine:
        planner = engine.agent("planner")
        planner.ask("Hello. " * 20, max_tokens=8, cell_id="c1")
        planner.ask("Go on.", max_tokens=4, cell_id="c2")
        planner.ask("Go on otherwise.", max_tokens=4, cell_id="c2")
        tree = planner.tree()
    with open_engine(space="new.ipynb") as engine:
        assert engine.spaces() == ["old.ipynb"]
        assert engine.cell_ids("old.ipynb") == {"c1", "c2"}
        assert engine.adopt("old.ipynb") == ["planner"]
        planner = engine.agent("planner")
        assert planner.tree() == tree
        reply = planner.ask("And now?", max_tokens=4)
        assert Match.EXTEND is reply.metrics.match
        assert planner.status.space == "new.ipynb"
    with open_engine(space="old.ipynb") as engine:
        assert engine.agents() == []
        assert engine.spaces() == ["new.ipynb"]
        assert engine.verify().problems == []


def test_two_of_one_name_are_not_mixed(open_engine):
    """It is refused before anything has moved."""
    with open_engine(space="old") as engine:
        engine.agent("critic").ask("Hello.", max_tokens=2)
        engine.agent("planner").ask("Hello.", max_tokens=2)
    engine = open_engine(space="new")
    engine.agent("planner").ask("Hello.", max_tokens=2)
    with pytest.raises(InputError, match="both spaces have an agent 'planner'"):
        engine.adopt("old")
    assert engine.agents() == ["planner"]


def test_agents_in_use_stay(open_engine):
    """Whoever holds them is named."""
    other = open_engine(space="old")
    other.agent("planner").ask("Hello.", max_tokens=2)
    engine = open_engine(space="new")
    with pytest.raises(AgentLocked, match="in use by"):
        engine.adopt("old")
    assert other.agents() == ["planner"]


def test_an_agent_goes_from_store_to_store_in_a_file(open_engine, tmp_path):
    """Exported, deleted, and imported under another name, it is as it was."""
    engine = open_engine(space="a")
    planner = engine.agent("planner")
    planner.ask("Hello. " * 20, max_tokens=8)
    file = tmp_path / "planner.amem"
    assert planner.export(file) == file.stat().st_size
    with pytest.raises(InputError, match="exists already"):
        planner.export(file)
    turns = planner.turns
    with pytest.raises(InputError, match="already"):
        engine.import_agent(file)
    planner.delete()
    again = engine.import_agent(file, name="again")
    assert again.turns == turns
    assert Match.EXTEND is again.ask("Go on.", max_tokens=2).metrics.match


def test_capacity_is_of_this_model_and_budget(open_engine):
    """Larger contexts leave room for fewer agents."""
    engine = open_engine(memory="100MB")
    rows = [row for row in engine.capacity([256, 4096]) if row.codec == "q4"]
    assert [row.memory_nbytes for row in rows] == [100_000_000] * 2
    assert rows[0].agents > rows[1].agents > 0
    with pytest.raises(InputError, match="at least one token"):
        engine.capacity([0])


def test_a_restore_is_told_before_the_prefill(open_engine):
    """With the tokens that it brings back."""
    with open_engine() as engine:
        engine.agent("planner").ask("Hello. " * 20, max_tokens=8)
    engine = open_engine()
    *events, last = engine.agent("planner").stream("Go on.", max_tokens=2)
    assert events[0].stage == "restore"
    assert last.reply.metrics.reused_tokens == events[0].total > 0


@pytest.mark.parametrize("typed", ["é", "e\u0301"])
def test_a_name_is_the_same_however_it_was_typed(engine, typed):
    """All that takes a name finds the same agent; a space's name is one in the same way."""
    agent = engine.agent("é")
    agent.ask("One.", max_tokens=2)
    assert 1 == len(engine.agent(typed).turns)
    engine.ask_all({typed: "Two."}, max_tokens=2)
    assert ["One.", "Two."] == [turn.prompt for turn in agent.turns]
    assert ["é"] == engine.agents() == [shown.name for shown in engine.status()]
    with pytest.raises(InputError, match="own fork"):
        engine.fork(typed, "é", replace=True)
    engine.fork(typed, f"{typed} 2")
    assert 2 == len(engine.agent("é 2").turns)
    engine.release(typed)
    engine.prefetch(typed).result()
    inside = engine.in_space(f"caf{typed}")
    inside.agent("a").ask("Three.", max_tokens=2)
    assert 1 == len(engine.in_space("café").agent("a").turns)
    assert ["a"] == engine.in_space("café").agents()
    assert ["a"] == engine.adopt(f"caf{typed}")
    engine.delete(typed)
    assert {"é 2", "a"} == set(engine.agents())


@pytest.mark.parametrize("name", [" ", "\u00a0", "\u200b"])
def test_a_name_that_nobody_can_see_is_refused(engine, name):
    """Before anything is made."""
    with pytest.raises(InputError, match="can be seen"):
        engine.agent(name)
    with pytest.raises(InputError, match="can be seen"):
        engine.agent(name, create=False).ask("Hello.", max_tokens=2)
    assert [] == engine.agents()
