"""The self-check's result, kept by the model's fingerprint: a model is checked once, not at each load."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

import mlx.core as mx
from mlx.nn.layers.base import Module

from amem.model.bundled import cache_folder
from amem.model.hook import install
from amem.model.probe import probe
from amem.model.spec import ModelCacheSpec
from amem.run.selfcheck import self_check


def checked_spec(model: Module, fingerprint: str, progress: Callable[[str], None] | None = None) -> ModelCacheSpec:
    """What a model caches, after its attention was seen to be carried exactly.

    The check is made again for another version of MLX, mlx-lm or amem, or another device.

    Raises
    ------
    UnsupportedModel
        The model's attention cannot be carried.
    """
    install(model)
    state = [version(name) for name in ("mlx", "mlx-lm", "amem")] + [str(mx.default_device())]
    path = cache_folder().parent / "checked" / f"{fingerprint}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["state"] == state:
            return ModelCacheSpec.from_dict(known["spec"])
    if progress is not None:
        progress("Checking that the model's attention is carried exactly (once per model).")
    spec = probe(model)
    spec = replace(spec, kv_peak=self_check(model, spec))
    with contextlib.suppress(OSError):  # only a saving of time
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"state": state, "spec": spec.to_dict()}), encoding="utf-8")
        temporary.replace(path)
    return spec
