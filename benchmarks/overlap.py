"""Restores beside the work of others: what they take in total, and what of it a caller saw.

Three scenes, each measured with the overlap and without it in one run, on copies of one store whose agents are all on
disk: from the page cache, and after the files' pages were dropped (a request to the kernel; a virtual machine's disk
may have a cache of its own).

- *turns*: N agents are asked one after the other, in the order in which they were asked before, so that each one's
  restore can happen while the one before it is answered. Without overlap: ``prefetch=False``.
- *together*: N agents are asked at once. Without overlap: ``io_threads=0``, reads happen between two steps.
- *staggered*: B arrives while A decodes. B's time to first token with and without A, A's tokens with and without B.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from amem import Engine, Event, Reply
from amem.restoring import Restore
from benchmarks.machine import machine
from benchmarks.restore import drop_from_cache

RESULT = Path(__file__).parent / "results" / "overlap.json"
SENTENCE = "The crew checks the valves, writes the figures down and waits for the next tide before it goes on. "
QUESTION = "What did the crew do last, and what should it do next? Answer at length."


@contextmanager
def restores_timed() -> Iterator[list[dict[str, Any]]]:
    """Every restore's agent, and milliseconds: until its bytes were in, and in the owner thread."""
    seen: list[dict[str, Any]] = []
    load = Restore.load

    def timed(self: Restore) -> Any:
        sequence = load(self)
        if self.found.n_tokens:
            agent = self._session.name
            seen.append({"agent": agent, "read_ms": self.read_s * 1e3, "load_ms": self.load_s * 1e3})
        return sequence

    Restore.load = timed  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Restore.load = load  # type: ignore[method-assign]


