"""Which agent a request goes to: a named one, or the session that said most of it already."""

import itertools
import threading

import pytest

from amem import Match
from amem.serve.sessions import Sessions
from tests.serve.conftest import LONG, assistant, began, events_of, eventually, in_flight, text_of, user


def cached(reply):
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def said(reply):
    return assistant(reply["choices"][0]["message"]["content"])


def rounds(place, opening, n, **fields):
    """A conversation of some rounds; its messages, and the replies."""
    messages, replies = [user(opening)], []
    for _ in range(n):
        replies.append(place.chat(*messages, **fields))
        messages += [said(replies[-1]), user("Go on.")]
    return messages, replies


def test_a_conversation_that_grows_stays_in_its_session(place):
    """And computes only what is new."""
    place.open()
    _, replies = rounds(place, LONG, 4)
    assert 1 == len({reply["amem"]["agent"] for reply in replies})
    assert ["COLD", "EXTEND", "EXTEND", "EXTEND"] == [reply["amem"]["match"] for reply in replies]
    for before, after in itertools.pairwise(replies):
        assert before["usage"]["total_tokens"] == cached(after)
    assert 1 == len(place.sessions)


def test_conversations_that_grow_in_turn_do_not_disturb_one_another(place):
    """Two clients with one key."""
    place.open()
    one, two = [user(LONG + "One?")], [user("Two? " + LONG)]
    names = []
    for _ in range(3):
        for messages in (one, two):
            reply = place.chat(*messages)
            names.append(reply["amem"]["agent"])
            messages += [said(reply), user("Go on.")]
    assert names[0::2] == [names[0]] * 3
    assert names[1::2] == [names[1]] * 3
    assert names[0] != names[1]


def test_an_edited_past_goes_on_in_a_fork_that_shares_what_was_before(place):
    """The first conversation is as it was, and can still be continued."""
    place.open()
    messages, replies = rounds(place, LONG, 3)
    edited = [*messages[:2], user("Something else."), *messages[3:4], user("And then?")]
    reply = place.chat(*edited[:3])
    assert reply["amem"]["agent"] != replies[0]["amem"]["agent"]
    assert cached(reply) >= replies[0]["usage"]["total_tokens"] // 64 * 64
    first = place.chat(*messages)
    assert replies[0]["amem"]["agent"] == first["amem"]["agent"]
    assert replies[-1]["usage"]["total_tokens"] == cached(first)


def test_another_question_under_the_same_system_text_shares_its_tokens(place):
    """Not only whole turns are shared."""
    place.open()
    system = {"role": "system", "content": LONG + LONG}
    first = place.chat(system, user("One?"))
    second = place.chat(system, user("Two?"))
    assert 0 == cached(first)
    assert cached(second) >= 256
    assert first["amem"]["agent"] != second["amem"]["agent"]


def test_a_short_common_beginning_is_no_reason_for_a_fork(place):
    """Nothing of it could be reused."""
    place.open()
    for text in ("One?", "Two?"):
        reply = place.chat({"role": "system", "content": "Be brief."}, user(text))
        assert "COLD" == reply["amem"]["match"]
        assert "was" not in reply["amem"]["residency"]


def test_the_same_request_again_finds_its_turn(place):
    """A client that tries again leaves nothing behind, and gets the same greedy reply."""
    place.open()
    first, again = place.chat(user(LONG), max_tokens=9), place.chat(user(LONG), max_tokens=9)
    assert first["choices"][0]["message"] == again["choices"][0]["message"]
    assert "EXACT" == again["amem"]["match"]
    assert 1 == len(place.sessions)
    assert 1 == len(place.engine.in_space("default/http").agent(place.sessions[0]).tree())


ONE, TWO = "One? " * 20, "Two? " * 20


