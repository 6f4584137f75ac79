"""Many clients at once, some of which go away in the middle: nothing leaks, nothing is mixed up, the rest finish."""

import asyncio
import gc
import random
import threading
from pathlib import Path

import httpx

from tests.serve.conftest import LONG, assistant, user

N_CLIENTS, N_ROUNDS = 16, 2
FILES_OF_ONE = 8  # an open agent's lock and database, generously


class Client:
    """One client with its own conversation, whose words are in nobody else's."""

    def __init__(self, number, url, random_numbers):
        self.number, self.url, self.random = number, url, random_numbers
        self.messages = [user(f"Client {number}. {LONG}")]
        self.replies, self.n_gone, self.n_rounds = [], 0, N_ROUNDS

    async def run(self):
        async with httpx.AsyncClient(base_url=self.url, timeout=600) as http:
            while len(self.replies) < self.n_rounds:
                text = await self.ask(http, leave=self.random.random() < 0.4)
                if text is None:
                    self.n_gone += 1
                    continue
                self.replies.append(text)
                self.messages += [assistant(text), user(f"Client {self.number} goes on.")]
        return self

    async def ask(self, http, *, leave):
        """The text of a reply; None if the client went away before its end."""
        body = {"messages": self.messages, "max_tokens": 24, "stream": True, "temperature": 1.0, "seed": self.number}
        pieces, n_left = [], self.random.randrange(1, 12)
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert 200 == response.status_code
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return "".join(pieces)
                if line:
                    pieces.append(
                        httpx.Response(200, content=line[6:]).json()["choices"][0]["delta"].get("content", "")
                    )
                if leave and len(pieces) > n_left:
                    return None
        raise AssertionError("the stream ended without its end")


def counts(place):
    """What could leak: threads, open files, requests, sessions and bytes that are held."""
    gc.collect()
    status = place.engine.in_space("default/http").status()
    return {
        # the event loop's own pool of threads grows to its full size when it is needed, and stays
        "threads": sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate()),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "in flight": place.server._server.config.app._desk._n_taken,
        "sessions": len(status.agents),
    }


async def settled(place):
    """Wait until every request has ended, those of clients that went away too, and every connection is closed."""
    server = place.server._server
    async with asyncio.timeout(300):
        while server.config.app._desk._n_taken or server.server_state.connections:  # noqa: ASYNC110  # another loop's
            await asyncio.sleep(0.02)


def test_sixteen_streams_with_clients_that_go_away(place):
    """Each reply is what its conversation gets undisturbed, and what is held is what was kept."""
    place.open(limits={"sessions": 64})
    wanted = {number: alone(place, number) for number in (0, 7)}
    place.close()
    place.store = place.store.with_name("another store")
    place.open(limits={"sessions": 64})
    seeded = random.Random(1)
    clients = [Client(number, place.server.url, random.Random(seeded.random())) for number in range(N_CLIENTS)]

    async def run():
        await asyncio.gather(*(client.run() for client in clients))
        await settled(place)

    asyncio.run(run())
    n_gone = sum(client.n_gone for client in clients)
    assert n_gone >= 5
    after = counts(place)
    assert 0 == after["in flight"]
    # who went away as the last token came has a turn all the same, and asked again meanwhile, a fork besides
    assert N_CLIENTS <= after["sessions"] <= N_CLIENTS + n_gone
    inside = place.engine.in_space("default/http")
    complete = set()
    for name in inside.agents():  # no word of another conversation in any
        turns = inside.agent(name).turns
        speakers = {turn.prompt.split()[1].rstrip(".") for turn in turns}
        assert 1 == len(speakers), speakers
        client = clients[int(speakers.pop())]
        assert client.replies[: len(turns)] == [turn.reply for turn in turns]
        complete.add(client.number if len(turns) == N_ROUNDS else None)
    assert set(range(N_CLIENTS)) == complete - {None}
    assert N_CLIENTS == len({tuple(client.replies) for client in clients})  # so that a mix-up would be seen
    for number, replies in wanted.items():
        assert replies == clients[number].replies
    # a second wave on the same server: as many threads and files as after the first, apart from the new sessions' own
    for client in clients:
        client.n_rounds += 1
    asyncio.run(run())
    again = counts(place)
    n_more = again["sessions"] - after["sessions"]
    assert 0 <= n_more <= sum(client.n_gone for client in clients) - n_gone
    assert again["threads"] == after["threads"]
    assert again["files"] <= after["files"] + FILES_OF_ONE * n_more + 4
    assert place.engine.verify().clean
    for name in inside.agents():
        inside.agent(name).delete()
    pool = place.engine._parts.pool
    assert (0, pool.total) == (pool.used, pool.free)


def alone(place, number):
    """The replies that a client gets when nobody else asks and nobody goes away."""
    client = Client(number, place.server.url, random.Random(0))
    client.random.random = lambda: 1.0

    asyncio.run(client.run())
    return client.replies
