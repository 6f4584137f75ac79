"""/v1/chat/completions and /v1/completions."""

import json

import pytest

from tests.serve.conftest import LONG, assistant, eventually, in_flight, user
from tests.templates import THINKING, TOOLS

TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": {}}}


def events(response):
    """The data of server-sent events; the last is [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert "[DONE]" == lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def test_a_reply_has_text_usage_and_what_it_cost(shared):
    """Prompt and reply add up, and what was reused is reported by the engine."""
    first = shared.chat(user(LONG), max_tokens=5)
    assert "chat.completion" == first["object"]
    assert "length" == first["choices"][0]["finish_reason"]
    usage = first["usage"]
    assert 5 == usage["completion_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    second = shared.chat(user(LONG), assistant(first["choices"][0]["message"]["content"]), user("Go on."))
    assert usage["total_tokens"] == second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert second["amem"]["reused_tokens"] == second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert "EXTEND" == second["amem"]["match"]
    assert {"ttft_ms", "queue_ms", "prefill_ms", "restore_ms", "computed_tokens"} <= second["amem"].keys()


def test_a_stream_gives_the_same_text_in_pieces(shared):
    """And usage at its end, if it is asked for."""
    body = {"messages": [user(LONG + "!")], "max_tokens": 12}
    whole = shared.chat(*body["messages"], max_tokens=12)
    response = shared.http.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert {"role": "assistant", "content": ""} == chunks[0]["choices"][0]["delta"]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert whole["choices"][0]["message"]["content"] == text
    assert "length" == chunks[-2]["choices"][0]["finish_reason"]
    assert [] == chunks[-1]["choices"]
    assert whole["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"]
    assert 1 == len({chunk["id"] for chunk in chunks})
    bare = events(shared.http.post("/v1/chat/completions", json={**body, "stream": True}))
    assert all("usage" not in chunk for chunk in bare)


def test_a_stop_string_ends_the_reply(shared):
    """And is no part of it."""
    whole = shared.chat(user("stop " + LONG), max_tokens=30)["choices"][0]["message"]["content"]
    stop = whole[3:5]
    for given in (stop, [stop, "never to be seen"]):
        cut = shared.chat(user("stop " + LONG), max_tokens=30, stop=given)["choices"][0]
        assert whole.partition(stop)[0] == cut["message"]["content"]
        assert "stop" == cut["finish_reason"]


def test_a_seed_repeats_a_sample_and_none_takes_a_fresh_one(shared):
    """Without a temperature the reply is greedy."""

    def sample(**fields):
        return shared.chat(user("sample " + LONG), max_tokens=16, **fields)["choices"][0]["message"]["content"]

    assert sample(temperature=1.5, seed=7) == sample(temperature=1.5, seed=7)
    assert sample(temperature=1.5, seed=7) != sample(temperature=1.5, seed=8)
    assert 1 < len({sample(temperature=1.5) for _ in range(3)})
    assert sample() == sample(temperature=0, seed=3)
    assert sample() == sample(temperature=1.5, top_p=1e-6, seed=8)  # only the likeliest is left


def test_max_completion_tokens_is_the_newer_name(shared):
    """And goes first."""
    assert 3 == shared.chat(user("x"), max_completion_tokens=3)["usage"]["completion_tokens"]
    assert 2 == shared.chat(user("x"), max_completion_tokens=2, max_tokens=9)["usage"]["completion_tokens"]


def test_logprobs_are_told_whole_and_in_a_stream(shared):
    """The same, with as many alternatives as were asked for."""
    body = {"messages": [user("log " + LONG)], "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    whole = shared.chat(*body.pop("messages"), **body)["choices"][0]["logprobs"]["content"]
    assert 6 == len(whole)
    for entry in whole:
        assert 3 == len(entry["top_logprobs"])
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] < 0
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]
    streamed = events(
        shared.http.post("/v1/chat/completions", json={"messages": [user("log " + LONG)], "stream": True, **body})
    )
    told = [entry for chunk in streamed for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [entry["token"] for entry in whole] == [entry["token"] for entry in told]
    assert shared.chat(user("log " + LONG))["choices"][0]["logprobs"] is None


def test_parts_of_text_and_the_developers_role_are_taken(shared):
    """As newer clients send them."""
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    reply = shared.chat({"role": "developer", "content": parts}, user("Hi."), agent="developer")
    assert "developer" == reply["amem"]["agent"]
    assert "Be brief." == shared.engine.agent("developer").system


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"n": 2}, "n"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1.0}, "presence_penalty"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"functions": [{}]}, "functions"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_k": 5}, "top_k"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 100_000}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e999}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, None),
        ({"seed": 2**70}, "seed"),
        ({"agent": ""}, "agent"),
        ({"agent": "two\nlines"}, None),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": [assistant("x")]}, None),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, None),
        ({"messages": [user(" ")]}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused_and_never_ignored(shared, fields, param, stream):
    """With the field at fault, as an error and not as a stream."""
    before = shared.engine.spaces(), shared.engine.agents(), len(shared.sessions)
    body = {"messages": [user("Hello.")], "stream": stream, **fields}
    response = shared.http.post("/v1/chat/completions", content=json.dumps(body).replace("Infinity", "1e999"),
                                headers={"Content-Type": "application/json"})  # fmt: skip
    assert 400 == response.status_code, response.text
    error = response.json()["error"]
    assert param is None or (error["param"] or "").startswith(param), error
    assert "\n" not in error["message"]
    assert before == (shared.engine.spaces(), shared.engine.agents(), len(shared.sessions))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "tools": [], "parallel_tool_calls": True},
        {"user": "someone", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"temperature": None, "top_p": None, "stop": None, "seed": None, "max_tokens": None, "stream": None},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(shared, fields):
    """Clients send their defaults."""
    shared.chat(user("Hello."), **fields)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        *(
            b'{"messages": [{"role": "user", "content": "x"}], %s}' % field
            for field in (
                b'"temperature": NaN',
                b'"temperature": -Infinity',
                b'"temperature": true',
                b'"top_p": NaN',
                b'"frequency_penalty": NaN',
                b'"seed": 1e400',
                b'"seed": ' + b"9" * 5000,
                b'"n": ' + b"9" * 5000,
                b'"max_tokens": ' + b"9" * 5000,
                b'"max_tokens": true',
                b'"max_tokens": 1.5',
                b'"temperature": ' + b"9" * 5000,
                b'"metadata": ' + b"[" * 5000 + b"]" * 5000,
                b'"agent": "a\\u0000b"',
                b'"agent": "a\\r\\nX-Evil: 1"',
                b'"agent": "\\u2028"',
                b'"agent": "\\ud83d"',
                b'"agent": "' + b"x" * 129 + b'"',
                b'"agent": 7',
                b'"%s": 1' % (b"long" * 10_000),
                b'"model": 1',
                b'"stop": ["' + b"\\ud800" + b'"]',
            )
        ),
    ],
)
def test_bodies_that_are_no_json_of_ours_are_refused(shared, raw):
    """In one line."""
    response = shared.http.post("/v1/chat/completions", content=raw, headers={"Content-Type": "application/json"})
    assert 400 == response.status_code, response.text
    message = response.json()["error"]["message"]
    assert (1, True) == (len(message.splitlines()), len(message) <= 501)


@pytest.mark.parametrize(
    "tool",
    [
        b'{"parameters": {"x": NaN}}',
        b'{"parameters": {"x": 1e400}}',
        b'{"parameters": {"x": %s}}' % (b"9" * 5000),
        b'{"parameters": %s1%s}' % (b'{"x":' * 120, b"}" * 120),
        b'{"description": "\\ud800"}',
        b"7",
    ],
)
def test_tools_that_could_not_be_kept_are_refused(with_template, tool):
    """Whatever JSON can be made of them."""
    place = with_template(TOOLS).open()
    body = b'{"messages": [{"role": "user", "content": "x"}], "tools": [%s]}' % tool
    response = place.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert 400 == response.status_code, response.text


def test_a_long_text_in_a_refusal_is_cut(shared):
    """A client need not be sent back all that it sent."""
    response = shared.http.post("/v1/chat/completions", json={"model": "x" * 100_000, "messages": [user("x")]})
    assert (404, True) == (response.status_code, len(response.text) < 700)


def test_another_model_is_not_played(shared):
    """The one that is loaded is named, and listed."""
    response = shared.http.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": [user("x")]})
    assert (404, "model_not_found") == (response.status_code, response.json()["error"]["code"])
    listed = shared.http.get("/v1/models").json()["data"]
    assert ["tiny-llama"] == [model["id"] for model in listed]
    assert "tiny-llama" == shared.http.get("/v1/models/tiny-llama").json()["id"]
    assert 404 == shared.http.get("/v1/models/gpt-4o").status_code
    assert "tiny-llama" == shared.chat(user("x"), model="tiny-llama")["model"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/nothing", 404),
        ("POST", "/health", 405),
    ],
)
def test_other_paths_and_methods_are_refused_as_json(shared, method, path, status):
    """As every other refusal."""
    response = shared.http.request(method, path)
    assert status == response.status_code
    assert "/v1/chat/completions" in response.json()["error"]["message"]
    assert "location" not in response.headers


# -- tools and thoughts


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
def scripted(with_template, monkeypatch):
    """A place whose model says what the test wants."""
    from tests.engine.scripted import Replies

    script = Replies()
    monkeypatch.setattr("amem.asked.Sampler", script.sampler)

    def make(template):
        made = with_template(template).open()
        encode = made.engine._parts.prompter._encode

        def say(text):
            ids = encode(text)
            script.say([*ids, 2])
            return len(ids) + 1

        made.say = say
        return made

    return make


def test_tool_calls_come_in_a_field_of_their_own(scripted):
    """Whole and streamed; the answer goes on from the very same state."""
    place = scripted(TOOLS)
    n = place.say(f"Let me see.\n{CALL}")
    reply = place.chat(user(LONG), tools=[TOOL], max_tokens=n)
    choice = reply["choices"][0]
    assert "tool_calls" == choice["finish_reason"]
    assert "Let me see." == choice["message"]["content"].strip()
    call = choice["message"]["tool_calls"][0]
    assert ("weather", {"city": "Oslo"}) == (call["function"]["name"], json.loads(call["function"]["arguments"]))
    n = place.say("It rains.")
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}
    said = {key: value for key, value in choice["message"].items() if value is not None}
    after = place.chat(user(LONG), said, answer, tools=[TOOL], max_tokens=n)
    assert "It rains." == after["choices"][0]["message"]["content"]
    assert reply["usage"]["total_tokens"] == after["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tool_calls_are_streamed(scripted):
    """None of their text is shown."""
    place = scripted(TOOLS)
    n = place.say(CALL)
    body = {"messages": [user(LONG)], "tools": [TOOL], "max_tokens": n, "stream": True}
    chunks = events(place.http.post("/v1/chat/completions", json=body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "" == "".join(delta.get("content") or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(0, "weather")] == [(call["index"], call["function"]["name"]) for call in calls]
    assert "tool_calls" == chunks[-1]["choices"][0]["finish_reason"]


def test_tools_that_are_not_wanted_are_not_shown(scripted):
    """A call without them is text."""
    place = scripted(TOOLS)
    n = place.say(CALL)
    reply = place.chat(user(LONG), tools=[TOOL], tool_choice="none", max_tokens=n)
    assert CALL == reply["choices"][0]["message"]["content"]
    assert "weather" not in place.engine.in_space("default/http").agent(place.sessions[0]).turns[0].prompt


def test_a_thought_has_a_field_of_its_own_and_need_not_come_back(scripted):
    """The state keeps it."""
    place = scripted(THINKING)
    n = place.say("Let me see.\n</think>\n\nThe answer.")
    reply = place.chat(user(LONG), max_tokens=n)
    message = reply["choices"][0]["message"]
    assert ("The answer.", "Let me see.\n") == (message["content"], message["reasoning_content"])
    place.say("Yes.")
    after = place.chat(user(LONG), assistant("The answer."), user("Sure?"), max_tokens=4)
    assert reply["usage"]["total_tokens"] == after["usage"]["prompt_tokens_details"]["cached_tokens"]


# -- bare texts


def test_a_completion_continues_the_text_itself(shared):
    """Whole, streamed, and with logprobs in the older form."""
    body = {"prompt": LONG, "max_tokens": 5, "logprobs": 2}
    whole = shared.http.post("/v1/completions", json=body).json()
    choice = whole["choices"][0]
    assert "text_completion" == whole["object"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert 5 == len(choice["logprobs"]["token_logprobs"])
    assert all(2 >= len(top) > 0 for top in choice["logprobs"]["top_logprobs"])
    chunks = events(shared.http.post("/v1/completions", json={**body, "stream": True}))
    assert choice["text"] == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    tokens = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {}).get("tokens", [])]
    assert choice["logprobs"]["tokens"] == tokens
    longer = shared.http.post("/v1/completions", json={"prompt": [LONG + choice["text"] + LONG]}).json()
    assert longer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


@pytest.mark.parametrize("text", ["Let me see.\n</think>\n\nSo.", "\n <think>x</think>\n", CALL, "a <thi"])
@pytest.mark.parametrize("template", [TOOLS, THINKING])
def test_a_completion_is_the_text_as_it_was_generated(scripted, template, text):
    """Marks and white space are its own; whole and streamed."""
    place = scripted(template)
    body = {"prompt": LONG, "max_tokens": place.say(text)}
    assert text == place.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    place.say(text)
    chunks = events(place.http.post("/v1/completions", json={**body, "stream": True}))
    assert text == "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_each_of_several_texts_is_continued(shared):
    """As it is alone; the choices are in the texts' order, and the usage is that of all."""
    texts = [f"{word} {LONG}" for word in ("one", "two", "three")]
    body = {"max_tokens": 5, "logprobs": 1}
    alone = [shared.http.post("/v1/completions", json={**body, "prompt": text}).json() for text in texts]
    together = shared.http.post("/v1/completions", json={**body, "prompt": texts}).json()
    for index, (one, choice) in enumerate(zip(alone, together["choices"], strict=True)):
        wanted = one["choices"][0]
        assert (index, wanted["text"], "length") == (choice["index"], choice["text"], choice["finish_reason"])
        assert wanted["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
        assert wanted["logprobs"]["text_offset"] == choice["logprobs"]["text_offset"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert sum(one["usage"][count] for one in alone) == together["usage"][count]
    costs = together["amem"]
    assert 3 == len(costs)
    assert sum(one["reused_tokens"] for one in costs) == together["usage"]["prompt_tokens_details"]["cached_tokens"]
    response = shared.http.post(
        "/v1/completions", json={**body, "prompt": texts, "stream": True, "stream_options": {"include_usage": True}}
    )
    *chunks, last = events(response)
    for index, one in enumerate(alone):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert one["choices"][0]["text"] == "".join(choice["text"] for choice in mine)
        assert "length" == mine[-1]["finish_reason"]
    assert ([], together["usage"]["total_tokens"]) == (last["choices"], last["usage"]["total_tokens"])


def test_several_texts_of_one_agent_are_a_turn_each(shared):
    """One after the other; each begins anew."""
    texts = ["one " + LONG, "two " + LONG]
    body = {"prompt": texts, "max_tokens": 3, "agent": "two texts"}
    for stream in (False, True):
        assert 200 == shared.http.post("/v1/completions", json={**body, "stream": stream}).status_code
    agent = shared.engine.agent("two texts")
    assert texts == [turn.prompt for turn in agent.tree()]
    agent.delete()


def test_several_texts_take_several_places_in_the_queue(place):
    """All are refused where one is; none of them leaves anything."""
    place.open(limits={"requests": 2})
    three = place.http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert (400, "prompt") == (three.status_code, three.json()["error"]["param"])
    assert "at most 2" in three.json()["error"]["message"]
    late = place.http.post("/v1/completions", json={"prompt": [LONG, "x" * 9000], "max_tokens": 9})
    assert "context" in late.json()["error"]["message"]
    eventually(lambda: in_flight(place) == 0)
    assert [] == place.sessions
    assert 2 == len(place.http.post("/v1/completions", json={"prompt": ["a", "b"]}).json()["choices"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n": 2}, "once for each choice"),
        ({"tool_choice": "required"}, '"auto"'),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, '"auto"'),
        ({"parallel_tool_calls": False}, "answer each"),
        ({"response_format": {"type": "json_object"}}, "check the reply"),
        ({"functions": []}, "give tools"),
        ({"logit_bias": {"1": 1}}, "leave it out"),
    ],
)
def test_a_refusal_says_what_to_do_instead(shared, fields, says):
    """In one line."""
    response = shared.http.post("/v1/chat/completions", json={"messages": [user("x")], **fields})
    message = response.json()["error"]["message"]
    assert (400, 1) == (response.status_code, len(message.splitlines()))
    assert message.startswith(next(iter(fields)))
    assert says in message


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": ["x"] * 33},
        {"prompt": ["x", ""]},
        {"prompt": [1, 2]},
        {"prompt": [[1, 2]]},
        {"prompt": ""},
        {"echo": True},
        {"suffix": "x"},
        {"best_of": 3},
        {"n": 2},
    ],
)
def test_completions_that_are_not_served_are_refused(shared, fields):
    """As for chats."""
    assert 400 == shared.http.post("/v1/completions", json={"prompt": "x", **fields}).status_code