@pytest.mark.parametrize("text", [TWO, ONE], ids=["another question", "the same question"])
def test_a_busy_session_is_forked(place, held, text):
    """A second request is answered, whole, while the first still streams; both say what they say undisturbed."""
    place.open()
    messages, replies = rounds(place, LONG, 1)
    asked = messages[:-1]
    held.hold()
    client, lines = began(place, *asked, user(ONE))
    first = events_of([next(line for line in lines if line and text_of(events_of([line])))])
    second = place.chat(*asked, user(text), max_tokens=12)
    assert 1 == in_flight(place)  # the first was answering before, and still is
    held.let_go()
    first += events_of(lines)
    client.close()
    assert "stop" == first[-1]["choices"][0]["finish_reason"]
    assert replies[0]["amem"]["agent"] == first[-1]["amem"]["agent"] != second["amem"]["agent"]
    assert cached(second) >= replies[0]["usage"]["total_tokens"] // 64 * 64
    assert 2 == len(place.sessions)

    place.close()
    place.store = place.store.with_name("another store")
    place.open()
    assert messages[:-1] == rounds(place, LONG, 1)[0][:-1]
    n = first[-1]["amem"]["generated_tokens"]
    alone = place.chat(*asked, user(ONE), max_tokens=n)["choices"][0]["message"]["content"]
    assert alone.startswith(text_of(first))
    alone = place.chat(*asked, user(text), max_tokens=12)["choices"][0]["message"]["content"]
    assert alone == second["choices"][0]["message"]["content"]


def test_sessions_are_found_after_a_restart(place):
    """By another server on the same store; with the same replies as without it."""
    through, through_replies = rounds(place.open(space="through"), LONG, 3, max_tokens=9)
    messages = [user(LONG)]
    replies = []
    for _ in range(3):
        place.open(space="restarted")
        replies.append(place.chat(*messages, max_tokens=9))
        messages += [said(replies[-1]), user("Go on.")]
    assert through == messages
    assert [r["usage"]["total_tokens"] for r in replies[:-1]] == [cached(r) for r in replies[1:]]
    assert [cached(r) for r in through_replies] == [cached(r) for r in replies]
    assert 1 == len({reply["amem"]["agent"] for reply in replies})


def test_a_named_agent_is_shared_with_cells(place):
    """By a field, or by a header; both at once must agree."""
    place.open()
    reply = place.chat(user(LONG), agent="planner")
    assert "planner" == reply["amem"]["agent"]
    held = place.engine.agent("planner").status.n_tokens
    assert held == place.engine.agent("planner").ask("And you?", max_tokens=2).metrics.reused_tokens
    turns = place.engine.agent("planner").turns
    messages = [message for turn in turns for message in (user(turn.prompt), assistant(turn.reply))]
    by_header = place.chat(*messages, user("Next."), headers={"X-Agent": "planner"})
    assert "EXTEND" == by_header["amem"]["match"]
    assert place.engine.agent("planner").turns[-1].prompt == "Next."
    both = place.http.post("/v1/chat/completions", json={"messages": [user("x")], "agent": "planner"},
                           headers={"X-Agent": "critic"})  # fmt: skip
    assert 400 == both.status_code
    assert [] == place.sessions


