"""Whole conversations, as clients of a chat API send them: what is found again, and what is computed."""

import asyncio
import functools
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer

from amem import Engine, InputError, Match
from amem.model.said import Call, Said
from amem.store.records import BLOCK_TOKENS
from tests.engine.scripted import Replies
from tests.templates import BOS_AND_TRIM, DATED, NO_SYSTEM, NUMBERED, SYSTEM_IN_USER, THINKING, TOOLS, TWO_ENDS
from tests.tiny import CHATML, VOCAB_SIZE, write_tiny_model, write_tiny_tokenizer

EOS = 2
LONG = "a list of many words " * 12
TEMPLATES = {
    "chatml": CHATML,
    "bos and trim": BOS_AND_TRIM,
    "no system": NO_SYSTEM,
    "system in user": SYSTEM_IN_USER,
    "thinking": THINKING,
    "tools": TOOLS,
    "dated": DATED,
    "numbered": NUMBERED,
    "two ends": TWO_ENDS,
    "none": None,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": {}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model's folder with a given chat template."""

    @functools.cache
    def make(name):
        path = write_tiny_model(tmp_path_factory.mktemp("model"))
        write_tiny_tokenizer(path, TEMPLATES[name], additional_special_tokens=["<|msg|>", "<|end|>"])
        return path

    return make


@pytest.fixture
def replies(monkeypatch):
    """Replies to come."""
    script = Replies()
    monkeypatch.setattr("amem.asked.Sampler", script.sampler)
    return script


class Talk:
    """One agent on a tiny model with a template."""

    def __init__(self, path, store, replies):
        self.engine = Engine(path, store, memory="200MB")
        self.agent = self.engine.agent("planner")
        self.tokenizer = load_tokenizer(path, eos_token_ids=EOS)
        self._replies = replies

    def will_say(self, text, *, ended=True):
        """What the model will answer next, in tokens that its tokenizer would not make: one for each byte or so."""
        ids = [id_ for char in text for id_ in self.encode(char)]
        self._replies.say([*ids, EOS] if ended else ids)
        return len(ids) + ended

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def chat(self, messages, said=None, **options):
        """Send a conversation; ``said`` is what the model will answer."""
        options = {"max_tokens": 4, **options}
        if said is not None:
            options["max_tokens"] = self.will_say(said)
        return self.agent.chat(messages, **options)

    def ids(self):
        """The tokens of the head's history."""
        return self.engine.with_session("planner", lambda session: session.head_tokens().tolist())

    def prompt_text(self, messages):
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.fixture
def talk(folder, tmp_path, replies):
    """Opens engines; all are closed at the end."""
    opened = []

    def make(name="chatml"):
        opened.append(Talk(folder(name), tmp_path / f"store {len(opened)}", replies))
        return opened[-1]

    yield make
    for one in opened:
        one.engine.close()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_that_grew_extends_its_branch_and_reuses_the_replies(talk, name):
    """With each template: the tokens of the replies stay as they were generated, and nothing is computed twice."""
    here = talk(name)
    messages = [user(LONG)]
    held = []
    for said in ("One, two, and three.", "Again: " + LONG, "The end."):
        reply = here.chat(messages, said)
        assert held == here.ids()[: len(held)]
        assert len(held) == reply.metrics.reused_tokens
        assert (Match.EXTEND if held else Match.COLD) is reply.metrics.match
        held = here.ids()
        messages += [assistant(reply.text), user("Go on.")]
    assert 3 == len(here.agent.turns)


@pytest.mark.parametrize("name", ["chatml", "thinking", "tools", "two ends", "none"])
def test_whatever_was_generated_a_conversation_that_grew_extends(folder, tmp_path_factory, name):
    """Any tokens at all: cut in the middle of a character, without an end, or of no text."""
    tokens = st.lists(st.integers(3, VOCAB_SIZE - 1), max_size=12)
    replies = Replies()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amem.asked.Sampler", replies.sampler)
        here = Talk(folder(name), tmp_path_factory.mktemp("store"), replies)
        count = iter(range(10**6))

        @given(said=st.lists(st.tuples(tokens, st.booleans()), min_size=1, max_size=3), opening=st.text(min_size=1))
        @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        def grows(said, opening):
            agent = here.engine.agent(f"agent {next(count)}")
            messages, held = [user(f"Hello {opening} " + "word " * 30)], 0
            for ids, ended in said:
                generated = [*ids, EOS] if ended or not ids else ids
                replies.say(generated)
                reply = agent.chat(messages, max_tokens=len(generated))
                assert held == reply.metrics.reused_tokens
                assert tuple(generated) == reply.token_ids
                held = agent.status.n_tokens
                messages += [assistant(reply.text), user("Go on.")]

        try:
            grows()
        finally:
            here.engine.close()


def test_an_exact_repeat_computes_at_least_one_token_and_saves_nothing_twice(talk):
    """The same conversation again is the same turn."""
    here = talk()
    first = here.agent.chat([user(LONG)], max_tokens=8)
    blocks = here.engine.verify().blocks
    again = here.agent.chat([user(LONG)], max_tokens=8)
    assert Match.EXACT is again.metrics.match
    assert 1 <= again.metrics.computed_tokens <= 64
    assert first.token_ids == again.token_ids
    assert first.turn == again.turn
    assert blocks == here.engine.verify().blocks
    assert 1 == len(here.agent.tree())


@pytest.mark.parametrize("change", ["{}  \n", "\n\n {}", "{}"])
def test_a_reply_that_comes_back_with_other_white_space_is_the_same_reply(talk, change):
    """Its tokens stay as they were generated, white space and all."""
    here = talk()
    reply = here.chat([user(LONG)], said=" Yes, indeed. \n")
    held = here.ids()
    metrics = here.chat([user(LONG), assistant(change.format("Yes, indeed.")), user("Go on.")]).metrics
    assert Match.EXTEND is metrics.match
    assert len(held) == metrics.reused_tokens
    assert held == here.ids()[: len(held)]
    assert reply.text.endswith("Yes, indeed. \n")


def test_a_reply_that_comes_back_changed_is_a_branch(talk):
    """Reused is what lies before it; what is computed is the text that the client sent."""
    here = talk()
    here.chat([user(LONG)], said="Yes, indeed.")
    messages = [user(LONG), assistant("No, never."), user("Go on.")]
    metrics = here.chat(messages).metrics
    assert Match.DIVERGE is metrics.match
    assert 0 < metrics.reused_tokens < metrics.prompt_tokens
    assert here.prompt_text(messages) == here.tokenizer.decode(here.ids()[: metrics.prompt_tokens])
    assert [None, None] == [turn.parent for turn in here.agent.tree()]


@pytest.mark.parametrize("name", ["thinking", "tools"])
@pytest.mark.parametrize("sent", ["The answer.", "<think>\nLet me see.\n</think>\n\nThe answer."])
def test_a_thought_may_be_dropped_or_sent_back(talk, name, sent):
    """The template drops it from earlier replies; the state keeps it, as it was generated."""
    here = talk(name)
    said = (
        "Let me see.\n</think>\n\nThe answer."
        if name == "thinking"
        else "<think>\nLet me see.\n</think>\n\nThe answer."
    )
    here.chat([user(LONG)], said=said)
    held = here.ids()
    metrics = here.chat(
        [user(LONG), assistant(sent.removeprefix("<think>\n") if name == "thinking" else sent), user("Go on.")]
    ).metrics
    assert Match.EXTEND is metrics.match
    assert len(held) == metrics.reused_tokens
    assert "Let me see." in here.tokenizer.decode(here.ids())


@pytest.mark.parametrize(
    ("before", "after"),
    [("You plan.", "You criticize."), ("It is 2026-11-30 10:15.", "It is 2026-11-30 10:16.")],
)
def test_another_system_text_is_another_conversation(talk, before, after):
    """Reuse ends where it differs, at its last group boundary before; both branches stay."""
    here = talk()
    here.chat([system(LONG + before), user(LONG)])
    metrics = here.chat([system(LONG + after), user(LONG)]).metrics
    common = len(here.encode("<|im_start|>system\n" + LONG))
    assert Match.DIVERGE is metrics.match
    assert common // 64 * 64 <= metrics.reused_tokens < common + 32
    assert [None, None] == [turn.parent for turn in here.agent.tree()]
    assert here.agent.system == LONG + after
    back = here.chat([system(LONG + before), user(LONG)]).metrics
    assert Match.EXACT is back.match


def test_a_template_that_writes_the_time_is_kept_to_the_time_it_began(talk):
    """A conversation that only grew goes on with the text that it began with."""
    here = talk("dated")
    reply = here.chat([user(LONG)], said="Yes.")
    assert Match.EXTEND is here.chat([user(LONG), assistant(reply.text), user("Go on.")]).metrics.match
    assert 1 == here.tokenizer.decode(here.ids()).count("Today:")


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'


def calls(arguments):
    return [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]


@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Oslo", "days": 2}', '{"days":2,"city":"Oslo"}', {"days": 2, "city": "Oslo"}],
)
def test_a_tool_call_comes_back_in_a_field_of_its_own_with_its_arguments_in_any_order(talk, arguments):
    """As a client of an API sends it, with the tool's answer after it."""
    here = talk("tools")
    here.chat([user(LONG)], said=f"<think>Which?</think>\n{CALL}", tools=[TOOL])
    held = here.ids()
    messages = [
        user(LONG),
        assistant(None, tool_calls=calls(arguments)),
        {"role": "tool", "content": "Rain.", "tool_call_id": "c1"},
    ]
    metrics = here.chat(messages, said="It rains.", tools=[TOOL]).metrics
    assert Match.EXTEND is metrics.match
    assert len(held) == metrics.reused_tokens
    text = here.tokenizer.decode(here.ids())
    assert CALL in text
    assert "<tool_response>\nRain.\n</tool_response>" in text
    held = here.ids()
    again = here.chat([*messages, assistant("It rains."), user("Thanks.")], tools=[TOOL]).metrics
    assert len(held) == again.reused_tokens


