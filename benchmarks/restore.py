"""A restore at real size without the real model: blocks of a geometry written, read back, loaded and attended to.

The payloads are random bits of the right shapes (finite scales), written by the store that agents use. Each sample is
measured beside two plain reads of the same files by as many threads in the same run: one that keeps the bytes
(``Path.read_bytes``), as a restore does, and one that streams them through a buffer of 1 MiB for each thread, which
stays in the processor's cache: a bound that nobody can reach who wants the bytes in memory. They take turns, with the
files in the page cache and after they were dropped from it. Dropping is a request to the kernel; the disk of a virtual
machine may have its own cache. Rates are of the bytes that were read; seconds of the processor are given as well, since
they do not depend on who else uses the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from amem.kv.attention import attend
from amem.kv.codec import GROUP, make_codec
from amem.kv.pool import Pool
from amem.kv.restore import RestoreBuffers
from amem.kv.run import BLOCK_GROUPS
from amem.kv.sequence import Buffers, SequenceState, StateLayout
from amem.model.geometry import PAPER_GEOMETRIES, geometry
from amem.store import BLOCK_TOKENS, AgentStore, BlockRecord, Realm, Store
from benchmarks.machine import machine

RESULT = Path(__file__).parent / "results" / "restore.json"
MOST_DISK = 10 * 10**9
MOST_MEMORY = 10 * 10**9
LEAST_RATIO = 0.7  #: of a restore's rate to that of a plain read that keeps the bytes
READERS = 2  #: threads that read blocks, as in the engine
KINDS = ("streamed", "plain", "restore")
_PIECE = 1 << 20


def payload(layout: StateLayout, block: int, random: np.random.Generator) -> Buffers:
    """Buffers of a block as `SequenceState.export_block` gives them: random codes, small finite scales."""
    out: dict[str, npt.NDArray[Any]] = {}
    for lane, group in enumerate(layout.spec.groups):
        for name, (dims, dtype) in layout.codec.part_shapes(layout.shape(lane)).items():
            shape = (len(group.layers), BLOCK_GROUPS, *dims)
            if dtype == mx.uint32:
                out[f"{lane}.{name}"] = random.integers(0, 2**32, shape, dtype=np.uint32)
            else:
                out[f"{lane}.{name}"] = random.standard_normal(shape, np.float32).astype(np.float16)
        if block == 0 and layout.codec.n_exact:
            for name, dim in (("k", group.k_dim), ("v", group.v_dim)):
                shape = (len(group.layers), group.n_kv_heads, layout.codec.n_exact, dim)
                # the upper half of a float32 is a bfloat16
                bits = random.standard_normal(shape, np.float32).view(np.uint32) >> 16
                out[f"{lane}.{name}.first"] = bits.astype(np.uint16)
    return out


def write(agent: AgentStore, layout: StateLayout, n_tokens: int, realm: Realm) -> tuple[list[BlockRecord], float]:
    """A chain of blocks, one at a time in memory; and the seconds that writing took."""
    random = np.random.default_rng(0)
    records: list[BlockRecord] = []
    seconds = 0.0
    for at in range(n_tokens // BLOCK_TOKENS):
        buffers = payload(layout, at, random)
        ids = np.full(BLOCK_TOKENS, at, np.int32)
        parent = records[-1].id if records else None
        started = time.perf_counter()
        records.append(agent.write_block(realm, parent, at * BLOCK_TOKENS, ids, buffers))
        seconds += time.perf_counter() - started
    return records, seconds


def streamed_read(paths: list[Path], buffers: list[bytearray]) -> int:
    """Read whole files, a thread for each of the buffers, which are used again and again; the bytes read."""

    def read(own: int) -> int:
        total = 0
        for path in paths[own :: len(buffers)]:
            with path.open("rb", buffering=0) as file:
                while n := file.readinto(buffers[own]):
                    total += n
        return total

    with ThreadPoolExecutor(len(buffers)) as readers:
        return sum(readers.map(read, range(len(buffers))))


def plain_read(paths: list[Path]) -> int:
    """Read whole files and keep them, a thread for each reader; the bytes read."""
    with ThreadPoolExecutor(READERS) as readers:
        return sum(map(len, list(readers.map(Path.read_bytes, paths))))


def drop_from_cache(paths: list[Path]) -> None:
    """Ask the kernel to forget the files' pages."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def restore(agent: AgentStore, layout: StateLayout, records: list[BlockRecord]) -> dict[str, float]:
    """What the engine does for an agent on disk, timed part by part; then one decode step's attention."""

    def read_block(stored: RestoreBuffers, at: int) -> int:
        targets = stored.block(at)
        agent.read_into(records[at], targets)
        return sum(target.nbytes for target in targets.values())

    cpu, started = time.process_time(), time.perf_counter()
    stored = RestoreBuffers(layout, len(records) * BLOCK_TOKENS)
    allocated = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        nbytes = sum(readers.map(partial(read_block, stored), range(len(records))))
    read = time.perf_counter()
    sequence = SequenceState(layout, Pool(1 << 40))
    sequence.adopt(stored, {})
    done, cpu_s = time.perf_counter(), time.process_time() - cpu
    del stored
    attention = decode_each_kind(sequence)
    sequence.release()
    return {
        "nbytes": nbytes,
        "allocate_s": allocated - started,
        "read_s": read - allocated,
        "adopt_s": done - read,
        "seconds": done - started,
        "cpu_s": cpu_s,
        **attention,
    }