def test_requests_to_one_named_agent_wait_for_one_another(place):
    """Each is a turn of its own."""
    place.open()
    threads = [
        threading.Thread(target=place.chat, args=(user(f"{i} {LONG}"),), kwargs={"agent": "planner"}) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 3 == len(place.engine.agent("planner").tree())
    assert ["planner"] == place.engine.agents()


def test_an_agent_that_another_process_writes_to_is_a_conflict(place):
    """The client is told who holds it."""
    from amem import Engine

    place.open()
    with Engine(place.model, place.store, memory="100MB") as other:
        other.agent("planner").ask("Hello.", max_tokens=1)
        response = place.http.post("/v1/chat/completions", json={"messages": [user("x")], "agent": "planner"})
    assert 409 == response.status_code
    assert "in use by" in response.json()["error"]["message"]


def test_a_session_that_another_server_took_over_is_left_to_it(place):
    """The conversation begins anew here."""
    from amem import Engine

    place.open(limits={"open_sessions": 1})
    messages, replies = rounds(place, LONG, 1)
    rounds(place, "other " + LONG, 1)  # the first one gives back its files
    with Engine(place.model, place.store, space="default/http", memory="100MB") as other:
        other.agent(replies[0]["amem"]["agent"])
        reply = place.chat(*messages)
    assert reply["amem"]["agent"] != replies[0]["amem"]["agent"]
    assert 0 == cached(reply)


def test_sessions_beyond_the_most_are_deleted_the_oldest_first(place):
    """With all that was stored of them."""
    place.open(limits={"sessions": 3})
    names = [place.chat(user(f"{i} {LONG}"))["amem"]["agent"] for i in range(5)]
    assert set(names[2:]) == set(place.sessions)


def test_sessions_beyond_the_open_ones_give_back_files_and_memory(place):
    """And are opened again when they are asked."""
    place.open(limits={"open_sessions": 2})
    conversations = [rounds(place, f"{i} {LONG}", 1) for i in range(4)]
    inside = place.engine.in_space("default/http")
    residencies = sorted(agent.residency for agent in inside.status().agents)
    assert ["hot", "hot", "warm", "warm"] == residencies
    messages, replies = conversations[0]
    assert replies[0]["usage"]["total_tokens"] == cached(place.chat(*messages))


@pytest.fixture
def sessions(place):
    """The rule alone, with a clock that the test sets."""
    place.open()
    now = [1000.0]

    class Clocked(Sessions):
        clock = now

    limits = place.server._server.config.app._desk.limits
    return place, Clocked(place.engine.in_space("elsewhere"), limits, lambda: now[0]), now


async def ask(sessions, messages):
    """One request, as the server makes it."""
    from amem.serve.desk import Wanted
    from amem.stream import events_of, queued_request

    wanted = Wanted({"max_tokens": 2}, messages)
    marks = wanted.marks(sessions.engine)
    async with sessions.place(marks) as session:
        request = await queued_request(wanted.submit(sessions.engine, session.name))
        async for event in events_of(request):
            reply = event.reply
        sessions.record(session, marks, wanted.marks(sessions.engine, reply.text), reply.turn)
    return session, reply


def test_idle_sessions_expire_and_used_ones_do_not(sessions):
    """Their agents are deleted; the time counts from their last use."""
    import asyncio

    _, rule, now = sessions
    day = 24 * 3600

    async def run():
        one, reply = await ask(rule, [user("One " + LONG)])
        two, _ = await ask(rule, [user("Two " + LONG)])
        now[0] += day - 1
        assert 0 == await rule.expire()
        await ask(rule, [user("One " + LONG), assistant(reply.text), user("Go on.")])
        now[0] += 2
        assert 1 == await rule.expire()
        assert [one.name] == rule.engine.agents()
        again, reply = await ask(rule, [user("Two " + LONG)])
        assert Match.COLD is reply.metrics.match
        assert again.name != two.name
        now[0] += day
        assert 2 == await rule.expire()

    asyncio.run(run())
    assert [] == rule.engine.agents()
    assert 0 == len(rule)
    assert {} == rule._index


def test_sessions_of_an_earlier_server_expire_though_nobody_asks(place):
    """Of every key."""
    keys = ["sk-own", "alice:sk-a"]
    place.open(keys=keys)
    for key in ("sk-own", "sk-a"):
        place.chat(user(LONG), headers={"Authorization": f"Bearer {key}"})
    spaces = ("default/http", "default/alice/http")
    assert [1, 1] == [len(place.engine.in_space(space).agents()) for space in spaces]
    place.open(keys=keys, limits={"idle_s": 0.2})
    eventually(lambda: all([] == place.engine.in_space(space).agents() for space in spaces))


def test_a_session_in_use_does_not_expire(sessions):
    """However long it takes."""
    import asyncio

    _, rule, now = sessions

    async def run():
        _, reply = await ask(rule, [user(LONG)])
        marks = [*_marks(rule, [user(LONG), assistant(reply.text), user("Go on.")])]
        async with rule.place(marks) as session:
            now[0] += 10 * 24 * 3600
            assert 0 == await rule.expire()
        assert [session.name] == rule.engine.agents()

    asyncio.run(run())


def _marks(rule, messages):
    from amem.serve.marks import marks_of

    return marks_of(messages, (), rule.engine.said)


def test_a_request_that_failed_leaves_no_session(sessions):
    """Neither a new one nor a fork."""
    import asyncio

    _, rule, _ = sessions

    async def run():
        for messages in ([user("One " + LONG)], [user(LONG), assistant("Made up."), user("Go on.")]):
            with pytest.raises(RuntimeError):
                async with rule.place(_marks(rule, messages)):
                    raise RuntimeError
            assert len(rule.engine.agents()) == len(rule)
            await ask(rule, [user(LONG)])
        assert 1 == len(rule)

    asyncio.run(run())
    assert 1 == len(rule.engine.agents())