@pytest.mark.parametrize("arguments", ['{"city": "Bergen", "days": 2}', "{}", "no JSON"])
def test_another_tool_call_is_a_branch(talk, arguments):
    """It was not said."""
    here = talk("tools")
    here.chat([user(LONG)], said=CALL, tools=[TOOL])
    messages = [user(LONG), assistant("", tool_calls=calls(arguments)), {"role": "tool", "content": "Rain."}]
    assert Match.DIVERGE is here.chat(messages, tools=[TOOL]).metrics.match


def test_other_tools_are_another_conversation(talk):
    """They stand in the system text."""
    here = talk("tools")
    reply = here.chat([system(LONG), user("Hi.")], said="Yes.", tools=[TOOL])
    other = json.loads(json.dumps(TOOL).replace("weather", "tides"))
    metrics = here.chat([system(LONG), user("Hi."), assistant(reply.text), user("Go on.")], tools=[other]).metrics
    assert Match.DIVERGE is metrics.match
    assert 2 == len([turn for turn in here.agent.tree() if turn.parent is None])


def test_several_answers_of_tools_follow_one_reply(talk):
    """And are one turn."""
    here = talk("tools")
    here.chat([user(LONG)], said=CALL + "\n" + CALL.replace("Oslo", "Bergen"), tools=[TOOL])
    held = here.ids()
    two = [*calls({"city": "Oslo", "days": 2}), *calls({"city": "Bergen", "days": 2})]
    answers = [{"role": "tool", "content": "Rain."}, {"role": "tool", "content": "Sun."}]
    metrics = here.chat([user(LONG), assistant("", tool_calls=two), *answers], tools=[TOOL]).metrics
    assert len(held) == metrics.reused_tokens
    assert "Rain.\n</tool_response>\n<tool_response>\nSun." in here.tokenizer.decode(here.ids())


