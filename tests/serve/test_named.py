"""Agents with a name: how many stay open, and what is left of requests that were refused."""

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from amem import Residency
from tests.serve.conftest import LONG, user

_FILES = Path("/proc/self/fd")


def n_open(place):
    return len(place.engine._roster.sessions)


def ask(place, **fields):
    return place.http.post("/v1/chat/completions", json={"messages": [user("x")], **fields})


def test_agents_that_are_used_no_more_are_released(place):
    """The least recently used first; each goes on where it was."""
    place.open(limits={"open_sessions": 2})
    for name in ("one", "two", "three"):
        place.chat(user(LONG), agent=name)
    assert {("default", "two"), ("default", "three")} == set(place.engine._roster.sessions)
    place.chat(user("x"), agent="two")
    again = place.chat(user(LONG), agent="one")
    assert "EXACT" == again["amem"]["match"]
    assert {("default", "two"), ("default", "one")} == set(place.engine._roster.sessions)


@pytest.mark.skipif(not _FILES.exists(), reason="the open files of a process are counted in /proc")
def test_any_number_of_named_agents_holds_a_bounded_number_of_files(place):
    """Whichever key asks."""
    place.open(keys=["a:1", "b:2"], limits={"open_sessions": 2})

    def ask_all(names):
        for name in names:
            for key in "12":
                place.chat(user("x"), agent=name, max_tokens=1, headers={"Authorization": f"Bearer {key}"})
        return len(list(_FILES.iterdir()))

    few, many = ask_all("abc"), ask_all("defghijkl")
    assert many <= few + 2
    assert 2 == n_open(place)


def test_a_pinned_agent_stays(place):
    """It was asked for at another place."""
    place.open(limits={"open_sessions": 1})
    place.chat(user(LONG), agent="pinned")
    place.engine.agent("pinned").pin()
    for name in ("one", "two"):
        place.chat(user("x"), agent=name)
    assert Residency.HOT is place.engine.agent("pinned").status.residency


def test_a_busy_agent_stays(place):
    """More than may be open can answer at once."""
    place.open(limits={"open_sessions": 1})
    replies = []
    threads = [
        threading.Thread(target=lambda name=name: replies.append(place.chat(user(LONG), agent=name, max_tokens=40)))
        for name in "abc"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 3 == len(replies)
    assert 1 == n_open(place)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 10**6},
        {"messages": [user("many words " * 5000)]},
        {"messages": [{"role": "system", "content": "x"}]},
        {"temperature": 3.0},
    ],
)
def test_a_refused_request_makes_no_agent(place, fields):
    """Neither on disk nor in memory."""
    place.open()
    assert 400 == ask(place, agent="planner", **fields).status_code
    assert [] == place.engine.agents()
    assert 0 == n_open(place)


def test_a_refused_request_leaves_an_agent_that_was_there(place):
    """With its turns, or with nothing but its system text, or empty."""
    place.open()
    place.chat(user("x"), agent="turns")
    place.engine.agent("system", system="Be brief.")
    place.engine.agent("empty")
    for name in ("turns", "system", "empty"):
        assert 400 == ask(place, agent=name, max_tokens=10**6).status_code
    assert {"turns", "system", "empty"} == set(place.engine.agents())
    assert 1 == len(place.engine.agent("turns").turns)


def test_a_refused_request_leaves_what_others_made_of_its_agent_meanwhile(place):
    """One of two requests at the same time is served."""
    place.open()
    statuses = []
    threads = [
        threading.Thread(target=lambda n=n: statuses.append(ask(place, agent="planner", max_tokens=n).status_code))
        for n in (10**6, 30, 10**6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [200, 400, 400] == sorted(statuses)
    assert 1 == len(place.engine.agent("planner").turns)


def test_a_store_that_fails_is_told_apart_and_logged(place, monkeypatch, caplog):
    """The system's reason is in the log, no name is."""
    from amem.store import files

    place.open()

    def fails(*_args, **_more):
        with files.explained("create agent 'Kanarienvogel'", place.store):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(place.engine._parts.store, "create", fails)
    with caplog.at_level(logging.ERROR):
        response = ask(place, agent="Kanarienvogel")
    assert (503, "store_error") == (response.status_code, response.json()["error"]["code"])
    assert int(response.headers["retry-after"]) > 0
    assert any(os.strerror(errno.EMFILE) in record.getMessage() for record in caplog.records)
    assert "Kanarienvogel" not in caplog.text + response.text


def test_the_header_names_an_agent_in_utf8(place):
    """As its bytes come; the field may say the same."""
    place.open()
    name = "Plänerin 計画"
    reply = place.chat(user("x"), agent=name, headers={"X-Agent": name.encode()})
    assert name == reply["amem"]["agent"]
    assert [name] == place.engine.agents()
    refused = place.http.post(
        "/v1/chat/completions", json={"messages": [user("x")]}, headers={"X-Agent": b"Pl\xe4nerin"}
    )
    assert 400 == refused.status_code
    assert "UTF-8" in refused.json()["error"]["message"]
    assert [name] == place.engine.agents()
