"""What each codec costs in fidelity: texts teacher-forced through the engine's caches, beside full precision.

Each document is fed to all codecs in lock step; a position's K and V are read back from their stored form. Full
precision is the same path with everything kept in the model's own dtype. The paper's form, in which a token sees even
its own group in 4 bits, is the model's stock cache with each key and value quantized on arrival. The floor is full
precision against itself in steps of 8 tokens, by the reference attention.

A row is added to the result file after each document, and documents that are in it already are not measured again: an
interrupted run goes on where it was. On two idle cores the default run takes about six hours, with
``--long-documents 0`` one hour; `--summary` only makes the statistics of the rows anew.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from amem.fidelity.compare import Apart, compare, greedy_divergence
from amem.fidelity.replay import CHUNK, Fed, Logits, Replay, exact_layout
from amem.fidelity.report import effective_bytes
from amem.kv.backend import Backend, choose
from amem.kv.codec import codec_for
from amem.kv.sequence import StateLayout
from amem.model import blas
from amem.model.capacity import capacity
from amem.model.load import LoadedModel, load
from amem.model.spec import CODECS, ModelCacheSpec
from amem.run.checked import checked_spec
from amem.run.threads import PREFILL
from benchmarks.corpora import Texts, code, prose, sample
from benchmarks.machine import machine

RESULT = Path(__file__).parent / "results" / "fidelity.json"
PAPER = "paper"  #: q4-affine without an exact own group
FLOOR = "exact, reference, steps of 8"
COMPARED = ("q4", "q4-affine", PAPER, "q3")  #: on every document
REST = ("q2", "q8", "fp16", FLOOR)  #: on the first documents only: they bound the others
BUCKETS = (0, 64, 256, 512, 768, 1024, 2048, 4096, 7168)
LONG = BUCKETS[-1]
GREEDY = 64
ROUNDS = 4
PAPER_GROUP = 64
_OTHER_CHUNK = 8


class PaperCache(KVCache):
    """mlx-lm's plain cache, with each key and value taken through 4 bits (groups of 64, 16-bit scales) on arrival."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched = super().update_and_fetch(_through_4_bits(keys), _through_4_bits(values))
        return cast("tuple[mx.array, mx.array]", fetched)


def _through_4_bits(x: mx.array) -> mx.array:
    codes, scales, biases = mx.quantize(x, group_size=PAPER_GROUP, bits=4)
    scales, biases = (array.astype(mx.float16).astype(x.dtype) for array in (scales, biases))
    return mx.dequantize(codes, scales, biases, group_size=PAPER_GROUP, bits=4)


class Paper:
    """A text fed to the model's stock caches in the paper's form."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.caches = [PaperCache() if type(cache) is KVCache else cache for cache in make_prompt_cache(model)]

    def feed(self, token_ids: Sequence[int]) -> Logits:
        """Logits ``[L, V]``, one row after each of the tokens."""
        blas.set_threads(PREFILL)
        logits = self._model(mx.array([list(token_ids)]), cache=self.caches)[0].astype(mx.float32)
        mx.eval(logits)
        return np.array(logits)


def forms(loaded: LoadedModel, spec: ModelCacheSpec, names: Sequence[str], backend: Backend) -> dict[str, Fed]:
    """An empty cache of each form."""
    found: dict[str, Fed] = {}
    model = loaded.model
    for name in names:
        if name == PAPER:
            found[name] = Paper(model)
        elif name == FLOOR:
            found[name] = Replay.fresh(model, exact_layout(spec), chunk=_OTHER_CHUNK)
        else:
            found[name] = Replay.fresh(model, StateLayout(spec, codec_for(name, spec)), backend=backend)
    return found


def measure(
    loaded: LoadedModel, spec: ModelCacheSpec, backend: Backend, token_ids: list[int], names: Sequence[str]
) -> dict[str, Any]:
    """One document through all forms: means, means by position, and where greedy decoding after it first differs."""
    exact = Replay.fresh(loaded.model, exact_layout(spec), backend=backend)
    others = forms(loaded, spec, names, backend)
    apart = compare(token_ids, exact, others)
    greedy = greedy_divergence(token_ids[-1], exact, others, GREEDY)
    return {
        name: found.summary().to_dict() | {"greedy_divergence": greedy[name], "by_position": by_position(found)}
        for name, found in apart.items()
    }


def by_position(found: Apart) -> list[dict[str, Any]]:
    """Means over the predictions that are made at positions ``start`` to ``stop - 1``."""
    rows = []
    for start, stop in pairwise(BUCKETS):
        if part := found[start:stop]:
            rows.append({"start": start, "stop": stop, **part.summary().to_dict()})
    return rows


def jobs(
    loaded: LoadedModel, options: argparse.Namespace, corpora: dict[str, Texts]
) -> Iterator[tuple[str, str, list[int], tuple[str, ...]]]:
    """(domain, document, token ids, forms); a part of each kind after the other, so that any beginning has all."""
    encode = loaded.tokenizer.encode
    short = {domain: sample(texts, encode, options.tokens, options.documents) for domain, texts in corpora.items()}
    long = {domain: sample(texts, encode, LONG, options.long_documents) for domain, texts in corpora.items()}
    for part in range(ROUNDS):
        for domain, n in (("prose", options.documents), ("code", options.documents // 2)):
            for i in range(n * part // ROUNDS, n * (part + 1) // ROUNDS):
                name, ids = short[domain][i]
                yield domain, name, ids, COMPARED + (REST if i < options.all_codecs else ())
        for i in range(options.long_documents * part // ROUNDS, options.long_documents * (part + 1) // ROUNDS):
            for domain in corpora:
                name, ids = long[domain][i]
                yield domain, name, ids, COMPARED


def main() -> None:
    """Measure what is missing, and write the result file after each document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--documents", type=int, default=32, help="of prose; half as many of code (default: 32)")
    parser.add_argument("--tokens", type=int, default=768, help="of each document (default: 768)")
    parser.add_argument("--all-codecs", type=int, default=6, help="documents of each kind that all codecs get")
    parser.add_argument("--long-documents", type=int, default=4, help=f"of {LONG} tokens, of each kind (default: 4)")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--summary", action="store_true", help="measure nothing")
    options = parser.parse_args()
    result: dict[str, Any] = {"rows": []}
    if options.result.exists():
        result = json.loads(options.result.read_text(encoding="utf-8"))
    if not options.summary:
        measure_missing(result, options)
    write(result, options.result)
    for line in tables(result["summary"]):
        print(line)