def test_a_join_where_tokens_would_merge_is_made_by_the_tokenizer(talk):
    """A reply that was cut in the middle of a word, and completed by the client."""
    here = talk()
    here.will_say("The pla", ended=False)
    here.agent.chat([user(LONG)], max_tokens=len("The pla"))
    messages = [user(LONG), assistant("The planner"), user("Go on.")]
    reply = here.chat(messages)
    assert Match.DIVERGE is reply.metrics.match
    assert here.encode(here.prompt_text(messages)) == here.ids()[: reply.metrics.prompt_tokens]


def test_an_interrupted_reply_without_its_end_is_extended(talk):
    """The template's end of turn comes after it, once."""
    here = talk()
    here.will_say("One two", ended=False)
    reply = here.agent.chat([user(LONG)], max_tokens=len("One two"))
    assert ("length", "One two") == (reply.finish_reason, reply.text)
    held = here.ids()
    assert EOS != held[-1]
    messages = [user(LONG), assistant("One two"), user("Go on.")]
    metrics = here.chat(messages).metrics
    assert len(held) == metrics.reused_tokens
    assert here.prompt_text(messages) == here.tokenizer.decode(here.ids()[: metrics.prompt_tokens])


@pytest.mark.parametrize("name", ["bos and trim", "system in user"])
def test_a_bos_stands_where_the_template_puts_it_and_nowhere_else(talk, name):
    """Turn by turn, edited, or at once: the text is what the template makes of the whole conversation."""
    here = talk(name)
    messages = [user(LONG)]
    for said in ("One.", "Two."):
        reply = here.chat(messages, said)
        text = re.sub(r"\s", "", here.tokenizer.decode(here.ids()[: reply.metrics.prompt_tokens]))
        assert re.sub(r"\s", "", here.prompt_text(messages)) == text
        messages += [assistant(reply.text), user("Go on.")]
    messages[0] = user(LONG + "!")
    reply = here.chat(messages)
    assert here.prompt_text(messages) == here.tokenizer.decode(here.ids()[: reply.metrics.prompt_tokens])


