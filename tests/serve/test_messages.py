"""/v1/messages, as Anthropic's clients speak it."""

import json

import pytest

from tests.serve.conftest import LONG, user
from tests.templates import TOOLS

TOOL = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object", "properties": {}}}


def post(place, *messages, **fields):
    return place.http.post("/v1/messages", json={"max_tokens": 5, "messages": messages, **fields})


def test_a_message_has_text_its_end_and_usage(shared):
    """Tokens that were reused are not counted among the input's."""
    first = post(shared, user(LONG), system="Be brief.").json()
    assert ("message", "assistant", "max_tokens") == (first["type"], first["role"], first["stop_reason"])
    assert "text" == first["content"][0]["type"]
    said = {"role": "assistant", "content": first["content"]}
    second = post(shared, user(LONG), said, user("Go on."), system=[{"type": "text", "text": "Be brief."}]).json()
    usage = first["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == second["usage"]["cache_read_input_tokens"]
    assert second["amem"]["computed_tokens"] == second["usage"]["input_tokens"]


def test_a_stop_sequence_is_named(shared):
    """Which of them it was."""
    whole = post(shared, user("stop " + LONG), max_tokens=30).json()["content"][0]["text"]
    stop = whole[3:5]
    cut = post(shared, user("stop " + LONG), max_tokens=30, stop_sequences=["not this one", stop]).json()
    assert ("stop_sequence", stop) == (cut["stop_reason"], cut["stop_sequence"])
    assert whole.partition(stop)[0] == cut["content"][0]["text"]


def test_the_events_of_a_stream_are_the_documented_ones(shared):
    """In their order, with the text of the whole reply."""
    whole = post(shared, user("stream " + LONG)).json()
    response = post(shared, user("stream " + LONG), stream=True)
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    kinds = [event["type"] for event in events]
    assert ["message_start", "content_block_start"] == kinds[:2]
    assert ["content_block_stop", "message_delta", "message_stop"] == kinds[-3:]
    assert {"content_block_delta"} == set(kinds[2:-3])
    assert whole["content"][0]["text"] == "".join(event["delta"]["text"] for event in events[2:-3])
    assert "max_tokens" == events[-2]["delta"]["stop_reason"]
    assert 5 == events[-2]["usage"]["output_tokens"]


def test_tools_are_used_and_answered(with_template, monkeypatch):
    """Blocks of their own; the answer goes on from the same state."""
    from tests.engine.scripted import Replies

    script = Replies()
    monkeypatch.setattr("amem.asked.Sampler", script.sampler)
    place = with_template(TOOLS).open()

    def say(text):
        ids = place.engine._parts.prompter._encode(text)
        script.say([*ids, 2])
        return len(ids) + 1

    call = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    first = post(place, user(LONG), tools=[TOOL], max_tokens=say(call)).json()
    text, used = first["content"]
    assert ("tool_use", "Well.") == (first["stop_reason"], text["text"].strip())
    assert ("weather", {"city": "Oslo"}) == (used["name"], used["input"])
    answer = {"type": "tool_result", "tool_use_id": used["id"], "content": [{"type": "text", "text": "Rain."}]}
    messages = [user(LONG), {"role": "assistant", "content": first["content"]}, user([answer])]
    second = post(place, *messages, tools=[TOOL], max_tokens=say("It rains.")).json()
    assert "It rains." == second["content"][0]["text"]
    assert (
        first["usage"]["input_tokens"] + first["usage"]["output_tokens"] == (second["usage"]["cache_read_input_tokens"])
    )
    streamed = post(place, user("again " + LONG), tools=[TOOL], max_tokens=say(call), stream=True).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert ["text", "tool_use"] == starts
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert [0, 1] == stops
    inputs = [event["delta"]["partial_json"] for event in events if event.get("delta", {}).get("partial_json")]
    assert {"city": "Oslo"} == json.loads("".join(inputs))


def count(place, *messages, **fields):
    return place.http.post("/v1/messages/count_tokens", json={"messages": messages, **fields})


def test_tokens_are_counted_as_they_will_be_used(with_template):
    """With the system text and the tools; nothing is made or stored."""
    place = with_template(TOOLS).open()
    for fields in ({}, {"system": "Be brief."}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "none"}}):
        counted = count(place, user(LONG), **fields).json()
        assert [] == place.sessions
        usage = post(place, user(LONG), **fields).json()["usage"]
        assert {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]} == counted
        place.engine.in_space("default/http").agent(place.sessions[0]).delete()
        place.open()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [user("many words " * 5000)]}, "context of 4096: shorten the messages"),
        ({"messages": [user("x")] * 5000}, "context of 4096"),
        ({"messages": [user([{"type": "image"}])]}, "text"),
        ({"tools": [TOOL]}, "tools"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_what_could_not_be_asked_is_not_counted(shared, fields, says):
    """With the reason that a request would get."""
    response = count(shared, *fields.pop("messages", [user("x")]), **fields)
    assert (400, "invalid_request_error") == (response.status_code, response.json()["error"]["type"])
    assert says in response.json()["error"]["message"]


def test_a_call_whose_arguments_are_no_json_stays_text(with_template, monkeypatch):
    """Python would read NaN, and half of a character; no client could."""
    from tests.engine.scripted import Replies

    script = Replies()
    monkeypatch.setattr("amem.asked.Sampler", script.sampler)
    place = with_template(TOOLS).open()
    for value in ("NaN", "1e999", '"\\ud800"'):
        call = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": {value}}}}}\n</tool_call>'
        for stream in (False, True):
            ids = place.engine._parts.prompter._encode(call)
            script.say([*ids, 2])
            asked = user(f"{value} {stream} {LONG}")
            response = post(place, asked, tools=[TOOL], max_tokens=len(ids) + 1, stream=stream)
            assert 200 == response.status_code
            assert "tool_use" not in response.text
            assert "tool_call" in response.text


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tool_choice": {"type": "any"}}, '{"type": "auto"}'),
        ({"tool_choice": {"type": "tool", "name": "weather"}}, '{"type": "auto"}'),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "alone"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "budget"),
        ({"top_k": 5}, "top_p"),
    ],
)
def test_a_refusal_says_what_to_do_instead(shared, fields, says):
    """In one line."""
    response = post(shared, user("x"), **fields)
    message = response.json()["error"]["message"]
    assert (400, 1) == (response.status_code, len(message.splitlines()))
    assert message.startswith(next(iter(fields)))
    assert says in message


