"""Cache specs of well-known models by name, so that capacity can be told without their weights."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from amem.errors import InputError
from amem.model.spec import LayerKind, LayerSpec, ModelCacheSpec


def _attention(
    indices: Iterable[int], *, n_kv_heads: int, n_q_heads: int, k_dim: int, v_dim: int, window: int | None = None
) -> list[LayerSpec]:
    kind = LayerKind.FULL if window is None else LayerKind.WINDOW
    return [LayerSpec(index, kind, n_kv_heads, k_dim, v_dim, n_q_heads, window) for index in indices]


def _gemma_3_12b() -> ModelCacheSpec:
    full = _attention(range(5, 48, 6), n_kv_heads=8, n_q_heads=16, k_dim=256, v_dim=256)
    windowed = (index for index in range(48) if index % 6 != 5)
    layers = full + _attention(windowed, n_kv_heads=8, n_q_heads=16, k_dim=256, v_dim=256, window=1024)
    return ModelCacheSpec(tuple(sorted(layers, key=lambda layer: layer.index)), "bfloat16")


def _uniform(n_layers: int, n_kv_heads: int, n_q_heads: int, k_dim: int, v_dim: int, dtype: str) -> ModelCacheSpec:
    layers = _attention(range(n_layers), n_kv_heads=n_kv_heads, n_q_heads=n_q_heads, k_dim=k_dim, v_dim=v_dim)
    return ModelCacheSpec(tuple(layers), dtype)


#: The three models of arXiv 2603.04428, as mlx-lm caches them (DeepSeek's full K and V of each head), and the default
#: model as it runs on a CPU.
GEOMETRIES = {
    "gemma-3-12b": _gemma_3_12b(),
    "deepseek-coder-v2-lite": _uniform(27, 16, 16, 192, 128, "bfloat16"),
    "llama-3.1-8b": _uniform(32, 8, 32, 128, 128, "bfloat16"),
    "smollm2-135m": _uniform(30, 3, 9, 64, 64, "float32"),
}

#: Those that the paper reports on.
PAPER_GEOMETRIES = ("gemma-3-12b", "deepseek-coder-v2-lite", "llama-3.1-8b")


def geometry(name: str) -> ModelCacheSpec:
    """The cache spec of a well-known model.

    Raises
    ------
    InputError
        There is none of this name; the text names those that there are.
    """
    if name in GEOMETRIES:
        return GEOMETRIES[name]
    close = get_close_matches(name.lower(), GEOMETRIES, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise InputError(f"unknown geometry {name!r}: choose one of {', '.join(GEOMETRIES)}.{hint}")
