"""Connections that say nothing, read nothing, or say too much: none is held for ever, and each end is noticed."""

import json
import socket

import pytest

from tests.serve.conftest import LONG, eventually, in_flight, raw_request, user


def connected(place, **options):
    """A bare connection."""
    connection = socket.socket()
    for name, value in options.items():
        connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    connection.settimeout(120)
    connection.connect(("127.0.0.1", place.server.port))
    return connection


def n_connections(place):
    return len(place.server._server.server_state.connections)


def rest(connection):
    """All that still comes, until the server ends the connection."""
    try:
        return b"".join(iter(lambda: connection.recv(65536), b""))
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_a_request_whose_first_lines_do_not_come_is_cut_off(place, sent):
    """On a new connection, and on one that had a request already."""
    place.open(limits={"head_s": 0.3})
    with connected(place) as fresh:
        fresh.sendall(sent)
        assert b"" == rest(fresh)
    with connected(place) as used:
        used.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert used.recv(65536).startswith(b"HTTP/1.1 200 ")
        used.sendall(sent)
        rest(used)
    assert 200 == place.http.get("/health").status_code


def test_a_request_that_came_whole_is_not_cut_off(place, held):
    """However long its reply takes."""
    place.open(limits={"head_s": 0.3})
    held.hold()
    with connected(place) as connection:
        connection.sendall(raw_request({"messages": [user(LONG)], "max_tokens": 3000}))
        eventually(lambda: in_flight(place) == 1)
        with connected(place) as idle:
            assert b"" == rest(idle)  # so that as much time has passed
        held.let_go()
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_connections_beyond_the_most_are_told_to_come_back(place):
    """And are taken again when others have ended."""
    place.open(limits={"connections": 2})
    with connected(place) as one, connected(place):
        eventually(lambda: n_connections(place) == 2)
        with connected(place) as third:
            head, _, body = rest(third).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in head.lower()
        assert "too_many_connections" == json.loads(body)["error"]["code"]
        one.close()
        eventually(lambda: n_connections(place) < 2)
        assert 200 == place.http.get("/health").status_code


def test_a_client_that_does_not_read_is_cut_off(place, held):
    """Its request would hold its place and its session for ever."""
    place.open(limits={"stall_s": 0.3})
    place.server._server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    held.hold()
    with connected(place, SO_RCVBUF=4096) as connection:
        body = {"messages": [user(LONG)], "max_tokens": 3000, "stream": True, "logprobs": True, "top_logprobs": 20}
        connection.sendall(raw_request(body))
        eventually(lambda: in_flight(place) == 1)
        eventually(lambda: in_flight(place) == 0)
        assert 0 == n_connections(place)
    assert [] == place.sessions


@pytest.mark.parametrize("early", [raw_request({"messages": [user("x")]}), b"GET /health HTTP/1.1\r\nHost:"])
def test_a_client_that_sent_the_next_request_early_and_went_away_is_noticed(place, held, early):
    """Its first request is cancelled, and the next is not served."""
    place.open()
    held.hold()
    with connected(place) as connection:
        connection.sendall(raw_request({"messages": [user(LONG)], "max_tokens": 3000}) + early)
        eventually(lambda: in_flight(place) == 1)
    eventually(lambda: in_flight(place) == 0 == n_connections(place))
    assert [] == place.sessions


def test_requests_that_come_early_are_answered_in_their_order(place):
    """As HTTP has it."""
    place.open()
    with connected(place) as connection:
        asked = [raw_request({"messages": [user(f"{i} {LONG}")], "agent": f"agent-{i}"}) for i in range(3)]
        connection.sendall(b"".join(asked) + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = rest(connection).split(b"HTTP/1.1 200 OK")[1:]
    assert 4 == len(answers)
    for number, answer in enumerate(answers[:3]):
        assert f'"agent":"agent-{number}"'.encode() in answer
    assert b'"status":"ok"' in answers[3]


def test_a_flood_behind_a_request_ends_its_connection(place, held):
    """What comes early is kept in memory; there is no end to it otherwise."""
    place.open()
    held.hold()
    with connected(place) as connection:
        connection.sendall(raw_request({"messages": [user(LONG)], "max_tokens": 3000}))
        eventually(lambda: in_flight(place) == 1)
        flood = raw_request({"messages": [user("x" * 10_000)]}) * 2000
        with pytest.raises(ConnectionError):
            connection.sendall(flood)
    eventually(lambda: in_flight(place) == 0)
    assert [] == place.sessions