def decode_each_kind(sequence: SequenceState) -> dict[str, float]:
    """Milliseconds of one token's attention in one layer of each kind, over all that is stored for it."""
    took: dict[str, float] = {}
    sequence.begin_step(1)
    dtype = sequence.layout.dtype
    for group in sequence.layout.spec.groups:
        q = mx.random.normal((group.n_q_heads, 1, group.k_dim)).astype(dtype)
        k = mx.random.normal((group.n_kv_heads, 1, group.k_dim)).astype(dtype)
        v = mx.random.normal((group.n_kv_heads, 1, group.v_dim)).astype(dtype)
        mx.eval(q, k, v)
        started = time.perf_counter()
        view = sequence.append(group.layers[0], k, v)
        out = attend(q, view, start=sequence.n_tokens, scale=group.k_dim**-0.5, codec=sequence.layout.codec)
        mx.eval(out)
        took[f"attention_{group.kind}_ms"] = (time.perf_counter() - started) * 1e3
        if not bool(mx.all(mx.isfinite(out)).item()):
            raise RuntimeError("attention over restored blocks is not finite")
    return took


def timed(job: Callable[[], int]) -> dict[str, float]:
    """Bytes and seconds of a job that gives its bytes."""
    cpu, started = time.process_time(), time.perf_counter()
    nbytes = job()
    return {"nbytes": nbytes, "seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}


def measure(name: str, n_tokens: int, codec: str, repeats: int, folder: Path) -> dict[str, Any]:
    """All samples of one geometry and length. Its files are deleted afterwards."""
    layout = StateLayout(geometry(name), make_codec(codec))
    root = Path(tempfile.mkdtemp(prefix="restore-", dir=folder))
    load_before = os.getloadavg()
    try:
        with Store(root) as store, store.open("bench") as agent:
            records, seconds = write(agent, layout, n_tokens, Realm("benchmark", codec))
            paths = [agent.root / f"{record.id}.safetensors" for record in records]
            buffers = [bytearray(b"." * _PIECE) for _ in range(READERS)]
            streamed_read(paths, buffers)
            restore(agent, layout, records)
            samples: dict[str, list[dict[str, float]]] = {}
            for _ in range(repeats):
                for cache in ("warm", "dropped"):
                    for kind, job in (
                        ("streamed", lambda: timed(lambda: streamed_read(paths, buffers))),
                        ("plain", lambda: timed(lambda: plain_read(paths))),
                        ("restore", lambda: restore(agent, layout, records)),
                    ):
                        if cache == "dropped":
                            drop_from_cache(paths)
                        gc.collect()
                        mx.clear_cache()
                        samples.setdefault(f"{kind}_{cache}", []).append(job())
            written = sum(record.nbytes for record in records)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {
        "geometry": name,
        "tokens": n_tokens,
        "codec": codec,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "file_bytes": written,
        "write_gb_per_s": written / seconds / 1e9,
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "medians": dict(_medians(samples)),
        "samples": samples,
    }


def _medians(samples: dict[str, list[dict[str, float]]]) -> Iterator[tuple[str, float]]:
    for cache in ("warm", "dropped"):
        rates = {
            (kind, clock): median(sample["nbytes"] / sample[clock] for sample in samples[f"{kind}_{cache}"])
            for kind in KINDS
            for clock in ("seconds", "cpu_s")
        }
        for kind in KINDS:
            yield f"{kind}_{cache}_gb_per_s", rates[kind, "seconds"] / 1e9
        yield f"restore_{cache}_ms", median(sample["seconds"] for sample in samples[f"restore_{cache}"]) * 1e3
        for kind in ("plain", "streamed"):
            yield f"restore_to_{kind}_{cache}", rates["restore", "seconds"] / rates[kind, "seconds"]
            yield f"restore_to_{kind}_{cache}_by_cpu", rates["restore", "cpu_s"] / rates[kind, "cpu_s"]
    for key in samples["restore_warm"][0]:
        if key.startswith("attention_"):
            yield key, median(s[key] for s in samples["restore_warm"] + samples["restore_dropped"])


def fits(name: str, n_tokens: int, codec: str, folder: Path) -> str:
    """An empty text, or why this length is left out: bytes on disk, and about twice as many in memory."""
    layout = StateLayout(geometry(name), make_codec(codec))
    blocks = n_tokens // BLOCK_TOKENS
    on_disk = sum(layout.spec.block_nbytes(codec).values()) * blocks
    if on_disk > min(MOST_DISK, shutil.disk_usage(folder).free // 2):
        return f"{on_disk / 1e9:.1f} GB of files are too many"
    if 2 * on_disk > MOST_MEMORY:
        return f"about {2 * on_disk / 1e9:.1f} GB of memory are too much"
    return ""


def main() -> None:
    """Measure, print a table, write the result file; rows of other geometries and lengths in it are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometries", nargs="+", default=list(PAPER_GEOMETRIES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--codec", default="q4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the blocks are put")
    parser.add_argument("--check", action="store_true", help=f"fail where a restore has less than {LEAST_RATIO:.0%}%")
    options = parser.parse_args()
    if min(options.contexts) < BLOCK_TOKENS or options.repeats < 1:
        parser.error(f"contexts have at least {BLOCK_TOKENS} tokens, and repeats at least 1")
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    slow = []
    for name in options.geometries:
        for n_tokens in options.contexts:
            why = fits(name, n_tokens, options.codec, options.folder)
            if why:
                left_out.append({"geometry": name, "tokens": n_tokens, "codec": options.codec, "why": why})
                print(f"{name:>24} {n_tokens:>6}: left out, {why}", flush=True)
                continue
            rows.append(measure(name, n_tokens, options.codec, options.repeats, options.folder))
            found = rows[-1]["medians"]
            for cache in ("warm", "dropped"):
                rates = ", ".join(f"{kind} {found[f'{kind}_{cache}_gb_per_s']:.2f}" for kind in KINDS)
                ratio, by_cpu = found[f"restore_to_plain_{cache}"], found[f"restore_to_plain_{cache}_by_cpu"]
                ms = found[f"restore_{cache}_ms"]
                print(
                    f"{name:>24} {n_tokens:>6} {cache:>8}: {rates} GB/s; restore to plain {ratio:.2f}, by processor "
                    f"time {by_cpu:.2f}; {ms:.0f} ms",
                    flush=True,
                )
                if ratio < LEAST_RATIO:
                    slow.append(f"{name}, {n_tokens} tokens, {cache}: {ratio:.2f}")
    write_result(rows, left_out)
    if options.check and slow:
        parser.exit(1, f"less than {LEAST_RATIO:.0%} of a plain read: {'; '.join(slow)}\n")


def write_result(rows: list[dict[str, Any]], left_out: list[dict[str, Any]]) -> None:
    """Write the result file. Rows that were not measured now are kept if they come from the same machine."""
    here = machine()
    known: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    same = all(known.get("machine", {}).get(key) == here[key] for key in ("platform", "processor", "cores", "versions"))
    kept = [row for row in known.get("rows", []) if "date" in row and _key(row) not in map(_key, rows)] if same else []
    skipped = [row for row in known.get("left_out", []) if _key(row) not in map(_key, [*rows, *left_out])]
    result = {
        "machine": here,
        "what": " ".join((__doc__ or "").split()),
        "note": "The machine was shared: see the load averages before and after each row. Plain and restored reads "
        "take turns, so that both meet the same load; still, take a difference of some percent as noise.",
        "readers": READERS,
        "group_tokens": GROUP,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "left_out": [*(skipped if same else []), *left_out],
        "rows": sorted([*kept, *rows], key=_key),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {RESULT}")


def _key(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["geometry"], row["tokens"], row.get("codec", "")


if __name__ == "__main__":
    main()
