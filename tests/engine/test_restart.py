"""What survives: eviction, restart, fork, rewind, and cells that run again."""

import numpy as np
import pytest

from amem import AgentLocked, InputError, Match, Residency, UnknownTurn
from amem.model.spec import CODECS

LONG = "a list of many words " * 30


def talk(agent, messages, **options):
    return [agent.ask(message, max_tokens=20, **options) for message in messages]


@pytest.mark.parametrize("codec", CODECS)
def test_greedy_tokens_after_a_restart_equal_an_uninterrupted_run(open_engine, codec):
    """Each turn in an engine of its own, against all turns in one."""
    messages = [LONG, "And then?", LONG, "More.", "The end."]
    through = open_engine(space="through", codec=codec)
    wanted = [reply.token_ids for reply in talk(through.agent("planner"), messages)]
    through.close()
    got = []
    for message in messages:
        engine = open_engine(space="restarted", codec=codec)
        reply = engine.agent("planner").ask(message, max_tokens=20)
        assert reply.metrics.residency in (Residency.EMPTY, Residency.WARM)
        got.append(reply.token_ids)
        engine.close()
    assert wanted == got


def test_a_restored_agent_computes_only_its_new_message(open_engine):
    """Nothing of the history is computed again."""
    engine = open_engine()
    talk(engine.agent("planner"), [LONG, LONG])
    n_tokens = engine.agent("planner").status.n_tokens
    engine.close()
    metrics = open_engine().agent("planner").ask("Next.", max_tokens=4).metrics
    assert Match.EXTEND is metrics.match
    assert n_tokens == metrics.reused_tokens


def test_evict_and_restore_change_no_token(engine):
    """Hot, evicted, and restored by hand: the same reply."""
    agent = engine.agent("planner")
    talk(agent, [LONG, "Go on."])
    twins = [agent.fork(f"twin {i}") for i in range(2)]
    twins[0].evict()
    assert Residency.WARM is twins[0].status.residency
    twins[1].evict()
    twins[1].restore()
    assert Residency.HOT is twins[1].status.residency
    replies = [a.ask("What now?", max_tokens=40).token_ids for a in (agent, *twins)]
    assert 1 == len(set(replies))


def test_a_fork_goes_its_own_way(engine):
    """Neither sees what the other says afterwards, and stored blocks are shared."""
    agent = engine.agent("planner")
    talk(agent, [LONG, LONG])
    written = engine.status().bytes_written
    fork = agent.fork("variant")
    assert engine.status().bytes_written - written < 100_000
    assert agent.turns[0].prompt == fork.turns[0].prompt
    fork.ask("Something else.", max_tokens=4)
    assert 2 == len(agent.turns)
    assert 3 == len(fork.turns)
    assert any(block.shared for block in agent.block_map().layers[0].blocks)
    with pytest.raises(InputError, match="exists already"):
        agent.fork("variant")


def test_rewind_and_checkout_move_the_head_and_lose_nothing(engine):
    """The turns left behind stay as a branch, and their state is found again."""
    agent = engine.agent("planner")
    talk(agent, [LONG, "Two.", "Three."])
    agent.rewind(2)
    other = agent.ask("Another two.", max_tokens=4)
    assert [LONG, "Another two."] == [turn.prompt for turn in agent.turns]
    assert 4 == len(agent.tree())
    assert Match.EXTEND is other.metrics.match
    third = next(turn for turn in agent.tree() if turn.prompt == "Three.")
    agent.checkout(third.id)
    reply = agent.ask("Four.", max_tokens=4).metrics
    assert third.n_tokens == reply.reused_tokens
    with pytest.raises(UnknownTurn):
        agent.checkout(99)
    with pytest.raises(InputError, match="4 turns"):
        agent.rewind(9)


