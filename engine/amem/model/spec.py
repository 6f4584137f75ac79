"""What a model caches, layer by layer, learned by asking and probing the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """How a layer remembers."""

    FULL = "full"
    WINDOW = "window"
    RECURRENT = "recurrent"


@dataclass(frozen=True)
class LayerSpec:
    """One cache slot of a model."""

    index: int  #: place in the flattened list of the model's caches
    kind: LayerKind
    n_kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    n_q_heads: int = 0
    window: int | None = None  #: tokens that a windowed layer sees, itself included
    has_sinks: bool = False  #: learned attention sinks (gpt-oss)
    state_shapes: tuple[tuple[int, ...], ...] = ()  #: recurrent state at batch 1
    state_nbytes: int = 0


@dataclass(frozen=True)
class LayerGroup:
    """Layers of the same kind and shape; their K/V lie in the same tensors of a block, layer-major."""

    layers: tuple[int, ...]  #: cache slots
    kind: LayerKind
    n_kv_heads: int
    k_dim: int
    v_dim: int
    n_q_heads: int
    window: int | None


@dataclass(frozen=True)
class ModelCacheSpec:
    """The cache of a whole model."""

    layers: tuple[LayerSpec, ...]
    dtype: str  #: of K and V as the model computes them: "float32", "float16" or "bfloat16"

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Attention layers, gathered by kind and shape, in order of their first layer."""
        found: dict[tuple[object, ...], list[int]] = {}
        for layer in self.layers:
            if layer.kind is not LayerKind.RECURRENT:
                key = (layer.kind, layer.n_kv_heads, layer.k_dim, layer.v_dim, layer.n_q_heads, layer.window)
                found.setdefault(key, []).append(layer.index)
        return tuple(LayerGroup(tuple(indices), *key) for key, indices in found.items())  # type: ignore[arg-type]

    @property
    def recurrent(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for layer in self.layers if layer.kind is LayerKind.RECURRENT)
