"""What clients are told whose requests the end of a server cuts short."""

import asyncio
import json
import logging
import socket
import threading

import httpx
import pytest

from tests.serve.conftest import LONG, user
from tests.serve.test_limits import began, eventually, in_flight

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n"


def told(response):
    return response.status_code, response.json()["error"]["code"], int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_request_past_the_grace_time_is_told_to_come_back(place, caplog, path):
    """As JSON; the log has nothing to tell, and no agent is left."""
    place.open(limits={"grace_s": 0.3})
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


def test_a_stream_past_the_grace_time_ends_with_an_error(place, caplog):
    """As the last of its events."""
    place.open(limits={"grace_s": 0.3})
    client, lines = began(place, user(LONG), max_tokens=3500)
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