def test_a_cell_that_runs_again_replaces_what_it_did(engine):
    """The turn starts where the cell's last one started; an unchanged prompt is found, an edited one reuses a part."""
    agent = engine.agent("planner")
    first = agent.ask(LONG, max_tokens=30, cell_id="one", execution="1")
    agent.ask("Second.", max_tokens=5, cell_id="two", execution="2")
    again = agent.ask(LONG, max_tokens=30, cell_id="one", execution="3")
    assert first.token_ids == again.token_ids
    assert Match.EXACT is again.metrics.match
    assert again.metrics.computed_tokens <= 64
    assert any("branch" in note for note in again.metrics.notes)
    edited = agent.ask(LONG + "!", max_tokens=5, cell_id="one", execution="4")
    assert edited.metrics.match is Match.DIVERGE
    assert [LONG + "!"] == [turn.prompt for turn in agent.turns]
    appended = agent.ask("More.", max_tokens=5, cell_id="one", execution="5", append=True)
    assert 2 == len(agent.turns)
    assert appended.metrics.match is Match.EXTEND


def test_running_all_cells_again_after_a_restart_saves_nothing_twice(open_engine):
    """Unchanged cells walk through the turns that are there: no new turn, no new block, the same replies."""
    cells = {"one": LONG, "two": "And then?", "three": LONG, "loop": "Again."}

    def run_all(engine, execution):
        agent = engine.agent("planner")
        return [
            agent.ask(prompt, max_tokens=20, cell_id=cell, execution=f"{cell} {execution}")
            for cell, prompt in cells.items()
            for _ in range(2 if cell == "loop" else 1)
        ]

    engine = open_engine()
    first = run_all(engine, 1)
    tree, blocks = engine.agent("planner").tree(), engine.verify().blocks
    engine.close()
    engine = open_engine()
    for execution in (2, 3):
        again = run_all(engine, execution)
        assert [reply.token_ids for reply in first] == [reply.token_ids for reply in again]
        assert all(reply.metrics.match in (Match.EXACT, Match.EXTEND) for reply in again)
        assert tree == engine.agent("planner").tree()
        assert blocks == engine.verify().blocks


def test_a_second_ask_in_one_execution_goes_on(engine):
    """A loop in a cell is a conversation; run again it starts over."""
    agent = engine.agent("planner")
    for execution in ("1", "2"):
        for message in ("One.", "Two.", "Three."):
            agent.ask(message, max_tokens=4, cell_id="loop", execution=execution)
        assert ["One.", "Two.", "Three."] == [turn.prompt for turn in agent.turns]
    assert 3 == len(agent.tree())


def test_the_first_cell_may_change_the_system_text(engine):
    """Elsewhere it is an error."""
    agent = engine.agent("planner")
    agent.ask("One.", max_tokens=4, system="A.", cell_id="one", execution="1")
    agent.ask("Two.", max_tokens=4, cell_id="two", execution="2")
    agent.ask("One.", max_tokens=4, system="B.", cell_id="one", execution="3")
    assert "B." == agent.system
    with pytest.raises(InputError, match="another system text"):
        agent.ask("Two.", max_tokens=4, system="C.", cell_id="two", execution="4")


def test_a_conversation_that_is_rewound_to_its_start_keeps_its_system_text(engine):
    """As a first cell that runs again does."""
    agent = engine.agent("planner")
    first = agent.ask("One.", max_tokens=4, system="A.")
    agent.rewind()
    assert "A." == agent.system
    assert first.metrics.prompt_tokens == agent.ask("One.", max_tokens=4).metrics.prompt_tokens


def test_two_spaces_do_not_meet(open_engine):
    """The same name in another space is another agent."""
    one = open_engine(space="one")
    talk(one.agent("planner"), ["Hello."])
    one.close()
    assert [] == open_engine(space="two").agent("planner").turns


def test_the_second_writer_of_an_agent_is_told_who_holds_it(open_engine):
    """Two engines conflict on one agent, and on no other."""
    first, second = open_engine(), open_engine()
    first.agent("planner")
    with pytest.raises(AgentLocked, match="planner"):
        second.agent("planner")
    second.agent("critic").ask("Hello.", max_tokens=3)
    assert {"planner", "critic"} == {agent.name for agent in second.status().agents}
    assert any("planner" in warning for warning in second.status().warnings)


