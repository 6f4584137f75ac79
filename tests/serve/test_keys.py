"""Who may ask, from where, and that one key's agents are no other's."""

import hmac
import socket

import httpx
import pytest

from amem import InputError
from amem.serve import Keys, Server
from amem.serve.server import check_address
from tests.serve.conftest import LONG, user


def test_keys_are_the_owners_or_have_a_name():
    """KEY, and NAME:KEY."""
    keys = Keys.parse(["sk-own", "alice:sk-alice", "bob:x:y"])
    assert ["", "alice", "bob", None, None] == [
        keys.domain_of(sent) for sent in ("sk-own", "sk-alice", "x:y", "sk-other", None)
    ]
    assert "" == Keys().domain_of(None) == Keys().domain_of("anything")
    assert (("", "alice", "bob"), ("",)) == (keys.domains, Keys().domains)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["a", "b"], "no name"),
        (["x:a", "x:b"], "'x'"),
        ([""], "printable"),
        (["x:"], "printable"),
        (["a b"], "printable"),
        (["a!:b"], "letters"),
        (["x:same", "y:same"], "same API key"),
        (["http:sk"], "sessions"),
    ],
)
def test_impossible_keys_are_refused(texts, says):
    """In one line."""
    with pytest.raises(InputError, match=says):
        Keys.parse(texts)


def test_every_key_is_compared_in_constant_time_wherever_it_stands(monkeypatch):
    """The first match does not end the search, and what is compared are digests of one length."""
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    keys = Keys.parse(["a:1", "b:22", "c:333"])
    for sent in ("1", "333", "no such key", None):
        compared.clear()
        keys.domain_of(sent)
        assert [(32, 32)] * 3 == compared


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org"])
def test_a_host_that_others_reach_needs_a_key(host):
    """And the refusal says so."""
    with pytest.raises(InputError, match="API key"):
        check_address(host, 8000, Keys())
    check_address(host, 8000, Keys.parse(["k"]))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host):
    """Only programs of this machine reach it."""
    check_address(host, 8000, Keys())


def test_addresses_that_cannot_be_taken_are_refused(shared):
    """A port that is in use, one that is none, a host that is not this machine's."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot be taken"):
            Server(shared.engine, port=taken.getsockname()[1])
    with pytest.raises(InputError, match="65535"):
        Server(shared.engine, port=70000)
    with pytest.raises(InputError, match="cannot be taken"):
        Server(shared.engine, "192.0.2.1", 0, keys=Keys.parse(["k"]))


def test_only_names_of_this_machine_are_answered_without_a_key(shared):
    """A page in a browser could reach loopback under a name that its owner points there."""
    evil = shared.http.get("/v1/models", headers={"Host": "evil.example:80"})
    assert 403 == evil.status_code
    assert 200 == shared.http.get("/v1/models", headers={"Host": "LOCALHOST:1"}).status_code


def test_a_body_that_a_page_could_send_unasked_is_refused(shared):
    """Browsers ask first before they send JSON elsewhere, and this server does not allow it."""
    response = shared.http.post(
        "/v1/chat/completions", content=b'{"messages": []}', headers={"Content-Type": "text/plain"}
    )
    assert 415 == response.status_code
    asked = shared.http.options("/v1/chat/completions", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in asked.headers


def test_a_key_opens_and_no_other(place):
    """As a bearer token, or as Anthropic's clients send it; health alone needs none."""
    place.open(keys=["sk-own"])
    for headers in ({}, {"Authorization": "Bearer sk-ow"}, {"x-api-key": "sk-ownn"}, {"Authorization": "Basic sk-own"}):
        for path in ("/v1/models", "/metrics"):
            response = place.http.get(path, headers=headers)
            assert 401 == response.status_code
            assert "error" in response.json()
    assert 200 == place.http.get("/v1/models", headers={"Authorization": "bearer sk-own"}).status_code
    assert 200 == place.http.get("/metrics", headers={"x-api-key": "sk-own"}).status_code
    assert 200 == httpx.get(f"{place.server.url}/health").status_code
    refused = place.http.post("/v1/messages", json={})
    assert "authentication_error" == refused.json()["error"]["type"]


def test_nothing_crosses_keys(place):
    """Not a session without a name, and not an agent of the same name."""
    place.open(keys=["sk-own", "alice:sk-a", "bob:sk-b"])
    for named in ({}, {"agent": "planner"}):
        for key in ("sk-a", "sk-b", "sk-own"):
            reply = place.chat(user(LONG), headers={"Authorization": f"Bearer {key}"}, **named)
            assert "COLD" == reply["amem"]["match"]
            assert 0 == reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            again = place.chat(user(LONG), headers={"Authorization": f"Bearer {key}"}, **named)
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert ["planner"] == place.engine.agents()
    assert ["planner"] == place.engine.in_space("default/alice").agents()
    assert {"default", "default/http", "default/alice", "default/alice/http", "default/bob", "default/bob/http"} == set(
        place.engine.spaces()
    )


def test_a_refusal_for_want_of_memory_names_no_other_keys_agents(place):
    """It says how many there are."""
    just_enough = place.open().engine._parts.sequence_nbytes(4000)
    place.open(keys=["sk-own", "alice:sk-a"], memory=just_enough)
    own, alice = ({"Authorization": f"Bearer {key}"} for key in ("sk-own", "sk-a"))
    place.chat(user(LONG), agent="Kanarienvogel", headers=own)
    place.engine.agent("Kanarienvogel").pin()
    refused = [
        place.http.post("/v1/chat/completions", json={"messages": [user("x")], "max_tokens": 3900}, headers=headers)
        for headers in (own | {"X-Agent": "mine"}, alice)
    ]
    assert [(400, "memory_budget_exceeded")] * 2 == [(r.status_code, r.json()["error"]["code"]) for r in refused]
    assert "'Kanarienvogel'" in refused[0].text
    assert "Kanarienvogel" not in refused[1].text
    assert "1 of other spaces" in refused[1].text


@pytest.mark.parametrize("headers", [[("X-Agent", "")], [("X-Agent", "one"), ("X-Agent", "two")]])
def test_a_header_that_names_no_one_agent_is_refused(shared, headers):
    """It is not taken for a request without one."""
    body = {"messages": [user("x")]}
    refused = shared.http.post("/v1/chat/completions", json=body, headers=headers)
    assert (400, "agent") == (refused.status_code, refused.json()["error"]["param"])
    assert [] == shared.engine.agents()
