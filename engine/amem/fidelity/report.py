"""The short form: what each codec costs on one model, over a few texts that are at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from amem.errors import InputError
from amem.fidelity.compare import compare, joined
from amem.fidelity.figures import Fidelity
from amem.fidelity.replay import Replay, exact_layout
from amem.fidelity.texts import texts_at_hand
from amem.kv import backend
from amem.kv.codec import codec_for
from amem.kv.sequence import StateLayout
from amem.model.capacity import capacity
from amem.model.load import load
from amem.model.spec import CODECS, GROUP_TOKENS, ModelCacheSpec
from amem.run.checked import checked_spec

CONTEXT = 4096  #: tokens for which the effective bytes are told


@dataclass(frozen=True)
class CodecRow:
    """One codec on all texts."""

    codec: str
    effective_bytes: float  #: of an agent of 4096 tokens, as a part of plain FP16
    fidelity: Fidelity

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain values that `json.dumps` takes."""
        return {"codec": self.codec, "effective_bytes": self.effective_bytes} | self.fidelity.to_dict()


@dataclass(frozen=True)
class Report:
    """What was measured, on what."""

    model: str
    texts: tuple[str, ...]
    n_tokens: int  #: of each text
    rows: tuple[CodecRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain values that `json.dumps` takes."""
        rows = [row.to_dict() for row in self.rows]
        return {"model": self.model, "texts": list(self.texts), "n_tokens": self.n_tokens, "rows": rows}


def effective_bytes(spec: ModelCacheSpec, codec: str, context: int = CONTEXT) -> float:
    """Bytes of an agent's K and V as a part of plain FP16: the mean over 64 lengths, from ``context`` tokens on.

    So the open group is counted as full as it is on average.

    Raises
    ------
        InputError: there is no such codec, or the model has no K and V.
    """
    if not spec.groups:
        raise InputError("this model has recurrent layers only: it keeps no K and V that a codec could store.")
    parts = []
    for n_open in range(GROUP_TOKENS):
        fp16 = sum(group.exact_nbytes(context + n_open, "float16") for group in spec.groups)
        found = capacity(spec, memory_bytes=0, context=context + n_open, codec=codec)
        parts.append((found.sealed_nbytes - found.state_nbytes + spec.exact_nbytes(n_open)) / fp16)
    return sum(parts) / len(parts)


def measure_model(
    name: str,
    *,
    codecs: Sequence[str] = CODECS,
    n_texts: int = 2,
    n_tokens: int = 512,
    progress: Callable[[str], None],
) -> Report:
    """Teacher-force texts through the model's caches in each codec, beside full precision.

    Raises
    ------
        InputError: a number is not possible, or the model cannot be measured with it.
        ModelError: the model cannot be found, read or carried.
    """
    texts = texts_at_hand()
    if not 1 <= n_texts <= len(texts):
        raise InputError(f"the number of texts must be from 1 to {len(texts)}, not {n_texts}.")
    if n_tokens < 128:
        raise InputError(f"a text needs 128 tokens, so that some are read in stored form; {n_tokens} are too few.")
    preparing = backend.choose("auto")
    loaded = load(name, progress=progress)
    if n_tokens > loaded.context_length:
        raise InputError(f"{loaded.name} has a context of {loaded.context_length} tokens, so {n_tokens} do not fit.")
    spec = checked_spec(loaded.model, loaded.fingerprint, progress)
    attention = preparing.result()
    sizes = {codec: effective_bytes(spec, codec) for codec in codecs}
    parts: dict[str, list[Any]] = {codec: [] for codec in codecs}
    used: list[str] = []
    for title, text in texts[:n_texts]:
        progress(f"{title}: {n_tokens} tokens, in {len(codecs)} codecs and at full precision.")
        ids = loaded.tokenizer.encode(text[: 16 * n_tokens])[:n_tokens]
        layouts = {codec: StateLayout(spec, codec_for(codec, spec)) for codec in codecs}
        exact = Replay.fresh(loaded.model, exact_layout(spec), backend=attention)
        stored = {codec: Replay.fresh(loaded.model, layouts[codec], backend=attention) for codec in codecs}
        for codec, found in compare(ids, exact, stored).items():
            parts[codec].append(found)
        used.append(title)
    rows = (CodecRow(codec, sizes[codec], joined(parts[codec]).summary()) for codec in codecs)
    return Report(loaded.name, tuple(used), n_tokens, tuple(rows))


def format_report(report: Report) -> str:
    """The report as a table."""
    lines = [("codec", "of FP16", "perplexity", "KL mean", "KL p99", "top-1")]
    for row in report.rows:
        found = row.fidelity
        lines.append(
            (
                row.codec,
                f"{row.effective_bytes:.3f}",
                f"{found.perplexity_change:+.2%}",
                f"{found.kl_mean:.2g}",
                f"{found.kl_p99:.2g}",
                f"{found.top1_agreement:.1%}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    n = report.rows[0].fidelity.n_predictions
    table += [
        "",
        f"{report.model}: {n} predictions of {', '.join(report.texts)}, each beside full precision on the same path.",
        "KL in nats. Of FP16: an agent's bytes at 4096 tokens, with the open group at its average.",
    ]
    return "\n".join(table)