def test_replies_that_the_client_made_up_can_be_part_of_a_conversation(talk):
    """A history that this agent never had is computed as a whole, and then extended like any other."""
    here = talk()
    messages = [system("Be brief."), user(LONG), assistant("Made up."), user("Go on.")]
    reply = here.chat(messages, said="Yes.")
    assert Match.COLD is reply.metrics.match
    held = here.ids()
    assert here.chat([*messages, assistant("Yes."), user("More.")]).metrics.reused_tokens == len(held)
    assert "Be brief." == here.agent.system


def test_branches_are_found_wherever_the_head_is(talk):
    """Two conversations that grow in turn, on one agent."""
    here = talk()
    one, two = [user(LONG + "One?")], [user(LONG + "Two?")]
    for round_ in range(3):
        for messages in (one, two):
            reply = here.chat(messages, said="Yes.")
            assert (Match.EXTEND is reply.metrics.match) == (round_ > 0)
            messages += [assistant(reply.text), user("Go on.")]
    assert 6 == len(here.agent.tree())


def test_what_was_asked_in_a_notebook_can_be_continued_by_a_client_and_back(talk):
    """Turns are turns."""
    here = talk()
    here.will_say("Yes.")
    here.agent.ask(LONG, system="Be brief.", max_tokens=9)
    held = here.ids()
    messages = [system("Be brief."), user(LONG), assistant("Yes."), user("Go on.")]
    assert len(held) == here.chat(messages, said="Well.").metrics.reused_tokens
    held = here.ids()
    assert len(held) == here.agent.ask("And then?", max_tokens=3).metrics.reused_tokens


def test_a_conversation_is_found_after_a_restart(folder, tmp_path, replies):
    """From its text and its tokens on disk."""
    first = Talk(folder("tools"), tmp_path / "store", replies)
    first.chat([user(LONG)], said=CALL, tools=[TOOL])
    held = first.ids()
    first.engine.close()
    second = Talk(folder("tools"), tmp_path / "store", replies)
    messages = [
        user(LONG),
        assistant(None, tool_calls=calls('{"days": 2, "city": "Oslo"}')),
        {"role": "tool", "content": "Rain."},
    ]
    assert len(held) == second.chat(messages, tools=[TOOL]).metrics.reused_tokens
    second.engine.close()


def test_a_conversation_is_rendered_again_for_another_model(folder, tmp_path, replies):
    """Its messages and tools are kept, not its last message alone."""
    first = Talk(folder("tools"), tmp_path / "store", replies)
    messages = [system("Be brief."), user(LONG), assistant("Made up."), user("Go on.")]
    first.chat(messages, said="Yes.", tools=[TOOL])
    first.engine.close()
    other = Talk(write_other(folder("tools"), tmp_path / "other"), tmp_path / "store", replies)
    metrics = other.agent.ask("And then?", max_tokens=3).metrics
    assert Match.COLD is metrics.match
    text = other.tokenizer.decode(other.ids())
    assert all(part in text for part in ("Be brief.", '"weather"', "Made up.", "Go on.", "Yes.", "And then?"))
    other.engine.close()


def write_other(folder, path):
    """A model with other weights and the same tokenizer."""
    write_tiny_model(path, seed=7)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((folder / name).read_bytes())
    return path


@pytest.mark.parametrize("name", ["chatml", "thinking", "two ends", "none"])
@pytest.mark.parametrize("stop", ["nted", "words wan", "y words"])
def test_a_stop_string_inside_a_token_loses_nothing_of_what_was_shown(talk, name, stop):
    """The turn's tokens say what the reply's text says, for a client that sends it back and for a next message."""
    here = talk(name)
    said = "a list of many words wanted here"
    here._replies.say([*here.encode(said), EOS])
    reply = here.chat([user(LONG)], max_tokens=40, stop=[stop])
    assert said.partition(stop)[0] == reply.text == here.tokenizer.decode(list(reply.token_ids))
    assert here.tokenizer.decode(here.ids()).endswith(reply.text)
    held = here.ids()
    later = here.chat([user(LONG), assistant(reply.text), user("Go on.")])
    assert Match.EXTEND is later.metrics.match
    assert len(held) == later.metrics.reused_tokens
    here.agent.rewind()
    here.agent.ask("Go on.", max_tokens=4)
    assert held == here.ids()[: len(held)]


