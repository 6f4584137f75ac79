"""A number hidden in a speech of a thousand tokens and asked for at its end: how often it is found in each codec.

The answer is fed after the question, and counts as found if each of its digits is the likeliest token, which is what
greedy decoding would say. What lies before a needle is computed once for all needles at that depth. On two idle cores
the default run takes about half an hour; it goes on where it was interrupted. For the bundled model, whose chat markers
are written out here.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from amem.fidelity.replay import Logits, Replay, exact_layout
from amem.kv.backend import choose
from amem.kv.codec import codec_for
from amem.kv.pool import Pool
from amem.kv.sequence import SequenceState, StateLayout
from amem.model.load import load
from amem.run.checked import checked_spec
from amem.run.runner import Runner
from benchmarks.corpora import prose, sample
from benchmarks.fidelity import PAPER, Paper
from benchmarks.machine import machine

RESULT = Path(__file__).parent / "results" / "needle.json"
TOKENS = 1000
DEPTHS = (0.1, 0.5, 0.9)
FORMS = ("exact", "q4", "q4-affine", PAPER, "q3", "q2")
CITIES = "Lisbon Oslo Cairo Lima Quito Hanoi Delhi Tokyo Seoul Paris Rome Vienna Berlin Dublin Athens Tunis Accra"


class Stored:
    """The engine's caches in one codec; what is fed after `mark` can be taken back."""

    def __init__(self, runner: Runner, layout: StateLayout) -> None:
        self._runner = runner
        self._base = SequenceState(layout, Pool(1 << 60))

    def mark(self, token_ids: list[int]) -> None:
        Replay(self._runner, self._base).feed(token_ids)

    def after(self, token_ids: list[int]) -> Logits:
        twin = self._base.fork()
        try:
            return Replay(self._runner, twin).feed(token_ids)
        finally:
            twin.release()


class PaperStored:
    """The same in the paper's form."""

    def __init__(self, model: Any) -> None:
        self._fed = Paper(model)

    def mark(self, token_ids: list[int]) -> None:
        self._fed.feed(token_ids)

    def after(self, token_ids: list[int]) -> Logits:
        logits = self._fed.feed(token_ids)
        for cache in self._fed.caches:
            cache.trim(len(token_ids))
        return logits


def main() -> None:
    """Count what is found at each depth, and write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    backend = choose("auto").result()
    loaded = load("smollm2-135m")
    spec = checked_spec(loaded.model, loaded.fingerprint, backend=backend)
    runner = Runner(loaded.model, lambda: make_prompt_cache(loaded.model), backend)
    encode = loaded.tokenizer.encode
    [(_, haystack)] = sample(prose(), encode, TOKENS, 1)
    result: dict[str, Any] = {"rows": []}
    if options.result.exists():
        result = json.loads(options.result.read_text(encoding="utf-8"))
    done = {(row["form"], row["depth"]) for row in result["rows"]}
    for form in options.forms:
        for depth in DEPTHS:
            if (form, depth) in done:
                continue
            stored: Stored | PaperStored
            if form == PAPER:
                stored = PaperStored(loaded.model)
            else:
                layout = exact_layout(spec) if form == "exact" else StateLayout(spec, codec_for(form, spec))
                stored = Stored(runner, layout)
            found = search(stored, encode, haystack, int(depth * TOKENS))
            result["rows"].append({"form": form, "depth": depth, "needles": len(found), "found": sum(found)})
            print(f"{form:<10} at {depth:.0%}: {sum(found)} of {len(found)}", flush=True)
            what = " ".join((__doc__ or "").split("\n\n")[0].split())
            result |= {"machine": machine(), "what": what, "model": loaded.name, "tokens": TOKENS}
            options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def search(
    stored: Stored | PaperStored, encode: Callable[[str], list[int]], haystack: list[int], at: int
) -> list[bool]:
    """Whether each of the needles is found that are hidden, one at a time, at this place."""
    chosen = random.Random(0)
    stored.mark(encode("<|im_start|>user\nRead this text. You will be asked for a number in it.\n\n") + haystack[:at])
    found = []
    for city in CITIES.split():
        number = chosen.randrange(10_000, 100_000)
        told = encode(f"\n\nThe secret number of {city} is {number}.\n\n")
        asked = encode(
            f"\n\nWhat is the secret number of {city}?<|im_end|>\n<|im_start|>assistant\nThe secret number of {city} is"
        )
        answer = encode(f" {number}")
        logits = stored.after([*told, *haystack[at:], *asked, *answer[:-1]])
        found.append(bool((logits[-len(answer) :].argmax(axis=-1) == np.array(answer)).all()))
    return found


if __name__ == "__main__":
    main()
