"""Agents that meet in five phases with a restart before each: their state goes with them, and to nobody else."""

import pytest

from amem import Engine
from benchmarks.phases import PHASES, PRIVATE, SYSTEMS, compare, persistent, play

MAX_TOKENS = 12
TEMPERATURE = (
    1.0  # a random model repeats itself when it is greedy; seeds are derived, so that runs repeat all the same
)


@pytest.fixture(scope="module")
def opens(tiny_model_path):
    return lambda store: Engine(tiny_model_path, store, memory="200MB")


@pytest.fixture(scope="module")
def played(opens, tmp_path_factory):
    """Both ways of playing, and the store in which state was kept."""
    folder = tmp_path_factory.mktemp("phases")
    return compare(opens, folder, MAX_TOKENS, TEMPERATURE), folder / "kept"


def first_steps(rows):
    """Each agent's first step in a phase that is not its first."""
    met = set()
    found = []
    for phase in PHASES:
        seen = set()
        for row in (row for row in rows if row["phase"] == phase):
            if row["agent"] in met and row["agent"] not in seen:
                found.append(row)
            seen.add(row["agent"])
        met |= seen
    return found


def test_an_agent_comes_into_a_later_phase_with_all_that_it_knows(played):
    """Read from disk: what it held at its last phase's end is reused, and only the new message is computed."""
    rows = played[0]["persistent"]
    held = {}
    for row in rows:
        if row["agent"] in held:
            assert "EXTEND" == row["match"]
            assert held[row["agent"]] == row["reused_tokens"]
        held[row["agent"]] = row["prompt_tokens"] + row["generated_tokens"]
    again = first_steps(rows)
    assert 7 == len(again)
    assert {row["residency"] for row in again} <= {"warm", "hot"}  # hot: fetched while another one answered
    assert {"warm"} == {row["residency"] for row in rows if row["open_ms"] and row in again}


def test_without_state_a_phase_begins_cold(played):
    """The very comparison: the whole history is computed at each agent's first step in a phase."""
    rows = played[0]["not persistent"]
    again = first_steps(rows)
    assert {"COLD"} == {row["match"] for row in again}
    assert {0} == {row["reused_tokens"] for row in again}
    assert {"EXTEND"} == {row["match"] for row in rows if row["reused_tokens"]}


def test_state_spares_most_of_the_work(played):
    """Counted in prompt tokens that were computed, over all phases and in the last one."""
    computed = {way: sum(row["computed_tokens"] for row in rows) for way, rows in played[0].items()}
    assert computed["persistent"] < 0.6 * computed["not persistent"]
    last = {way: rows[-1] for way, rows in played[0].items()}
    assert "auditor" == last["persistent"]["agent"]
    assert last["persistent"]["computed_tokens"] < 0.2 * last["not persistent"]["computed_tokens"]


def test_restarts_between_the_phases_change_no_word(opens, played, tmp_path):
    """Every reply is that of agents that were never interrupted."""
    engine = opens(tmp_path / "store")

    class Kept:
        """The one engine, which nobody closes between the phases."""

        def __getattr__(self, name):
            return getattr(engine, name)

        def close(self):
            pass

    try:
        through = play(lambda _store: Kept(), lambda _phase: tmp_path, persistent(MAX_TOKENS, TEMPERATURE))
    finally:
        engine.close()
    texts = [row["text"] for row in through]
    assert texts == [row["text"] for row in played[0]["persistent"]]
    assert len(texts) == len(set(texts))


def test_private_messages_reach_only_their_target(opens, played):
    """Neither in the turns nor in the tokens that another agent attends to."""
    engine = opens(played[1])
    try:
        for name in SYSTEMS:
            turns = " ".join(turn.prompt for turn in engine.agent(name).turns)
            ids = engine.with_session(name, lambda session: session.head_tokens().tolist())
            attended = engine._parts.prompter.decode(ids)
            for owner, secret in PRIVATE.items():
                assert (name in (owner, "auditor")) == (secret in turns)
                assert (name in (owner, "auditor")) == (secret in attended)
    finally:
        engine.close()