@pytest.mark.parametrize("n_before", range(-4, 3))
def test_blocks_hold_the_tokens_that_a_stop_string_left(talk, n_before):
    """Also where a block was full, and written, before the stop string was complete."""
    here = talk()
    letters = here.encode("abcdefghij")
    here.chat([user(LONG)], max_tokens=1)
    n_prompt = len(here.ids()) - 1
    texts = {here.tokenizer.decode([id_]): id_ for id_ in range(3, VOCAB_SIZE)}
    word = max((text for text in texts if text.isascii() and text.isalpha()), key=len)
    n_reply = BLOCK_TOKENS + n_before - n_prompt % BLOCK_TOKENS
    here._replies.say([*(letters[i % len(letters)] for i in range(n_reply)), texts[word], *here.encode("zzzz"), EOS])
    reply = here.chat([user(LONG)], max_tokens=n_reply + 20, stop=[f"{word[-1]}zzz"])
    assert len(word) > 3
    assert reply.text.endswith(word[:-1])
    assert reply.metrics.saved
    fork = here.agent.fork("other")
    here.agent.evict()
    fork.evict()
    assert here.tokenizer.decode(here.ids()).endswith(reply.text)
    held = here.ids()
    metrics = here.agent.ask("Go on.", max_tokens=2).metrics
    assert len(held) == metrics.reused_tokens
    assert held == here.ids()[: len(held)]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "no messages"),
        ("Hello", "list of mappings"),
        (["Hello"], "not a mapping"),
        ([{"role": "critic", "content": "x"}], "role 'critic'"),
        ([{"role": "user"}], "no text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "no text"),
        ([{"role": "user", "content": " "}], "empty"),
        ([user("x"), assistant("y")], "last message"),
        ([user("x"), user("y")], "template refuses.*alternate"),
        ([system("x"), user("y")], "template refuses.*System role"),
        ([user("\ud800")], "surrogate"),
        ([user("x"), assistant("", tool_calls=[{"id": "1"}]), user("y")], "tool call"),
    ],
)
def test_messages_that_cannot_be_served_are_refused_and_change_nothing(talk, messages, says):
    """In one line."""
    here = talk("no system")
    here.chat([user("Hello.")], said="Yes.")
    before = here.agent.tree(), here.ids()
    with pytest.raises(InputError, match=says) as raised:
        here.chat(messages)
    assert "\n" not in str(raised.value)
    assert before == (here.agent.tree(), here.ids())


@pytest.mark.parametrize(("before", "after"), [(True, 1), (1, 1.0), (0, False), ([1], [True])])
def test_values_that_python_takes_for_equal_are_others_in_json(talk, before, after):
    """In tools, in a recorded message's call and in a reply's call."""
    here = talk("tools")

    def call(value):
        function = {"name": "weather", "arguments": {"n": value, "day": "Monday"}}
        return {"tool_calls": [{"type": "function", "function": function}]}

    def tools(value):
        return [{"type": "function", "function": {"name": "weather", "parameters": {"default": value}}}]

    def decoded():
        return here.tokenizer.decode(here.ids())

    here.chat([user(LONG)], "Yes.", tools=tools(before))
    messages = [user(LONG), assistant("Yes."), user("Go on.")]
    assert Match.EXTEND is here.chat(messages, tools=tools(before)).metrics.match
    assert Match.EXTEND is not here.chat(messages, tools=tools(after)).metrics.match
    assert json.dumps({"default": after}) in decoded()
    made_up = [user(LONG), assistant("", **call(before)), user("And?")]
    here.chat(made_up, "Well.")
    more = [assistant("Well."), user("Go on.")]
    assert Match.EXTEND is here.chat([*made_up, *more]).metrics.match
    made_up[1] = assistant("", **call(after))
    assert Match.EXTEND is not here.chat([*made_up, *more]).metrics.match
    assert f'"n": {json.dumps(after)}' in decoded()
    said = Said("", "", "", "", (Call("weather", {"day": "Monday", "n": before}),))
    assert said.is_said_by(assistant("", **call(before)))
    assert not said.is_said_by(assistant("", **call(after)))


