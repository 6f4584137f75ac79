"""What a server takes on at most, what happens to clients that go away, and what its logs and figures tell."""

import json
import logging
import socket
import threading

import httpx
import pytest

from amem import InputError
from amem.serve import Limits
from tests.serve.conftest import LONG, began, eventually, in_flight, raw_request, user


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["requests", "timeout_s", "body_bytes"])
def test_limits_are_above_zero(name, value):
    """Else nothing could be served."""
    with pytest.raises(InputError, match=name):
        Limits(**{name: value})


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large_is_refused(place, declared):
    """Whether or not its length was told, and before it is read as JSON."""
    place.open(limits={"body_bytes": 1000})
    raw = json.dumps({"messages": [user("x" * 2000)]}).encode()
    headers = {"Content-Type": "application/json"}
    content = raw if declared else iter([raw[:500], raw[500:]])
    response = place.http.post("/v1/chat/completions", content=content, headers=headers)
    assert (413, "too_large") == (response.status_code, response.json()["error"]["code"])
    place.chat(user("x"))


def test_a_full_queue_says_when_to_come_back(place, held):
    """And takes requests again when one has ended."""
    place.open(limits={"requests": 2})
    held.hold(2)
    streams = [began(place, user(f"{i} {LONG}")) for i in range(2)]
    response = place.http.post("/v1/chat/completions", json={"messages": [user("x")]})
    assert (429, "queue_full") == (response.status_code, response.json()["error"]["code"])
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert 200 == place.http.get("/health").status_code
    streams[0][0].close()
    eventually(lambda: in_flight(place) < 2)
    place.chat(user("x"))
    streams[1][0].close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends(place, held, stream):
    """As an error; the agent that it would have made is not there."""
    place.open(limits={"timeout_s": 0.3})
    held.hold()
    body = {"messages": [user(LONG)], "agent": "planner", "stream": stream, "max_tokens": 3000}
    response = place.http.post("/v1/chat/completions", json=body)
    if stream:
        last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert "longer than 0.3 s" in last["error"]["message"]
    else:
        assert (408, "timeout") == (response.status_code, response.json()["error"]["code"])
    eventually(lambda: () == place.engine.status().agents)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_request(place, held, stream):
    """At the next step, whether or not it was a stream; nothing of it stays."""
    place.open()
    place.chat(user("x"), agent="planner")
    before = place.engine.agent("planner").status
    held.hold()
    if stream:
        began(place, user(LONG), agent="planner")[0].close()
    else:
        with socket.create_connection(("127.0.0.1", place.server.port)) as connection:
            connection.sendall(raw_request({"messages": [user(LONG)], "agent": "planner", "max_tokens": 3000}))
            eventually(lambda: in_flight(place) == 1)
    eventually(lambda: in_flight(place) == 0)
    after = place.engine.agent("planner").status
    assert (before.n_turns, before.n_tokens) == (after.n_turns, after.n_tokens)
    assert "amem_requests_gone_total 1.0" in place.http.get("/metrics").text
    place.chat(user("y"), agent="planner")


def test_a_client_that_goes_away_leaves_no_session(place, held):
    """Nor its memory."""
    place.open()
    place.chat(user("other " + LONG))
    hot, names = place.engine.status().hot_bytes, place.sessions
    held.hold()
    began(place, user(LONG))[0].close()
    eventually(lambda: in_flight(place) == 0)
    assert names == place.sessions
    assert hot == place.engine.status().hot_bytes


LOGGERS = ("", "amem", "amem.serve", "asyncio", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


def test_nothing_of_a_prompt_is_logged(place, caplog, capfd, monkeypatch):
    """Neither of served requests, nor of refused ones, nor of those that meet an error inside; at no level."""
    canary = "Kanarienvogel"
    place.open()
    for name in LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "level", logging.DEBUG)
    with caplog.at_level(logging.DEBUG):
        place.chat(user(canary), agent="planner")
        place.chat(user("x"), agent=canary, headers={"X-Agent": canary})
        asked = place.http.post(f"/v1/chat/completions?prompt={canary}", json={"messages": [user(canary)]})
        assert 200 == asked.status_code
        assert 404 == place.http.get(f"/{canary}?{canary}").status_code
        assert 404 == place.http.get(f"/v1/models/{canary}").status_code
        with socket.create_connection(("127.0.0.1", place.server.port)) as connection:
            connection.sendall(f"GET /{canary} {canary}\r\n{canary}\r\n\r\n".encode())
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        bad = [
            {"messages": [user(canary), {"role": canary, "content": canary}]},
            {"messages": canary},
            {canary: canary},
            {"messages": [user(canary)], "max_tokens": 10**6},
            {"messages": [user(canary)], "temperature": canary},
        ]
        for body in bad:
            assert 400 == place.http.post("/v1/chat/completions", json=body).status_code
        began(place, user(canary + LONG))[0].close()
        eventually(lambda: in_flight(place) == 0)

        def fails(*_args, **_more):
            raise RuntimeError(f"cannot read {canary}")

        with monkeypatch.context() as inside:
            inside.setattr("amem.model.prompt.Prompter.said", fails)
            for stream in (False, True):
                messages = [user(canary), {"role": "assistant", "content": canary}, user(canary)]
                response = place.http.post("/v1/chat/completions", json={"messages": messages, "stream": stream})
                assert 500 == response.status_code
                assert canary not in response.text
        with monkeypatch.context() as inside:
            inside.setattr("amem.serve.taken.Taken.aclose", fails)
            body = {"messages": [user(canary)], "stream": True, "max_tokens": 2}
            assert "[DONE]" in place.http.post("/v1/chat/completions", json=body).text
            eventually(lambda: sum("RuntimeError" in record.getMessage() for record in caplog.records) == 3)
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not [record for record in ours if canary in record.getMessage() or canary in str(record.exc_info)]
    written = capfd.readouterr()
    assert canary not in written.out + written.err


def test_figures_count_what_was_served(place):
    """In Prometheus' own format, read by its own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    place.open()
    first = place.chat(user(LONG), max_tokens=5)
    place.chat(user(LONG), max_tokens=5)
    place.http.post("/v1/chat/completions", json={})
    response = place.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert 2 == found["amem_requests_total", "/v1/chat/completions", "200"]
    assert 1 == found["amem_requests_total", "/v1/chat/completions", "400"]
    assert 10 == found["amem_generated_tokens_total",]
    prompt = first["usage"]["prompt_tokens"]
    assert 2 * prompt == sum(found["amem_prompt_tokens_total", source] for source in ("reused", "computed"))
    assert 1 == found["amem_matches_total", "EXACT"]
    assert 2 == found["amem_ttft_seconds_count",]
    assert 1 == found["amem_sessions",]
    assert 0 == found["amem_requests_in_flight",]
    status = place.engine.status()
    assert (status.hot_bytes, status.memory_budget) == (found["amem_hot_bytes",], found["amem_memory_budget_bytes",])


def test_two_servers_of_one_engine_come_and_go(place):
    """Stopping one leaves the engine to the other, and no thread behind."""
    from amem.serve import Server

    place.open()
    n_threads = threading.active_count()
    with Server(place.engine, port=0) as other:
        assert 200 == httpx.get(f"{other.url}/health").status_code
        assert other.port != place.server.port
    assert threading.active_count() <= n_threads
    place.chat(user("x"))