class Bench:
    """A store with agents of long histories, and engines on copies of it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.options = options
        self._folder = folder
        self._count = itertools.count()
        self.names = [f"agent {i}" for i in range(max(options.agents))]
        with Engine(options.model, folder / "told") as engine:
            self.model = engine.status().model
            for name in self.names:
                message = f"You are {name}. " + SENTENCE * round(options.tokens / 20)
                engine.agent(name).ask(message, max_tokens=2)

    @contextmanager
    def engine(self, *, dropped: bool, **options: Any) -> Iterator[Engine]:
        """An engine on a copy of the store whose agents were not touched yet."""
        root = self._folder / str(next(self._count))
        shutil.copytree(self._folder / "told", root)
        try:
            with Engine(self.options.model, root, **options) as engine:
                engine.agent("first").ask("Hello.", max_tokens=4)  # the first steps allocate
                paths = list(root.glob("agents/*/*"))
                if dropped:
                    os.sync()
                    drop_from_cache(paths)
                else:
                    for path in paths:
                        path.read_bytes()
                yield engine
        finally:
            shutil.rmtree(root)

    # -- scenes

    def turns(self, n: int, *, dropped: bool, overlap: bool) -> dict[str, Any]:
        """N agents, one after the other."""
        with self.engine(dropped=dropped, prefetch=overlap) as engine, restores_timed() as restores:
            started = time.perf_counter()
            replies = [self._ask(engine, name) for name in self.names[:n]]
            total = time.perf_counter() - started
            prefetch = engine.status().prefetch
            return self._row(replies, restores[:], total) | {"prefetch": prefetch.to_dict() if prefetch else None}

    def together(self, n: int, *, dropped: bool, overlap: bool) -> dict[str, Any]:
        """N agents at once."""
        io_threads = 2 if overlap else 0
        with (
            self.engine(dropped=dropped, prefetch=False, io_threads=io_threads) as engine,
            restores_timed() as restores,
        ):
            started = time.perf_counter()
            replies = engine.ask_all(dict.fromkeys(self.names[:n], QUESTION), max_tokens=self.options.max_tokens)
            return self._row(list(replies.values()), restores[:], time.perf_counter() - started)

    def _ask(self, engine: Engine, name: str) -> Reply:
        return engine.agent(name).ask(QUESTION, max_tokens=self.options.max_tokens)

    def _row(self, replies: list[Reply], restores: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        asked = {reply.metrics.agent for reply in replies}  # the last one's successor may have been restored in vain
        totals = [each["read_ms"] + each["load_ms"] for each in restores if each["agent"] in asked]
        seen = [reply.metrics.restore_ms for reply in replies]
        return {
            "restore_total_ms": sum(totals),
            "restore_seen_ms": sum(seen),
            "restores": restores,
            "seen_ms": seen,
            "ttft_ms": [reply.metrics.ttft_ms for reply in replies],
            "reused_tokens": [reply.metrics.reused_tokens for reply in replies],
            "seconds": seconds,
        }

    def staggered(self, *, dropped: bool) -> dict[str, Any]:
        """B arrives while A decodes."""
        a, b = self.names[:2]
        n = 2 * self.options.max_tokens
        with self.engine(dropped=dropped, prefetch=False) as engine:
            b_alone = self._ask(engine, b).metrics.ttft_ms
        with self.engine(dropped=dropped, prefetch=False) as engine:
            a_alone = _gaps(engine.agent(a).stream(QUESTION, max_tokens=n))
        with self.engine(dropped=dropped, prefetch=False) as engine:
            streams: list[Any] = []

            def arrive(n_tokens: int) -> None:
                if n_tokens == n // 4:
                    streams.append(engine.agent(b).stream(QUESTION, max_tokens=self.options.max_tokens))

            a_with_b = _gaps(engine.agent(a).stream(QUESTION, max_tokens=n), arrive)
            reply = next(event.reply for event in streams[0] if event.reply is not None)
        return {
            "b_ttft_alone_ms": b_alone,
            "b_ttft_ms": reply.metrics.ttft_ms,
            "a_gaps_alone_ms": _percentiles(a_alone),
            "a_gaps_ms": _percentiles(a_with_b),
        }


def _gaps(events: Iterator[Event], each: Callable[[int], None] = lambda _: None) -> list[float]:
    """Milliseconds between the pieces of text that a caller got."""
    times: list[float] = []
    for event in events:
        if event.text:
            times.append(time.perf_counter())
            each(len(times))
    return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]


def _percentiles(samples: list[float]) -> dict[str, float]:
    names = ("p50", "p95", "p99", "max")
    return dict(zip(names, map(float, np.percentile(samples, [50, 95, 99, 100])), strict=True)) | {"n": len(samples)}


def main() -> None:
    """Measure, print a table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=int, default=1024, help="of each agent's history")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--model", help="default: the bundled one")
    parser.add_argument("--no-overlap", action="store_true", help="leave out the measurements with overlap")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    if max(options.agents) < 2:
        parser.error("the staggered scene needs two agents")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options)
        for scene, measure in (("turns", bench.turns), ("together", bench.together)):
            for n, dropped, overlap in itertools.product(options.agents, (False, True), (False, True)):
                if overlap and options.no_overlap:
                    continue
                where = {"scene": scene, "agents": n, "cache": "dropped" if dropped else "page", "overlap": overlap}
                rows.append(where | measure(n, dropped=dropped, overlap=overlap))
                found = rows[-1]
                total, seen = found["restore_total_ms"], found["restore_seen_ms"]
                print(
                    f"{scene:>9} {n:>2} agents, {where['cache']:>7}, overlap {overlap!s:>5}: restores {total:7.1f} ms, "
                    f"seen {seen:7.1f} ms, {found['seconds']:.1f} s",
                    flush=True,
                )
        staggered = {cache: bench.staggered(dropped=cache == "dropped") for cache in ("page", "dropped")}
        print(json.dumps(staggered, indent=1))
    result = {
        "machine": machine(),
        "model": bench.model,
        "what": " ".join((__doc__ or "").split()),
        "history_tokens": options.tokens,
        "max_tokens": options.max_tokens,
        "rows": rows,
        "staggered": staggered,
    }
    options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {options.result}")


if __name__ == "__main__":
    main()
