"""What a server takes on at most, what happens to clients that go away, and what its logs and figures tell."""

import json
import logging
import socket
import threading
import time

import httpx
import pytest

from amem import InputError, Residency
from amem.serve import Limits
from tests.serve.conftest import LONG, user

SLOW = {"max_tokens": 3000}  # seconds, on the tiny model


def eventually(holds, seconds=20):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.01)


def in_flight(place):
    return place.server._server.config.app._desk._n_taken


def began(place, *messages, **fields):
    """A stream whose first event has come, on a connection of its own."""
    client = httpx.Client(base_url=place.server.url, timeout=60)
    body = {"messages": messages, "stream": True, **SLOW, **fields}
    response = client.send(client.build_request("POST", "/v1/chat/completions", json=body), stream=True)
    assert 200 == response.status_code
    lines = response.iter_lines()
    next(lines)
    return client, lines


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


def test_a_full_queue_says_when_to_come_back(place):
    """And takes requests again when one has ended."""
    place.open(limits={"requests": 2})
    held = [began(place, user(f"{i} {LONG}")) for i in range(2)]
    response = place.http.post("/v1/chat/completions", json={"messages": [user("x")]})
    assert (429, "queue_full") == (response.status_code, response.json()["error"]["code"])
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert 200 == place.http.get("/health").status_code
    held[0][0].close()
    eventually(lambda: in_flight(place) < 2)
    place.chat(user("x"))
    held[1][0].close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends(place, stream):
    """As an error; the agent that it would have made is not there."""
    place.open(limits={"timeout_s": 0.3})
    body = {"messages": [user(LONG)], "agent": "planner", "stream": stream, **SLOW}
    response = place.http.post("/v1/chat/completions", json=body)
    if stream:
        assert "longer than 0.3 s" in json.loads(response.text.strip().split("\n\n")[-1][6:])["error"]["message"]
    else:
        assert (408, "timeout") == (response.status_code, response.json()["error"]["code"])
    eventually(lambda: () == place.engine.status().agents)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_request(place, stream):
    """At the next step, whether or not it was a stream; nothing of it stays."""
    place.open()
    place.chat(user("x"), agent="planner")
    before = place.engine.agent("planner").status
    if stream:
        began(place, user(LONG), agent="planner")[0].close()
    else:
        body = json.dumps({"messages": [user(LONG)], "agent": "planner", **SLOW})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", place.server.port)) as connection:
            connection.sendall((head + body).encode())
            eventually(lambda: in_flight(place) == 1)
            time.sleep(0.1)
    eventually(lambda: in_flight(place) == 0, seconds=3)
    after = place.engine.agent("planner").status
    assert (before.n_turns, before.n_tokens) == (after.n_turns, after.n_tokens)
    assert "amem_requests_gone_total 1.0" in place.http.get("/metrics").text
    place.chat(user("y"), agent="planner")


def test_a_client_that_goes_away_leaves_no_session(place):
    """Nor its memory."""
    place.open()
    place.chat(user("other " + LONG))
    hot, names = place.engine.status().hot_bytes, place.sessions
    began(place, user(LONG))[0].close()
    eventually(lambda: in_flight(place) == 0, seconds=3)
    assert names == place.sessions
    assert hot == place.engine.status().hot_bytes


def test_a_shutdown_lets_running_requests_end_and_commits_them(place):
    """No more are taken meanwhile."""
    place.open(limits={"grace_s": 30})
    client, lines = began(place, user(LONG), agent="planner", max_tokens=150)
    stopping = threading.Thread(target=place.server.stop)
    stopping.start()
    rest = [line for line in lines if line]
    stopping.join()
    client.close()
    assert "data: [DONE]" == rest[-1]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{place.server.url}/health")
    assert 1 == len(place.engine.agent("planner").turns)
    place.open()
    assert Residency.WARM is place.engine.agent("planner").status.residency


def test_a_shutdown_does_not_wait_for_ever(place):
    """What is not done by then is cancelled, and nothing of it stays."""
    place.open(limits={"grace_s": 1, "timeout_s": 100})
    client, _ = began(place, user(LONG), agent="planner", max_tokens=3500)
    started = time.monotonic()
    place.server.stop()
    assert time.monotonic() - started < 15
    client.close()
    eventually(lambda: [] == place.engine.agents(), seconds=5)


def test_nothing_of_a_prompt_is_logged(place, caplog, capfd, monkeypatch):
    """Neither of served requests, nor of refused ones, nor of those that meet an error inside."""
    canary = "Kanarienvogel"
    place.open()
    with caplog.at_level(logging.DEBUG):
        place.chat(user(canary), agent="planner")
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

        def fails(self, reply):
            raise RuntimeError(f"cannot read {canary}")

        monkeypatch.setattr("amem.model.prompt.Prompter.said", fails)
        for stream in (False, True):
            body = {
                "messages": [user(canary), {"role": "assistant", "content": canary}, user(canary)],
                "stream": stream,
            }
            response = place.http.post("/v1/chat/completions", json=body)
            assert 500 == response.status_code
            assert canary not in response.text
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert any("RuntimeError" in record.getMessage() for record in ours)
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