def test_the_order_of_a_tools_keys_counts_since_the_template_writes_it(talk):
    """That of a call's arguments does not."""
    here = talk("tools")
    swapped = {"type": "function", "function": dict(reversed(TOOL["function"].items()))}
    here.chat([user(LONG)], "Yes.", tools=[TOOL])
    messages = [user(LONG), assistant("Yes."), user("Go on.")]
    assert Match.EXTEND is here.chat(messages, tools=[TOOL]).metrics.match
    other = here.chat(messages, tools=[swapped])
    assert Match.EXTEND is not other.metrics.match
    assert "descriptions of tools" in other.metrics.explain()


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000, '{"a": ' * 100_000, '{"a": ' + "[" * 101 + "]" * 101 + "}"], ids=["[", "{", "101"]
)
def test_arguments_nested_too_deeply_are_refused(talk, arguments):
    """In one line, before anything changes."""
    here = talk("tools")
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    with pytest.raises(InputError, match="nested more than 100 deep") as raised:
        here.chat([user("Hello."), assistant("", tool_calls=[call]), user("And?")])
    assert "\n" not in str(raised.value)
    assert not here.agent.tree()


@pytest.mark.parametrize("depth", [101, 100_000])
def test_tools_nested_too_deeply_are_refused(talk, depth):
    """As a call's arguments are."""
    nested = []
    for _ in range(depth):
        nested = [nested]
    with pytest.raises(InputError, match="nested more than 100 deep"):
        talk("tools").chat([user("Hello.")], tools=[{"x": nested}])


@pytest.mark.parametrize("tools", ["weather", [1], [{"x": {1, 2}}]])
def test_tools_that_cannot_be_read_are_refused(talk, tools):
    """Before anything changes."""
    with pytest.raises(InputError, match="tool"):
        talk().agent.chat([user("Hello.")], tools=tools)


def test_parts_of_text_are_joined(talk):
    """As some clients send a message."""
    here = talk()
    here.chat([{"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two."}]}])
    assert "One two." == here.agent.turns[0].prompt


def test_async_clients_get_the_same(talk):
    """Achat and achat_stream are chat and chat_stream."""
    here = talk()

    async def run():
        reply = await here.agent.achat([user("Hello.")], max_tokens=5)
        events = [event async for event in here.agent.achat_stream([user("Hello.")], max_tokens=5)]
        return reply, events

    reply, events = asyncio.run(run())
    streamed = list(here.agent.chat_stream([user("Hello.")], max_tokens=5))
    assert reply.text == events[-1].reply.text == streamed[-1].reply.text
    assert reply.text == "".join(event.text for event in streamed)


@pytest.fixture(scope="module")
def bundled(bundled_model_path, tmp_path_factory):
    """The bundled model, with its own template and tokenizer."""
    with Engine(bundled_model_path, tmp_path_factory.mktemp("store")) as engine:
        yield engine


def test_the_bundled_models_conversations_extend_with_its_own_words(bundled):
    """Its own replies, sent back stripped; then its system text with another time in it."""
    agent = bundled.agent("planner")
    opening = [system("You answer in one sentence. The time is 10:15."), user("Name three fruits that grow on trees.")]
    first = agent.chat(opening, max_tokens=12)
    held = agent.status.n_tokens
    longer = [*opening, assistant(first.text.strip()), user("Which of them is red?")]
    metrics = agent.chat(longer, max_tokens=2).metrics
    assert Match.EXTEND is metrics.match
    assert held == metrics.reused_tokens
    longer[0] = system("You answer in one sentence. The time is 10:16.")
    agent.chat(longer, max_tokens=2)
    assert 2 == len([turn for turn in agent.tree() if turn.parent is None])


def test_the_bundled_models_reply_cut_inside_a_token_is_whole_in_its_history(bundled):
    """The next turn reads what was shown."""
    agent = bundled.agent("stopped")
    question = user("What is the capital of France?")
    whole = agent.chat([question], max_tokens=24).text
    word = max(re.findall(r"[A-Za-z]+", whole), key=len)
    reply = agent.chat([question], max_tokens=24, stop=[word[2:]])
    assert reply.text.endswith(word[:2])
    assert reply.text == bundled._parts.prompter.decode(reply.token_ids)
    held = agent.status.n_tokens
    metrics = agent.chat([question, assistant(reply.text), user("And of Italy?")], max_tokens=2).metrics
    assert held == metrics.reused_tokens
