"""The end of a server: what is done by then is kept whole, and what is cut short is not kept, and told so."""

import asyncio
import json
import logging
import socket
import threading

import httpx
import pytest

from amem import Residency
from tests.serve.conftest import LONG, began, events_of, eventually, in_flight, text_of, user

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n"


def told(response):
    return response.status_code, response.json()["error"]["code"], int(response.headers["retry-after"]) > 0


def ask(place, got, name, **fields):
    """A request in a thread of its own; its events, or its reply as one, come under a name."""

    def run():
        body = {"messages": [user(f"{name} {LONG}")], "max_tokens": 3000, **fields}
        response = httpx.post(f"{place.server.url}/v1/chat/completions", json=body, timeout=120)
        assert 200 == response.status_code, response.text
        got[name] = events_of(response.text.split("\n")) if body.get("stream") else [response.json()]

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def is_refusing(place):
    """Whether a server takes no more connections."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", place.server.port)) != 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("named", [{}, {"agent": "planner"}], ids=["session", "named"])
def test_what_ends_within_the_grace_time_is_answered_and_kept(place, held, named, stream):
    """Whether it ran or still waited when the end began; no more is taken; after a restart it all goes on from there."""
    place.open(limits={"grace_s": 120}, max_batch=1)
    held.hold()
    got = {}
    first = ask(place, got, "first", stream=stream, **named)
    eventually(lambda: in_flight(place) == 1)
    second = ask(place, got, "second", stream=stream, max_tokens=5, **named)
    eventually(lambda: in_flight(place) == 2)
    stopping = threading.Thread(target=place.server.stop)
    stopping.start()
    eventually(lambda: is_refusing(place))
    assert 2 == in_flight(place)  # nothing of it was done before the end began
    held.let_go()
    for thread in (first, second, stopping):
        thread.join()
    place.open()
    for name in ("first", "second"):
        last = got[name][-1]
        if stream:
            assert last["choices"][0]["finish_reason"] in ("stop", "length")
            text = text_of(got[name])
        else:
            text = last["choices"][0]["message"]["content"]
        messages = [user(f"{name} {LONG}"), {"role": "assistant", "content": text}, user("Go on.")]
        assert last["amem"]["saved"]
        again = place.chat(*messages, **named)["amem"]
        assert (last["amem"]["agent"], "EXTEND") == (again["agent"], again["match"])
        assert again["reused_tokens"] >= last["amem"]["prompt_tokens"] + last["amem"]["generated_tokens"] - 1


@pytest.mark.parametrize("named", [{}, {"agent": "planner"}], ids=["session", "named"])
def test_half_a_reply_is_not_kept(place, held, named):
    """Its agent is as it was before: the same question is answered from the same state as if it had not been asked."""
    place.open()
    opening = place.chat(user(LONG), **named)
    said = opening["choices"][0]["message"]
    undisturbed = place.chat(user(LONG), said, user("Go on."), **named)
    place.close()
    place.store = place.store.with_name("another store")
    place.open(limits={"grace_s": 0.3})
    assert said == place.chat(user(LONG), **named)["choices"][0]["message"]
    held.hold()
    client, lines = began(place, user(LONG), said, user("Go on."), **named)
    next(line for line in lines if line and text_of(events_of([line])))
    place.server.stop()
    assert "nothing of it was kept" in events_of(lines)[-1]["error"]["message"]
    client.close()
    place.open()
    inside = place.engine if named else place.engine.in_space("default/http")
    (name,) = inside.agents()
    assert [said["content"]] == [turn.reply for turn in inside.agent(name).tree()]
    assert Residency.WARM is inside.agent(name).status.residency
    again = place.chat(user(LONG), said, user("Go on."), **named)
    assert undisturbed["choices"] == again["choices"]
    assert undisturbed["usage"] == again["usage"]
    assert "EXTEND" == again["amem"]["match"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_request_past_the_grace_time_is_told_to_come_back(place, held, caplog, path):
    """As JSON; the log has nothing to tell, and no agent is left."""
    place.open(limits={"grace_s": 0.3})
    held.hold()
    got = []
    body = {"messages": [user(LONG)], "agent": "planner", "max_tokens": 3500}
    asking = threading.Thread(target=lambda: got.append(httpx.post(place.server.url + path, json=body, timeout=60)))
    with caplog.at_level(logging.WARNING):
        asking.start()
        eventually(lambda: in_flight(place) == 1)
        place.server.stop()
        asking.join()
    assert (503, True) == (got[0].status_code, int(got[0].headers["retry-after"]) > 0)
    assert "shutting down" in got[0].json()["error"]["message"]
    assert [] == [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [] == place.engine.agents()


def test_a_stream_past_the_grace_time_ends_with_an_error(place, held, caplog):
    """As the last of its events."""
    place.open(limits={"grace_s": 0.3})
    held.hold()
    client, lines = began(place, user(LONG))
    with caplog.at_level(logging.WARNING):
        place.server.stop()
    last = [line for line in lines if line][-1]
    client.close()
    assert "shutting_down" == json.loads(last.removeprefix("data: "))["error"]["code"]
    assert [] == [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [] == place.sessions


def test_a_client_that_hangs_in_its_body_is_told_too(place, caplog):
    """It does not hold the end up for longer than the grace time."""
    place.open(limits={"grace_s": 0.3})
    with (
        caplog.at_level(logging.WARNING),
        socket.create_connection(("127.0.0.1", place.server.port), timeout=20) as hanging,
    ):
        hanging.sendall((HEAD + '{"messages": [').encode())
        eventually(lambda: place.server._server.config.app._desk._arrivals)
        place.server.stop()
        answer = b"".join(iter(lambda: hanging.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after:" in head.lower()
    assert "shutting_down" == json.loads(body)["error"]["code"]
    assert [] == [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_body_must_come_within_the_time_of_a_request(place):
    """Else connections that send nothing would stay for ever."""
    place.open(limits={"timeout_s": 0.3})
    with socket.create_connection(("127.0.0.1", place.server.port), timeout=20) as hanging:
        hanging.sendall((HEAD + '{"messages": [').encode())
        assert hanging.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_what_comes_after_the_end_is_refused(place):
    """A connection that was open already may still send."""
    place.open()
    app = place.server._server.config.app

    async def close():
        app.close()

    asyncio.run(close())
    response = place.http.post("/v1/chat/completions", json={"messages": [user("x")]})
    assert (503, "shutting_down", True) == told(response)