def measure_missing(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Add the rows that the result does not have yet."""
    loaded = load(options.model, progress=print)
    backend = choose("auto").result()
    spec = checked_spec(loaded.model, loaded.fingerprint, print, backend=backend)
    if result["rows"] and result["fingerprint"] != loaded.fingerprint:
        raise SystemExit(f"{options.result} is of another model: name another file with --result")
    result |= {
        "what": " ".join((__doc__ or "").split("\n\n")[0].split()),
        "model": loaded.name,
        "fingerprint": loaded.fingerprint,
        "dtype": spec.dtype,
        "chunk": CHUNK,
        "attention": backend.name,
        "greedy_tokens": GREEDY,
        "bytes": {name: sizes(spec, name) for name in (*CODECS, PAPER)},
    }
    done = {(row["domain"], row["document"], row["n_tokens"]) for row in result["rows"]}
    for domain, name, ids, names in jobs(loaded, options, {"prose": prose(), "code": code()}):
        if (domain, name, len(ids)) in done:
            continue
        started = time.perf_counter()
        found = measure(loaded, spec, backend, ids, names)
        seconds = time.perf_counter() - started
        result["rows"].append(
            {"domain": domain, "document": name, "n_tokens": len(ids), "seconds": seconds, "forms": found}
        )
        kl = ", ".join(f"{key} {value['kl_mean']:.5f}" for key, value in found.items())
        print(f"{domain} {name} {len(ids)} tokens, {seconds:.0f} s: KL {kl}", flush=True)
        mx.clear_cache()
        write(result, options.result)


def sizes(spec: ModelCacheSpec, form: str) -> dict[str, float]:
    """Bytes of an agent of 4096 tokens as a part of what FP16 takes for them: sealed, and with its open group."""
    codec = "q4-affine" if form == PAPER else form
    fp16 = sum(group.exact_nbytes(4096, "float16") for group in spec.groups)
    sealed = capacity(spec, memory_bytes=0, context=4096, codec=codec).sealed_nbytes / fp16
    return {"sealed": sealed, "effective_4k": sealed if form == PAPER else effective_bytes(spec, codec, 4096)}


def write(result: dict[str, Any], path: Path) -> None:
    """Write the result whole, with the statistics of its rows."""
    from benchmarks.fidelity_statistics import summary

    result["machine"] = machine()
    result["summary"] = summary(result["rows"])
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def tables(found: dict[str, Any]) -> Iterator[str]:
    """The summary as text."""
    for name, part in found.items():
        yield f"\n{name}: {part['documents']} documents"
        for form, row in part["forms"].items():
            low, high = row["kl_interval"] or (float("nan"), float("nan"))
            yield (
                f"  {form:<20} n={row['documents']:<3} KL {row['kl']:.6f} [{low:.6f}, {high:.6f}], perplexity "
                f"{row['perplexity_change']:+.2%}, top-1 {row['top1_agreement']:.1%}"
            )


if __name__ == "__main__":
    main()
