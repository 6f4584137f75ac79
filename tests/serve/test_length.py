"""Requests that are too long, or hold too many: refused in the client's terms, before others have to wait for them."""

import json

import pytest

from amem.model.prompt import Prompter
from amem.serve.desk import COUNTED
from tests.serve.conftest import LONG, assistant, user
from tests.templates import TOOLS

HUGE = "many words, " * 250_000


@pytest.fixture
def encoded(monkeypatch):
    """The lengths of all texts that are made tokens."""
    lengths = []
    raw, history = Prompter.raw, Prompter.history

    def counted(self, text):
        lengths.append(len(text))
        return raw(self, text)

    def rendered(self, messages, tools=()):
        lengths.append(sum(len(one["content"]) for one in messages))
        return history(self, messages, tools)

    monkeypatch.setattr(Prompter, "raw", counted)
    monkeypatch.setattr(Prompter, "history", rendered)
    return lengths


@pytest.mark.parametrize("agent", [None, "planner"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [user(HUGE)]}),
        ("/v1/chat/completions", {"messages": [user("x"), assistant("y"), user(HUGE)]}),
        ("/v1/chat/completions", {"messages": [user("x"), assistant(HUGE), user("y")]}),
        ("/v1/messages/count_tokens", {"messages": [user(HUGE)]}),
        ("/v1/messages", {"messages": [user(HUGE)], "max_tokens": 4}),
        ("/v1/completions", {"prompt": HUGE}),
    ],
)
def test_a_huge_text_is_refused_by_its_first_pieces(place, encoded, path, body, agent):
    """Only they are made tokens, one at a time; no agent is made."""
    place.open()
    response = place.http.post(path, json=body, headers={"X-Agent": agent} if agent else {})
    assert 400 == response.status_code
    assert "the model's context of 4096" in response.json()["error"]["message"]
    assert 0 < max(encoded) <= COUNTED
    assert sum(encoded) < len(HUGE) / 20
    assert [] == place.engine.agents()
    assert [] == place.sessions


@pytest.mark.parametrize("unit", ["x" * 8, " the capital", "\n" * 12, "é"])
def test_what_fits_is_never_refused_by_its_pieces(place, encoded, monkeypatch, unit):
    """Whatever the cuts make of it: the count by pieces says no only where the exact count does."""
    monkeypatch.setattr("amem.serve.desk._CHARS_PER_TOKEN", 0.1)  # all are counted
    monkeypatch.setattr("amem.serve.desk.COUNTED", 500)
    place.open()
    n_per = len(place.engine._parts.prompter.raw(unit * 50)) / 50
    text = "." + unit * int(3900 / n_per) + "."
    n_tokens = len(place.engine._parts.prompter.raw(text))
    assert 3000 < n_tokens < 4090
    reply = place.http.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
    assert 200 == reply.status_code, reply.text
    assert n_tokens == reply.json()["usage"]["prompt_tokens"]
    assert max(encoded[2:-1]) <= 500


def test_long_replies_of_the_past_do_not_count_before_they_are_rendered(with_template):
    """A template may leave their thoughts out."""
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' }}"
        "{{ 'Yes.' if message['role'] == 'assistant' else message['content'] }}\n{% endfor %}assistant: "
    )
    place = with_template(template).open()
    place.chat(user("x"), assistant(HUGE), user("y"))


@pytest.mark.parametrize("agent", [None, "planner"])
@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/v1/chat/completions", {"messages": [user("x")], "max_tokens": 9999}, "give max_tokens of at most 40"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 9999}, "give max_tokens of at most 4095"),
        ("/v1/chat/completions", {"messages": [user(LONG * 40)]}, "shorten the messages"),
        ("/v1/completions", {"prompt": LONG * 40}, "shorten the prompt"),
    ],
)
def test_an_overflow_is_told_in_the_clients_terms(shared, path, body, wanted, agent):
    """It has no agent that it could rewind."""
    response = shared.http.post(path, json=body | ({"agent": agent} if agent else {}))
    error = response.json()["error"]
    assert (400, "context_length_exceeded") == (response.status_code, error["code"])
    assert wanted in error["message"]
    assert not any(word in error["message"] for word in ("session", "rewind", "fork", "agent"))


@pytest.mark.parametrize("kind", ["description", "numbers", "arguments"])
def test_huge_tools_and_calls_are_refused_by_their_first_pieces(with_template, encoded, kind):
    """They are a part of the text."""
    place = with_template(TOOLS).open()
    tool = {"name": "weather", "description": "The weather.", "parameters": {}}
    messages = [user("x")]
    if kind == "arguments":
        function = {"name": "weather", "arguments": json.dumps({"city": HUGE})}
        call = {"id": "1", "type": "function", "function": function}
        messages = [user("x"), assistant("", tool_calls=[call]), user("y")]
    elif kind == "numbers":
        tool["parameters"] = {"numbers": list(range(10_000, 400_000))}
    else:
        tool["description"] = HUGE
    body = {"messages": messages, "tools": [{"type": "function", "function": tool}]}
    response = place.http.post("/v1/chat/completions", json=body)
    assert (400, "context_length_exceeded") == (response.status_code, response.json()["error"]["code"])
    assert 0 < max(encoded) <= COUNTED
    assert sum(encoded) < len(HUGE) / 10
    assert [] == place.sessions


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
def test_more_messages_than_the_context_has_tokens_are_refused_unread(shared, encoded, path):
    """Each takes one at least."""
    body = {"messages": [user("x")] * 5000} | ({"max_tokens": 4} if path == "/v1/messages" else {})
    response = shared.http.post(path, json=body)
    assert 400 == response.status_code
    assert "the model's context of 4096" in response.json()["error"]["message"]
    assert [] == encoded


@pytest.mark.parametrize(
    ("path", "field", "value", "wanted"),
    [
        ("/v1/chat/completions", "stop", ["x"] * 17, "at most 16"),
        ("/v1/completions", "stop", ["x"] * 17, "at most 16"),
        ("/v1/completions", "prompt", ["x"] * 33, "at most 32 "),
        ("/v1/messages", "stop_sequences", ["x"] * 17, "at most 16"),
    ],
)
def test_a_list_over_its_limit_says_the_limit(shared, path, field, value, wanted):
    """Not that it should have been a text."""
    base = {"prompt": "x"} if path == "/v1/completions" else {"messages": [user("x")], "max_tokens": 1}
    message = shared.http.post(path, json={**base, field: value}).json()["error"]["message"]
    assert message.startswith(f"{field}: ")
    assert wanted in message
