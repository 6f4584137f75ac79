"""An engine that says what it was told to say: everything above the engine is tested in milliseconds with it.

It keeps turns, heads and residency as the real one does, takes the same calls, and raises the same errors. A test
enqueues replies, errors and interrupts; without one an agent repeats its prompt.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from amem.errors import AgentLocked, Cancelled, InputError, ModelError, UnknownTurn
from amem.fidelity.figures import Fidelity, Receipt, ReplayCost
from amem.model.capacity import CapacityRow
from amem.results import (
    AgentStatus,
    BlockInfo,
    BlockMap,
    EngineStatus,
    Event,
    LayerBlocks,
    Match,
    Reply,
    ReplyMetrics,
    Residency,
    TurnInfo,
)
from amem.store import VerifyReport

MODEL = "scripted-1m"
BYTES_PER_TOKEN = 100


@dataclass
class Line:
    """One enqueued reply: its pieces, and what goes wrong before a piece of that number."""

    pieces: tuple[str, ...]
    error: BaseException | None = None
    error_at: int = 0
    delay_s: float = 0.0
    changes: dict = field(default_factory=dict)


class Script:
    """What the engines of this process will say and what they were asked."""

    def __init__(self):
        self.lines = deque()
        self.asked = []
        self.batches = []  # names of agents that were asked together
        self.opened = []
        self.problems = []  # what verify finds
        self.locked = set()  # names of agents that another kernel has
        self.spaces = {}  # cell ids by space, of agents that other notebooks have made

    def enqueue(self, *pieces, error=None, error_at=0, delay_s=0.0, **changes):
        """Say this next; `changes` are put into its metrics."""
        self.lines.append(Line(pieces, error, error_at, delay_s, changes))

    def next(self, prompt):
        return self.lines.popleft() if self.lines else Line((f"You said: {prompt}",))


script = Script()


def metrics(agent="planner", **changes):
    """Plausible metrics."""
    base = ReplyMetrics(
        agent=agent, model=MODEL, codec="q4", match=Match.EXTEND, residency=Residency.WARM, prompt_tokens=540,
        reused_tokens=512, computed_tokens=28, generated_tokens=40, ttft_ms=180.5, queue_ms=0.2, match_ms=0.8,
        restore_ms=12.5, prefill_ms=140.0, first_decode_ms=27.0, decode_ms=350.0, commit_ms=4.0,
        tokens_per_second=111.4, hot_bytes=1_200_000, disk_bytes=3_400_000, bytes_written=34_200, saved=True,
        blocks=blocks(580, new_from=540),
    )  # fmt: skip
    return replace(base, **changes)


def blocks(n_tokens, new_from=None, residency=Residency.HOT, shared_before=0):
    """The blocks of a history."""
    found = []
    for index, start in enumerate(range(0, n_tokens, 256)):
        n = min(256, n_tokens - start)
        found.append(
            BlockInfo(
                index,
                start,
                n,
                "sealed" if n == 256 else "tail",
                residency,
                start < shared_before,
                new_from is not None and start + n > new_from,
                n * BYTES_PER_TOKEN,
            )
        )  # fmt: skip
    return tuple(found)


def reply(text="One, two, three.", agent="planner", **changes):
    """A plausible reply."""
    return Reply(text, tuple(range(len(text.split()))), "stop", metrics(agent, **changes), 3)


class ScriptedStream:
    """The events of one request, which another thread may cancel."""

    def __init__(self, agent, message, cell_id, line):
        self._cancelled = threading.Event()
        self._events = agent.events(message, cell_id, line, self._cancelled)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._events)

    def cancel(self):
        self._cancelled.set()

    def close(self):
        self._events.close()


class ScriptedAgent:
    def __init__(self, engine, name):
        self.engine = engine
        self.name = name

    @property
    def state(self):
        return self.engine.states[self.name]

    @property
    def turns(self):
        return [turn for turn in self.tree() if turn.on_head_path]

    def tree(self):
        path = self.state.path()
        return [replace(turn, on_head_path=turn.id in path) for turn in self.state.turns.values()]

    @property
    def status(self):
        state, n_tokens = self.state, self.state.n_tokens
        hot = n_tokens * BYTES_PER_TOKEN if state.residency is Residency.HOT else 0
        return AgentStatus(
            self.name, self.engine.space, state.residency, n_tokens, len(state.path()), hot,
            n_tokens * BYTES_PER_TOKEN, state.last_ttft_ms, state.pinned, saved=True,
        )  # fmt: skip

    def stream(self, message, *, max_tokens=512, temperature=0.0, top_p=1.0, seed=None, stop=(), system=None,
               append=False, cached=False, cell_id=None, execution=None):  # fmt: skip
        asked = {key: value for key, value in locals().items() if key != "self"}
        script.asked.append({"agent": self.name, **asked})
        if not message.strip():
            raise InputError("the message is empty: write what you want to say to the agent.")
        return ScriptedStream(self, message, cell_id, script.next(message))

    def events(self, message, cell_id, line, cancelled):
        if line.error is not None and line.error_at == 0:
            raise line.error
        yield Event(stage="prefill", done=64, total=128)
        try:
            for i, piece in enumerate(line.pieces):
                if cancelled.wait(line.delay_s):
                    self.engine.n_cancelled += 1
                    raise Cancelled("the request was cancelled; its agent is as it was before.")
                if line.error is not None and i == line.error_at:
                    raise line.error
                self.state.n_coming += 3
                yield Event(text=piece)
        except GeneratorExit:
            self.engine.n_cancelled += 1
            raise
        finally:
            self.state.n_coming = 0
        text = "".join(line.pieces)
        turn = self.state.add(message, text, cell_id)
        n = self.state.n_tokens
        found = metrics(self.name, **{"blocks": blocks(n, new_from=n - 1), **line.changes})
        self.state.last_ttft_ms = found.ttft_ms
        yield Event(reply=Reply(text, tuple(range(len(line.pieces))), "stop", found, turn))

    def block_map(self):
        state = self.state
        n = state.n_tokens + state.n_coming
        layers = (LayerBlocks("layers 0-29, full attention, q4", 30, blocks(n, residency=state.residency)),)
        return BlockMap(self.name, "q4", n, layers, tuple(f"text of stretch {i}" for i in range((n + 255) // 256)))

    def rewind(self, turns=1, *, to=None):
        if to is not None:
            self.checkout(to)
            return
        path = self.state.path()
        if turns > len(path):
            raise InputError(f"agent {self.name!r} has {len(path)} turns, so {turns} cannot be taken back.")
        self.state.head = self.state.turns[path[-turns]].parent

    @property
    def snapshots(self):
        return dict(self.state.snapshots)

    def snapshot(self, name, *, at=None):
        self.state.snapshots[name] = self.state.head if at is None else at
        return self.state.snapshots[name]

    def forget_snapshot(self, name):
        if name not in self.state.snapshots:
            raise UnknownTurn(f"agent {self.name!r} has no snapshot {name!r}.")
        del self.state.snapshots[name]

    def why(self):
        return "The cell of turn 3 was edited."

    def checkout(self, turn):
        turn = self.state.snapshots.get(turn, turn)
        if turn not in self.state.turns:
            raise UnknownTurn(f"agent {self.name!r} has no turn {turn}.")
        self.state.head = turn

    def fork(self, name, *, at=None, keep_last=None, **how):
        assert how.get("replace") or name not in self.engine.states
        state = self.engine.states[name] = AgentState()
        state.turns = dict(self.state.turns)
        if keep_last is not None:
            first, *_ = kept = self.state.path()[-keep_last:]
            state.turns = {turn: self.state.turns[turn] for turn in kept}
            state.turns[first] = replace(state.turns[first], parent=None)
        state.head = self.state.head if at is None else at
        state.residency = self.state.residency
        return ScriptedAgent(self.engine, name)

    def evict(self):
        self.state.residency = Residency.WARM

    def restore(self, *, background=False):
        self.state.residency = Residency.HOT

    def pin(self):
        self.state.pinned = True

    def unpin(self):
        self.state.pinned = False

    def fidelity(self, n_tokens=128, progress=None):
        if not self.state.n_tokens:
            raise InputError(f"agent {self.name!r} has 0 tokens in stored form")
        cost = ReplayCost(self.name, self.state.n_tokens - n_tokens, n_tokens, 31_000_000, 12.0)
        progress(str(cost))
        self.engine.receipts.append(n_tokens)
        if "interrupt" in self.name:
            raise KeyboardInterrupt
        found = Fidelity(n_tokens - 1, 0.00213, 0.0187, 3.003, 3.0, 0.974)
        return Receipt(self.name, "q4", cost.n_history, n_tokens, found, 11.2)

    def export(self, file):
        if Path(file).exists():
            raise InputError(f"{file} exists already; choose another file name")
        return Path(file).write_bytes(b"x" * 1500)

    def delete(self):
        del self.engine.states[self.name]


class AgentState:
    ids = count(1)

    def __init__(self):
        self.turns = {}
        self.snapshots = {}
        self.head = None
        self.n_coming = 0  # tokens of the request that runs
        self.residency = Residency.EMPTY
        self.pinned = False
        self.last_ttft_ms = None

    def path(self):
        path, at = [], self.head
        while at is not None:
            path.insert(0, at)
            at = self.turns[at].parent
        return path

    @property
    def n_tokens(self):
        return self.turns[self.head].n_tokens if self.head is not None else 0

    def add(self, prompt, text, cell_id):
        turn = next(self.ids)
        n = self.n_tokens + 200
        self.turns[turn] = TurnInfo(turn, self.head, prompt, text, "stop", 0.0, cell_id, True, n)
        self.head = turn
        self.residency = Residency.HOT
        return turn


class ScriptedEngine:
    def __init__(self, settings=None, progress=None, asked=()):
        for name in script.locked.intersection(asked):
            raise AgentLocked(f"agent {name!r} is in use by process 1; close it there first")
        model = getattr(settings, "model", None) or MODEL
        if "missing" in model:
            raise ModelError(f"there is no model {model!r}.")
        if "endless" in model:
            raise KeyboardInterrupt
        self.model = model
        self.settings = settings
        self.space = getattr(settings, "space", "default")
        self.states = {}
        self.n_cancelled = 0
        self.receipts = []
        self.is_closed = False
        if progress is not None:
            progress(f"reading {model}")
        script.opened.append(self)

    def agent(self, name, *, create=True):
        self.states.setdefault(name, AgentState())
        return ScriptedAgent(self, name)

    def agents(self):
        return sorted(self.states)

    def stream_all(self, messages, **options):
        script.batches.append(tuple(messages))
        return {name: self.agent(name).stream(message, **options) for name, message in messages.items()}

    def status(self):
        agents = tuple(self.agent(name).status for name in self.agents())
        hot = sum(agent.hot_bytes for agent in agents)
        return EngineStatus(
            model=self.model, model_path="/models/scripted", fingerprint="f1", codec="q4", attention="reference",
            device="cpu", blas="OpenBLAS 0.3.30", context_length=8192, memory_budget=4_000_000_000, hot_bytes=hot,
            peak_hot_bytes=hot, disk_quota=10_000_000_000, disk_bytes=sum(a.disk_bytes for a in agents),
            bytes_written=0, store="/tmp/store", space=self.space, agents=agents,
        )  # fmt: skip

    def verify(self, *, repair=False):
        problems = [] if repair else list(script.problems)
        return VerifyReport(len(self.states), 3, 1, 34_200, problems, False, [])

    def capacity(self, contexts=()):
        return [
            CapacityRow(
                self.model, n, "q4", 4_000_000_000, n * 90, n * BYTES_PER_TOKEN, 0, 4_000_000_000 // (n * 100), 0, 0
            )
            for n in contexts or (4096,)
        ]

    def import_agent(self, file, name=None):
        if not Path(file).exists():
            raise InputError(f"there is no file {file}")
        name = name or Path(file).stem
        if name in self.states:
            raise InputError(f"there is an agent {name!r} already: give this one another name (--as NAME)")
        state = self.states[name] = AgentState()
        state.add("Hello", "You said: Hello", None)
        return ScriptedAgent(self, name)

    def spaces(self):
        return list(script.spaces)

    def cell_ids(self, space):
        return script.spaces[space]

    def adopt(self, space):
        del script.spaces[space]
        self.agent("planner").state.add("Hello", "You said: Hello", None)
        return ["planner"]

    def close(self):
        self.is_closed = True


def install():
    """Let the notebook layer of this process open scripted engines."""
    from amem_jupyter import session

    session.open_engine = ScriptedEngine
