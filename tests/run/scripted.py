"""A scheduler without a model: requests that take real room of a real pool, and a runner that counts its steps."""

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from amem.errors import MemoryBudgetError
from amem.results import Event
from amem.run.request import Request
from amem.run.residency import make_room

EOS = 1


@dataclass
class Sequence:
    """Counts tokens where a real one would hold them."""

    agent: "Agent"
    n_tokens: int = 0
    recurrent: bool = False

    def checkpoint(self):
        return self.n_tokens

    def rollback(self, point):
        self.n_tokens = point
        return not self.recurrent

    def cut(self, n_tokens):
        return n_tokens == self.n_tokens


@dataclass
class Agent:
    """A resident: what it held at its last turn's end, and whether it may go."""

    name: str
    machine: "Machine"
    pinned: bool = False
    last_used: int = 0
    n_tokens: int = 0
    held: object = None
    n_evicted: int = 0

    @property
    def is_running(self):
        return self.machine.scheduler.is_running(self)

    @property
    def hot_bytes(self):
        return self.held.nbytes if self.held is not None else 0

    def evict(self):
        assert not self.pinned
        assert not self.is_running
        if self.held is not None:
            self.held.release()
            self.n_evicted += 1
        self.held = None


class Text:
    """Every token is a letter."""

    def __init__(self):
        self.text = ""
        self.n_kept = 0
        self.tail_ids = ()
        self.stopped = False

    def add(self, token_id):
        self.text += chr(97 + token_id % 26)
        self.n_kept += 1
        return self.text[-1]

    def finish(self):
        return ""


@dataclass
class Work:
    """A turn: an agent's tokens so far are read from disk unless they are held, its room is a byte a token."""

    agent: Agent
    n_prompt: int
    reading: Future = None
    room: object = None
    aborted: int = 0

    def match(self, request):
        self.agent.last_used = next(self.agent.machine.ticks)
        request.prompt_ids = [7] * (self.agent.n_tokens + self.n_prompt)

    def reserve(self, request):
        agent, pool = self.agent, self.agent.machine.pool
        if agent.held is not None:
            agent.held.release()  # its own older state is in the way, or part of what it needs
            agent.held = None
        nbytes = len(request.prompt_ids) + request.max_tokens
        if not make_room(pool, nbytes, agent.machine.agents, [agent]):
            return False
        self.room = pool.allocate(nbytes)
        request.reading = self.reading
        return True

    def no_room(self, request):
        return MemoryBudgetError(f"{self.agent.name} does not fit")

    def load(self, request):
        if request.reading is not None:
            request.reading.result()
        request.n_reused = self.agent.n_tokens
        request.sequence = Sequence(self.agent, self.agent.n_tokens)
        request.checkpoint = request.sequence.checkpoint()

    def answering(self, request):
        assert 1 == len(request.generated)

    def progress(self, request):
        pass

    def commit(self, request):
        agent = self.agent
        assert request.sequence.n_tokens == len(request.prompt_ids) + request.n_kept
        agent.n_tokens = request.sequence.n_tokens
        self.room.release()
        self.room = None
        agent.held = agent.machine.pool.allocate(agent.n_tokens)
        return request.text.text

    def abort(self, request):
        self.aborted += 1
        request.sequence = None
        if self.room is not None:
            self.room.release()
            self.room = None


@dataclass
class Chunk:
    """A chunk that needs some slices."""

    machine: "Machine"
    n_slices: int
    seconds: float = 0.0

    def advance(self, seconds):
        self.machine.log.append("prefill")
        self.machine.waits.append(seconds)
        self.n_slices -= 1
        self.seconds += 0.1
        return self.n_slices <= 0


@dataclass
class Machine:
    """The runner, the pool, and what happened."""

    pool: object = None
    slices: int = 1
    agents: list = field(default_factory=list)
    log: list = field(default_factory=list)  #: "prefill", or the names of a decode step's agents
    waits: list = field(default_factory=list)  #: seconds that each slice of prefill was given
    fails: object = None  #: names -> an error to raise in a decode step, or None
    scheduler: object = None
    ticks: object = field(default_factory=lambda: itertools.count(1))

    def prefill(self, sequence, token_ids):
        sequence.n_tokens += len(token_ids)
        return Chunk(self, self.slices)

    def decode(self, sequences, token_ids):
        names = [sequence.agent.name for sequence in sequences]
        for sequence in sequences:
            sequence.n_tokens += 1  # also where the step fails then
        if self.fails is not None and (error := self.fails(names)):
            raise error
        self.log.append(names)
        return np.zeros((len(names), 4))

    def agent(self, name, **options):
        self.agents.append(Agent(name, self, **options))
        return self.agents[-1]

    def ask(self, agent, n_prompt=10, max_tokens=5, sample=None, reading=None):
        """Queue a request."""
        tokens = itertools.count(2)
        request = Request(
            work=Work(agent, n_prompt, reading),
            sample=sample or (lambda logits: np.array(next(tokens))),
            text=Text(),
            max_tokens=max_tokens,
            eos_token_ids=frozenset([EOS]),
            group=agent,
        )
        self.scheduler.submit(request)
        return request

    def run(self, limit=10_000):
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.busy:
                return
            self.scheduler.step()
        raise AssertionError("the scheduler does not come to an end")


def ending(request):
    """What the caller got last: a reply, or an error. Exactly one of them ends a request."""
    ends = []
    while (event := request.events.get_nowait()) is not None:
        if isinstance(event, BaseException):
            ends.append(event)
        elif isinstance(event, Event) and event.reply is not None:
            ends.append(event.reply)
    assert len(ends) == 1, ends
    return ends[0]
