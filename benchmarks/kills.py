"""Kill a process that talks to agents, again and again, and look whether anything that was saved is lost.

A child opens an engine on a tiny random model and goes on with two agents' conversations, both in one batch. It is
ended by SIGKILL: at a random instant, or when a named step of a commit is passed for a random time. After every kill
the store is verified, every turn that the child told of must be there, and text and tokens of all turns must be those
of an engine that nothing happened to. The next child goes on from there: so each continuation is checked as well.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mlx_lm.models.llama  # noqa: F401  # children are forked from a server that has loaded what they need
import transformers  # noqa: F401

from amem import Engine
from amem.store import Store, faults, verify
from amem.store.records import Realm

AGENTS = ("planner", "critic")
#: A turn that seals blocks, one inside a block, one that crosses groups, and so on: lengths decide what is written.
MESSAGES = ("many words " * 60, "And then?", "some more words " * 20, "Go on. " * 9, "The end.")
MAX_TOKENS = 8
SPACE = "soak"

Said = dict[str, list[tuple[str, list[int]]]]  #: of each agent the text and the token ids of each turn


@dataclass
class Report:
    """What was done, and what was found after it."""

    kills: Counter[str] = field(default_factory=Counter)  #: at a random instant, or at which step
    survived: int = 0
    conversations: int = 0
    turns_cut_off: int = 0  #: turns in progress that a kill ended: they were never told of
    failures: list[str] = field(default_factory=list)

    @property
    def n_kills(self) -> int:
        return sum(self.kills.values())


def talk(told: Connection, model: str, root: str, point: str | None, nth: int) -> None:
    """Go on with the conversations and tell of each turn; end by SIGKILL when a step is passed the nth time."""
    passed = 0

    def hook(reached: str) -> None:
        nonlocal passed
        passed += reached == point
        if passed == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    with Engine(model, root, space=SPACE, memory="200MB") as engine:
        agents = [engine.agent(name) for name in AGENTS]
        faults.hook = hook if point is not None else None
        told.send([len(agent.turns) for agent in agents])
        while True:
            wanted = {agent.name: MESSAGES[len(agent.turns)] for agent in agents if len(agent.turns) < len(MESSAGES)}
            if not wanted:
                return
            engine.ask_all(wanted, max_tokens=MAX_TOKENS)
            told.send([len(agent.turns) for agent in agents])


def said(root: Path) -> tuple[Said, list[str]]:
    """What a store holds, read without a model; and the problems that it has."""
    found: Said = {}
    with Store(root) as store:
        problems = [*verify(store).problems, *verify(store).skipped]
        for name in AGENTS:
            with contextlib.suppress(Exception), store.open(name, SPACE, create=False) as agent:
                path = agent.path(agent.head) if agent.head is not None else []
                records = [agent.realization(turn, _realm(agent.realms(turn))) for turn in path]
                found[name] = [
                    (agent.turn(turn).reply, record.token_ids.tolist() if record is not None else [])
                    for turn, record in zip(path, records, strict=True)
                ]
        problems += store.reports
    return found, problems


def _realm(realms: list[Realm]) -> Realm:
    (realm,) = realms
    return realm


class Soak:
    """One run: a model's folder, a place for stores, and a source of chance."""

    def __init__(self, model: Path, scratch: Path, seed: int) -> None:
        self._model = model
        self._scratch = scratch
        self._chance = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self.report = Report()

    def run(self, n_kills: int, after_each: Callable[[Report], None] = lambda _: None) -> Report:
        """Conversations from their start to their end, until so many children were killed."""
        whole, seconds = self._undisturbed()
        while self.report.n_kills < n_kills and not self.report.failures:
            self._conversation(whole, seconds, n_kills)
            self.report.conversations += 1
            after_each(self.report)
        return self.report

    def _undisturbed(self) -> tuple[Said, float]:
        """What is said where nothing happens, and how long a turn of both agents takes."""
        root = self._scratch / "undisturbed"
        child, told = self._start(root, None, 0)
        times = []
        with contextlib.suppress(EOFError):
            while told.recv():
                times.append(time.monotonic())
        child.join()
        found, problems = said(root)
        if child.exitcode or problems or [len(MESSAGES)] * len(AGENTS) != [len(found[name]) for name in AGENTS]:
            raise RuntimeError(f"the undisturbed run failed: {problems}")
        return found, (times[-1] - times[0]) / len(MESSAGES)

    def _start(self, root: Path, point: str | None, nth: int) -> tuple[Any, Connection]:
        mine, its = self._context.Pipe(duplex=False)
        child = self._context.Process(target=talk, args=(its, str(self._model), str(root), point, nth))
        child.start()
        its.close()
        return child, mine

    def _conversation(self, whole: Said, seconds: float, n_kills: int) -> None:
        root = self._scratch / "store"
        shutil.rmtree(root, ignore_errors=True)
        ended = False
        while not ended and not self.report.failures:
            killing = self.report.n_kills < n_kills
            point = self._chance.choice(faults.POINTS) if killing and self._chance.random() < 0.5 else None
            child, told = self._start(root, point, self._chance.randint(1, 4))
            turns = self._listen(child, told, seconds if killing and point is None else None)
            child.join()
            ended = child.exitcode == 0
            if not ended:
                self.report.kills[point or "a random instant"] += 1
            self._look(root, whole, turns, child.exitcode, ended=ended)

    def _listen(self, child: Any, told: Connection, seconds: float | None) -> list[int]:
        """The turns of each agent that a child told of; with ``seconds`` of a turn it is killed at some instant."""
        turns = [0] * len(AGENTS)
        deadline = None
        with contextlib.suppress(EOFError):
            while True:
                if deadline is not None and not told.poll(max(0.0, deadline - time.monotonic())):
                    child.kill()
                    deadline = None
                turns = told.recv()
                if seconds is not None and deadline is None:
                    deadline = time.monotonic() + self._chance.uniform(0, 2 * seconds)
                    seconds = None
        return turns

    def _look(self, root: Path, whole: Said, turns: list[int], exitcode: int, *, ended: bool) -> None:
        """Compare a store with what it must hold."""
        problems = [] if exitcode in (0, -signal.SIGKILL) else [f"the child ended with {exitcode}"]
        found, more = said(root)
        problems += more
        for name, n_told in zip(AGENTS, turns, strict=True):
            mine = found.get(name, [])
            if mine != whole[name][: len(mine)]:
                problems.append(f"{name}: {len(mine)} turns are not those of the undisturbed run")
            if len(mine) < n_told or (ended and len(mine) < len(MESSAGES)):
                problems.append(f"{name}: {n_told} turns were told of, {len(mine)} are there")
            self.report.turns_cut_off += not ended and len(mine) == n_told
        if problems:
            self.report.failures.append("; ".join(problems))
        elif not ended:
            self.report.survived += 1
