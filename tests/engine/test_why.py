"""Why a request computed what it computed: the first token that differs, both texts, the likely cause, what to do."""

import pytest

from amem import Engine, Match
from amem.stream import ReplyStream
from tests.templates import DATED, TOOLS
from tests.tiny import write_tiny_model, write_tiny_tokenizer

LONG = "a list of many words " * 12


@pytest.fixture
def with_template(tmp_path):
    """Opens an agent's engine on a tiny model with a chat template."""
    engines = []

    def make(template, **options):
        path = write_tiny_model(tmp_path / "model")
        write_tiny_tokenizer(path, template)
        engines.append(Engine(path, tmp_path / "store", memory="200MB", **options))
        return engines[-1].agent("planner")

    yield make
    for engine in engines:
        engine.close()


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def complete(engine, text):
    """The reply to a bare text."""
    return list(ReplyStream(engine.submit_text("planner", text, max_tokens=3).result()))[-1].reply


def say(agent, replies, text):
    """The next reply is this text, token by token."""
    ids = [*agent._engine._parts.prompter.reply(text, ended=True)]
    replies.say(ids)
    return len(ids)


def test_the_first_turn_and_a_new_message_are_no_mystery(engine):
    """They say that nothing was there, and that nothing was lost."""
    agent = engine.agent("planner")
    assert "no turn" in agent.why()
    first = agent.ask(LONG, max_tokens=3).metrics
    assert "first turn" in first.explain()
    assert first.explain().startswith(f"COLD: 0 of {first.prompt_tokens} prompt tokens were reused")
    assert first.explain() == agent.why()
    second = agent.ask("Go on.", max_tokens=3).metrics
    assert "only grew" in second.explain()
    assert second.why.position is None


def test_an_edited_cell_names_the_first_token_that_differs(engine):
    """With the text on both sides of the edit, and what stood before it."""
    agent = engine.agent("planner")
    first = agent.ask(LONG + "in three steps, please.", max_tokens=3, cell_id="a", execution="1")
    agent.ask("And then?", max_tokens=3, cell_id="b", execution="2")
    metrics = agent.ask(LONG + "in four steps, please.", max_tokens=3, cell_id="a", execution="3").metrics
    why = metrics.why
    assert f"The cell of turn {first.turn} was edited." in metrics.explain()
    assert first.turn == why.turn
    assert why.before.endswith("words in")
    assert why.stored.startswith(" three steps")
    assert why.wanted.startswith(" four steps")
    assert metrics.explain().count("\n") == 5
    decoded = engine._parts.prompter.decode
    history = decoded(engine.with_session("planner", lambda session: session.head_tokens().tolist()))
    assert history.index(" four steps") == len(decoded(engine_prompt(engine)[: why.position]))


def engine_prompt(engine):
    """The tokens of the head's history."""
    return engine.with_session("planner", lambda session: session.head_tokens().tolist())


def test_the_second_cell_edited_is_found_in_its_turn(engine):
    """Though all before it was reused."""
    agent = engine.agent("planner")
    agent.ask(LONG, max_tokens=3, cell_id="a", execution="1")
    second = agent.ask("And then?", max_tokens=3, cell_id="b", execution="2")
    metrics = agent.ask("And now?", max_tokens=3, cell_id="b", execution="3").metrics
    assert Match.EXTEND is metrics.match
    assert f"The cell of turn {second.turn} was edited." in metrics.explain()


def test_an_unchanged_cell_says_that_nothing_is_to_be_done(engine):
    """It was there already."""
    agent = engine.agent("planner")
    agent.ask(LONG, max_tokens=3, cell_id="a", execution="1")
    metrics = agent.ask(LONG, max_tokens=3, cell_id="a", execution="2").metrics
    assert Match.EXACT is metrics.match
    assert "was there already" in metrics.explain()


def test_a_short_prompt_again_is_not_said_to_be_reused(engine):
    """Nothing of it is stored without what followed."""
    agent = engine.agent("planner")
    agent.ask("Hi.", max_tokens=3, cell_id="a", execution="1")
    metrics = agent.ask("Hi.", max_tokens=3, cell_id="a", execution="2").metrics
    assert metrics.prompt_tokens < 64
    assert 0 == metrics.reused_tokens
    assert "was there already, but nothing of it could be reused" in metrics.explain()


def test_what_is_computed_of_a_prompt_that_was_there_is_counted(engine):
    """Its last group is."""
    agent = engine.agent("planner")
    agent.ask(LONG, max_tokens=3, cell_id="a", execution="1")
    metrics = agent.ask(LONG, max_tokens=3, cell_id="a", execution="2").metrics
    assert f"only its last {metrics.computed_tokens} of {metrics.prompt_tokens} tokens" in metrics.explain()