def test_looking_at_agents_does_not_hold_them(open_engine):
    """An engine that only shows the status leaves every agent to others."""
    first = open_engine()
    talk(first.agent("planner"), ["Hello."])
    first.close()
    viewer = open_engine()
    shown = viewer.status().agents[0]
    assert Residency.WARM is shown.residency
    assert shown.n_tokens > 0
    open_engine().agent("planner").ask("Go on.", max_tokens=3)


def test_another_models_state_is_not_used(open_engine, tmp_path):
    """Other weights under the same name: the text is there, the tokens are computed again."""
    from tests.tiny import write_tiny_model

    engine = open_engine()
    talk(engine.agent("planner"), [LONG])
    engine.close()
    from amem import Engine

    other = Engine(write_tiny_model(tmp_path / "tiny-llama", seed=5), tmp_path / "store", memory="200MB")
    try:
        assert Residency.COLD is other.agent("planner").status.residency
        reply = other.agent("planner").ask("Go on.", max_tokens=4)
        assert Match.COLD is reply.metrics.match
        assert any("another model or codec" in note for note in reply.metrics.notes)
        assert [LONG, "Go on."] == [turn.prompt for turn in other.agent("planner").turns]
        assert Match.EXTEND is other.agent("planner").ask("And on.", max_tokens=4).metrics.match
    finally:
        other.close()


def test_another_codecs_state_is_not_used_but_its_tokens_are(open_engine):
    """The same model with another codec computes the very same history again; the first codec's state is still there."""
    engine = open_engine(codec="q4")
    talk(engine.agent("planner"), [LONG])
    n_tokens = engine.agent("planner").status.n_tokens
    engine.close()
    engine = open_engine(codec="fp16")
    reply = engine.agent("planner").ask("Go on.", max_tokens=4)
    assert Match.COLD is reply.metrics.match
    assert n_tokens == engine.agent("planner").turns[0].n_tokens
    engine.agent("planner").rewind()
    engine.close()
    again = open_engine(codec="q4").agent("planner").ask("Go on.", max_tokens=4)
    assert n_tokens == again.metrics.reused_tokens


def test_the_budget_holds_and_the_least_recently_used_goes_first(open_engine):
    """With room for a few agents, many are served; the peak never passes the budget."""
    engine = open_engine(memory="1MB", prefetch=False)
    names = [f"agent {i}" for i in range(8)]
    for name in [*names, *names]:
        engine.agent(name).ask(LONG, max_tokens=4)
    status = engine.status()
    assert status.peak_hot_bytes <= status.memory_budget
    hot = {agent.name for agent in status.agents if agent.residency is Residency.HOT}
    assert 0 < len(hot) < len(names)
    assert hot == set(names[-len(hot) :])


def test_a_pinned_agent_stays(open_engine):
    """Whoever else needs room."""
    engine = open_engine(memory="2MB")
    engine.agent("pinned").ask(LONG, max_tokens=4)
    engine.agent("pinned").pin()
    for i in range(6):
        engine.agent(f"agent {i}").ask(LONG, max_tokens=4)
    assert Residency.HOT is engine.agent("pinned").status.residency


def test_a_deleted_agent_is_gone(engine):
    """And its name is free."""
    talk(engine.agent("planner"), ["Hello."])
    engine.agent("planner").delete()
    assert [] == engine.agents()
    assert [] == engine.agent("planner").turns


def test_bytes_on_disk_and_the_block_map_agree_with_the_tokens(engine):
    """Every token lies in one block."""
    agent = engine.agent("planner")
    talk(agent, [LONG, LONG])
    layers = agent.block_map().layers
    for layer in layers:
        assert agent.status.n_tokens == sum(block.n_tokens for block in layer.blocks)
        starts = np.cumsum([0, *(block.n_tokens for block in layer.blocks)])
        assert [block.start for block in layer.blocks] == starts[:-1].tolist()
    assert engine.verify().problems == []