def test_fields_that_ask_for_nothing_are_taken(shared):
    """Clients send their defaults."""
    for fields in (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "thinking": {"type": "disabled"}},
        {"metadata": {"user_id": "someone"}, "service_tier": "auto", "temperature": 1.0, "stream": False},
    ):
        assert 200 == post(shared, user("x"), **fields).status_code


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"top_k": 5},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tool_choice": {"type": "any"}},
        {"tools": [TOOL]},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [user([{"type": "image", "source": {}}])]},
        {"messages": [{"role": "assistant", "content": "A beginning"}]},
        {"messages": [user([{"type": "tool_use", "id": "x", "name": "y", "input": {}}])]},
        {"system": [{"type": "image"}]},
        {"stop_sequences": [""]},
    ],
)
def test_what_is_not_supported_is_refused_in_its_own_form(shared, fields):
    """Never ignored."""
    body = {"max_tokens": 5, "messages": [user("x")], **fields}
    response = shared.http.post("/v1/messages", json=body)
    assert 400 == response.status_code
    assert ("error", "invalid_request_error") == (response.json()["type"], response.json()["error"]["type"])


def test_another_model_is_not_found(shared):
    """The error has the form that its clients expect."""
    response = post(shared, user("x"), model="claude-opus")
    assert (404, "not_found_error") == (response.status_code, response.json()["error"]["type"])