@pytest.mark.parametrize("words", [2, 60])
def test_a_bare_text_that_begins_an_earlier_one_is_not_the_same(engine, words):
    """The same text is, if it is long enough for state of it to be stored."""
    text = " ".join(f"word{n}" for n in range(70))
    complete(engine, text)
    begun = " ".join(text.split()[:words])
    metrics = complete(engine, begun).metrics
    assert Match.EXACT is not metrics.match
    assert "is the beginning of one that was there already" in metrics.explain()
    assert f"{metrics.reused_tokens} of its {metrics.prompt_tokens} tokens" in metrics.explain()
    assert Match.EXACT is complete(engine, text).metrics.match


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("You plan.", "You criticize.", "The system text is another."),
        ("It is Monday, 30 Nov 2026.", "It is Tuesday, 1 Dec 2026.", "another date, time or number"),
        ("The time: 10:15 am.", "The time: 9:05 pm.", "another date, time or number"),
        ("", "You plan.", "The system text is another."),
    ],
)
def test_a_changed_system_text_is_told_from_a_date_in_it(engine, before, after, says):
    """The commonest reason why a client's conversation is cold."""
    agent = engine.agent("planner")
    agent.chat([*([system(LONG + before)] if before else []), user(LONG)], max_tokens=3)
    metrics = agent.chat([system(LONG + after), user(LONG)], max_tokens=3).metrics
    assert says in metrics.explain()
    assert "What to do: " in metrics.explain()
    assert 1 == metrics.why.turn


def test_a_changed_message_and_a_time_in_it(engine):
    """Of an earlier turn."""
    agent = engine.agent("planner")
    agent.chat([user(LONG + "Now: 10:15.")], max_tokens=3)
    assert "another date, time or number" in agent.chat([user(LONG + "Now: 10:16.")], max_tokens=3).metrics.explain()
    assert "message of turn 2 is another" in agent.chat([user("Other.")], max_tokens=3).metrics.explain()


def test_a_reply_that_came_back_changed(engine, replies):
    """Named with its turn, and both texts."""
    agent = engine.agent("planner")
    n = say(agent, replies, "Yes, indeed.")
    agent.chat([user(LONG)], max_tokens=n)
    metrics = agent.chat([user(LONG), assistant("No, never."), user("Go on.")], max_tokens=3).metrics
    assert "The reply of turn 1 came back changed." in metrics.explain()
    assert metrics.why.stored.startswith("Yes")
    assert metrics.why.wanted.startswith("No")


@pytest.mark.parametrize("said", ["", " ", "\n\n"])
def test_an_empty_reply_that_came_back_changed(engine, replies, said):
    """It is the reply that was changed, not the message before it."""
    agent = engine.agent("planner")
    n = say(agent, replies, said)
    reply = agent.chat([user(LONG)], max_tokens=n)
    assert said.strip() == reply.text.strip()
    metrics = agent.chat([user(LONG), assistant("No, never."), user("Go on.")], max_tokens=3).metrics
    assert "The reply of turn 1 came back changed." in metrics.explain()


def test_a_message_changed_before_a_reply_that_a_stop_string_cut(engine, replies):
    """It is the message that was changed, not the reply."""
    agent = engine.agent("planner")
    n = say(agent, replies, "so many words here")
    reply = agent.chat([user(LONG + "One.")], max_tokens=n, stop=["ords"])
    assert "so many w" == reply.text
    metrics = agent.chat([user(LONG + "Two."), assistant(reply.text), user("Go on.")], max_tokens=3).metrics
    assert "The message of turn 1 is another." in metrics.explain()


def test_the_first_request_to_a_shortened_fork_says_why_it_computes(engine):
    """Nothing was evicted, and nothing is damaged; later ones have nothing to tell."""
    agent = engine.agent("planner")
    for n in range(3):
        agent.ask(f"{LONG}{n}", max_tokens=3)
    fork = agent.fork("short", keep_last=2)
    first = fork.ask("Go on.", max_tokens=3).metrics.explain()
    assert "This fork was shortened" in first
    assert "damaged" not in first
    assert "only grew" in fork.ask("And on.", max_tokens=3).metrics.explain()


