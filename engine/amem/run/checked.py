"""The self-check, made once for each model and not at each load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from mlx.nn.layers.base import Module

from amem.kv.backend import REFERENCE, Backend
from amem.model.hook import install
from amem.model.probe import probe
from amem.model.spec import ModelCacheSpec
from amem.run.remembered import recall, remember
from amem.run.selfcheck import self_check


def checked_spec(
    model: Module,
    fingerprint: str,
    progress: Callable[[str], None] | None = None,
    *,
    backend: Backend = REFERENCE,
) -> ModelCacheSpec:
    """What a model caches, after its attention was seen to be carried exactly.

    The model is made ready for the backend before: its attention is hooked, and the layers that the backend's kernels
    know are given to them.

    Raises
    ------
    UnsupportedModel
        The model's attention cannot be carried.
    """
    install(model)
    checked = f"checked-{backend.name}"
    if backend.evaluated is not None:
        from amem.model import decoder  # needs numba, as this backend does

        checked += "-steps" if decoder.adopt(model) else ""
    if (known := recall(checked, fingerprint)) is not None:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return ModelCacheSpec.from_dict(known)
    if progress is not None:
        progress("Checking that the model's attention is carried exactly (once per model).")
    spec = probe(model)
    spec = replace(spec, kv_peak=self_check(model, spec, backend))
    remember(checked, fingerprint, spec.to_dict())
    return spec
