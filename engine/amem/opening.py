"""Opening an engine: load the model, learn what it caches, check that we carry it, open the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from amem.fidelity.choice import choose_codec
from amem.kv import backend
from amem.kv.codec import codec_for
from amem.kv.pool import Pool
from amem.kv.sequence import StateLayout
from amem.model import blas
from amem.model.bundled import cache_folder
from amem.model.load import load
from amem.model.prompt import Prompter
from amem.model.spec import check_codec
from amem.parts import EngineParts
from amem.roster import Roster
from amem.run.checked import checked_spec
from amem.run.pace import PrefillRate
from amem.run.runner import Runner
from amem.run.scheduler import Scheduler
from amem.run.worker import Workers
from amem.store import Store
from amem.store.records import Realm


@dataclass(frozen=True)
class Opened:
    """An engine's parts, and what its status says of them."""

    parts: EngineParts
    roster: Roster
    root: Path
    model_path: Path
    device: str
    attention: str
    blas: str
    quota: int
    warnings: tuple[str, ...]
    codec_choice: str  #: what "auto" measured, or ""

    def discard(self) -> None:
        """Close what nobody will use."""
        self.parts.store.close()
        self.finish()

    def finish(self) -> None:
        """Let go of the owner thread's MLX streams, in that thread."""
        self.parts.scheduler.rate.save()
        mx.synchronize()
        mx.clear_streams()


def open_parts(
    name: str,
    root: Path,
    *,
    budget: int,
    quota: int,
    codec: str,
    attention: str,
    prefill_chunk: int | None,
    max_batch: int,
    step_ms: float,
    readers: Workers,
    writer: Workers,
    prefetch: bool,
    progress: Callable[[str], None] | None,
) -> Opened:
    """Build everything, in the thread that will own it.

    Raises
    ------
        InputError, ModelError, StoreError: see `amem.Engine`.
    """
    if codec != "auto":
        check_codec(codec)
    preparing = backend.choose(attention)
    loaded = load(name, progress=progress)
    if not preparing.done() and progress is not None:
        progress("Compiling the attention kernels for this processor (once).")
    computing = preparing.result()
    spec = checked_spec(loaded.model, loaded.fingerprint, progress, backend=computing)
    choice = choose_codec(loaded, spec, progress, backend=computing) if codec == "auto" else None
    chosen = codec_for(choice.codec if choice else codec, spec)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    chunk = prefill_chunk or (128 if on_cpu else 512)
    device = "cpu" if on_cpu else "gpu"
    runner = Runner(loaded.model, lambda: make_prompt_cache(loaded.model), computing)
    parts = EngineParts(
        model_name=loaded.name,
        realm=Realm(loaded.fingerprint, chosen.name),
        layout=StateLayout(spec, chosen),
        prompter=Prompter(loaded.tokenizer, loaded.eos_token_ids),
        context_length=loaded.context_length,
        eos_token_ids=frozenset(loaded.eos_token_ids),
        prefill_chunk=chunk,
        pool=Pool(budget),
        runner=runner,
        store=Store(root, disk_quota=quota),
        scheduler=Scheduler(
            runner,
            prefill_chunk=chunk,
            max_batch=max_batch,
            step_s=step_ms / 1e3,
            rate=PrefillRate(cache_folder().parent / "prefill" / f"{loaded.fingerprint}-{device}.json"),
        ),
        readers=readers,
        writer=writer,
    )
    roster = Roster(parts, prefetch=prefetch)
    warnings = tuple(warning for warning in (blas.warning(), computing.warning) if warning)
    choice_text = str(choice) if choice else ""
    return Opened(parts, roster, root, loaded.path, device, computing.name, blas.in_use(), quota, warnings, choice_text)