def test_a_reply_that_came_back_without_its_thought_and_changed(with_template, replies):
    """A dropped thought alone is no difference; with another one it is told."""
    agent = with_template(TOOLS)
    n = say(agent, replies, "<think>Hm.</think>Yes, indeed.")
    agent.chat([user(LONG)], max_tokens=n)
    metrics = agent.chat([user(LONG), assistant("Yes, in"), user("Go on.")], max_tokens=3).metrics
    assert "came back without its thought" in metrics.explain()


def test_other_tools(with_template):
    """They stand at the start of the conversation."""
    agent = with_template(TOOLS)
    agent.chat([user(LONG)], tools=[tool("weather"), tool("tides")], max_tokens=3)
    metrics = agent.chat([user(LONG)], tools=[tool("tides"), tool("weather")], max_tokens=3).metrics
    assert "descriptions of tools" in metrics.explain()


def test_a_template_that_writes_the_time(with_template):
    """The messages are the same, and the text is not."""
    agent = with_template(DATED)
    agent.ask(LONG, max_tokens=3, cell_id="a", execution="1")
    metrics = agent.ask(LONG, max_tokens=3, cell_id="a", execution="2").metrics
    assert "chat template renders the same messages otherwise" in metrics.explain()


def test_another_model_and_another_codec(open_engine, tmp_path, tiny_model_path):
    """Each is told apart."""
    engine = open_engine()
    engine.agent("planner").ask(LONG, max_tokens=3)
    engine.agent("rewound").ask(LONG, max_tokens=3)
    engine.agent("rewound").rewind()
    engine.close()
    engine = open_engine(codec="fp16")
    assert "no state for this model and codec" in engine.agent("planner").why()
    metrics = engine.agent("planner").ask("Go on.", max_tokens=3).metrics
    assert "another codec (q4), not with fp16" in metrics.explain()
    assert "another codec (q4)" in engine.agent("rewound").ask("Hi.", max_tokens=3).metrics.explain()
    engine.close()
    other = Engine(write_tiny_model(tmp_path / "other", seed=5), tmp_path / "store", memory="200MB")
    try:
        assert "of another model" in other.agent("planner").ask("Go on.", max_tokens=3).metrics.explain()
    finally:
        other.close()


def test_state_that_is_gone(open_engine):
    """Evicted from disk, or damaged: the past is computed again, and the explanation says so."""
    engine = open_engine()
    agent = engine.agent("planner")
    agent.ask(LONG * 3, max_tokens=3)
    agent.ask("Two.", max_tokens=3)
    agent.evict()

    def forget(session, kinds):
        snapshots, blocks = session.store.evictable()
        session.store.evict([*(snapshots if "snapshots" in kinds else []), *(blocks if "blocks" in kinds else [])])

    n_tokens = agent.status.n_tokens
    engine.with_session("planner", lambda session: session.find([0], prefer=None))  # nothing is in use any more
    engine.with_session("planner", lambda session: forget(session, ["snapshots"]))
    metrics = agent.ask("Three.", max_tokens=3).metrics
    assert n_tokens // 64 * 64 == metrics.reused_tokens
    assert "open group of 64 tokens is not stored any more" in metrics.explain()
    agent.evict()
    engine.with_session("planner", lambda session: session.find([0], prefer=None))
    engine.with_session("planner", lambda session: forget(session, ["snapshots", "blocks"]))
    metrics = agent.ask("Four.", max_tokens=3).metrics
    assert Match.COLD is metrics.match
    assert "had stored K/V" in metrics.explain()
    assert "verify" in metrics.explain()
    agent.rewind(to=1)
    agent.rewind()
    engine.with_session("planner", lambda session: session.find([0], prefer=None))
    engine.with_session("planner", lambda session: forget(session, ["snapshots", "blocks"]))
    metrics = agent.ask(LONG * 3, max_tokens=3).metrics
    assert Match.COLD is metrics.match
    assert "was there already, but of its" in metrics.explain()


def test_after_a_restart_the_next_requests_chances_are_told(open_engine):
    """No request was made yet."""
    engine = open_engine()
    engine.agent("planner").ask(LONG, max_tokens=3)
    n_tokens = engine.agent("planner").status.n_tokens
    engine.close()
    told = open_engine().agent("planner").why()
    assert "It is warm" in told
    assert f"of its {n_tokens} tokens {n_tokens} can be reused" in told


def test_an_explanation_is_plain_data_too(engine):
    """For JSON."""
    agent = engine.agent("planner")
    agent.ask(LONG, max_tokens=3, cell_id="a", execution="1")
    data = agent.ask(LONG + "!", max_tokens=3, cell_id="a", execution="2").metrics.to_dict()["why"]
    assert {"cause", "remedy", "position", "turn", "before", "stored", "wanted"} == data.keys()
