"""What a model caches, layer by layer, and how many bytes each codec needs for it. Plain data: no MLX in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from amem.errors import InputError

GROUP_TOKENS = 64  #: tokens that are quantized together
BLOCK_TOKENS = 256  #: tokens of a sealed block
#: bits of a value in the codecs that keep keys per channel and values rotated, the finest first
CHANNEL_BITS = {"q8": 8, "q4": 4, "q3": 3, "q2": 2}
CODECS = ("q4", "q4-affine", "q3", "q2", "q8", "fp16")
WIDE = "/bf16"  #: after a codec's name: its 16-bit numbers are bfloat16, for K/V that are too large for float16
DTYPE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_SCALE_AND_BIAS = 4  #: bytes: 16 bits each


class LayerKind(StrEnum):
    """How a layer remembers."""

    FULL = "full"
    WINDOW = "window"
    RECURRENT = "recurrent"


def packing_group(head_dim: int) -> int:
    """Values that share a scale along a head dim: 64 where that divides it, else 32.

    Raises
    ------
    InputError
        Neither divides it.
    """
    for size in (64, 32):
        if head_dim % size == 0:
            return size
    raise InputError(f"a head dim of {head_dim} cannot be packed: neither 64 nor 32 divides it.")


def can_rotate(head_dim: int) -> bool:
    """Whether MLX's Hadamard transform is its own inverse on this dim; on some other sizes it corrupts memory."""
    return head_dim in {16, 24, 32, 64, 96, 128, 192, 256, 512}


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
    scale: float | None = None  #: of the attention scores; None where no probe has seen it


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

    @property
    def value_group(self) -> int:
        """Values of V that share a scale, along the head dim."""
        return packing_group(self.v_dim)

    @property
    def key_group(self) -> int:
        """Values of K that share a scale where a codec packs keys along the head dim."""
        return packing_group(self.k_dim)

    @property
    def rotatable(self) -> bool:
        """Whether the Hadamard transform may be used on V."""
        return can_rotate(self.v_dim)

    def exact_nbytes(self, n_tokens: int, dtype: str) -> int:
        """Bytes of this many tokens' K and V, not quantized, all layers."""
        values = len(self.layers) * self.n_kv_heads * (self.k_dim + self.v_dim)
        return n_tokens * values * DTYPE_NBYTES[dtype]


def check_codec(name: str) -> None:
    """Refuse a codec that an engine cannot have.

    Raises
    ------
    InputError
        There is no such codec.
    """
    if name.removesuffix(WIDE) not in CODECS:
        raise unknown_codec(name)


def unknown_codec(name: str) -> InputError:
    """The error that names the codecs there are."""
    return InputError(f"unknown codec {name!r}: choose one of auto, {', '.join(CODECS)}.")


def group_nbytes(codec: str, group: LayerGroup, dtype: str) -> int:
    """Bytes of one sealed group of 64 tokens in all layers of ``group``.

    ``q4`` keeps 4-bit codes with a scale and a bias (16 bits each) per key channel and 64 tokens, and per value token
    and `LayerGroup.value_group`, and ``q8``, ``q3`` and ``q2`` do the same with other bits; ``q4-affine`` per token
    along the head dim for both (the paper's form); ``fp16`` plain 16-bit numbers; ``exact`` numbers of the model's own
    ``dtype``.

    Raises
    ------
    InputError
        There is no such codec.
    """
    codec = codec.removesuffix(WIDE)
    if codec == "fp16":
        return group.exact_nbytes(GROUP_TOKENS, "float16")
    if codec == "exact":
        return group.exact_nbytes(GROUP_TOKENS, dtype)
    if codec in CHANNEL_BITS:
        bits = CHANNEL_BITS[codec]
        scales = group.k_dim + GROUP_TOKENS * group.v_dim // group.value_group
    elif codec == "q4-affine":
        bits = 4
        scales = GROUP_TOKENS * (group.k_dim // group.key_group + group.v_dim // group.value_group)
    else:
        raise unknown_codec(codec)
    codes = GROUP_TOKENS * (group.k_dim + group.v_dim) * bits // 8
    return len(group.layers) * group.n_kv_heads * (codes + scales * _SCALE_AND_BIAS)


def exact_first_tokens(codec: str) -> int:
    """Tokens at the very start of a sequence that a codec keeps exactly for good."""
    return 4 if codec.removesuffix(WIDE) in CHANNEL_BITS else 0


@dataclass(frozen=True)
class ModelCacheSpec:
    """The cache of a whole model."""

    layers: tuple[LayerSpec, ...]
    dtype: str  #: of K and V as the model computes them: "float32", "float16" or "bfloat16"
    kv_peak: float = 0.0  #: the largest value of K, and norm of a token's V in one head, that the self-check saw

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
        """Layers that keep a state of fixed size instead of K and V."""
        return tuple(layer for layer in self.layers if layer.kind is LayerKind.RECURRENT)

    @property
    def state_nbytes(self) -> int:
        """Bytes of all recurrent layers' state, whatever the context."""
        return sum(layer.state_nbytes for layer in self.recurrent)

    def token_nbytes(self, codec: str) -> dict[LayerKind, int]:
        """Bytes that one sealed token takes, for each kind of attention layer; `group_nbytes` says of what."""
        return {kind: nbytes // GROUP_TOKENS for kind, nbytes in self._sealed_nbytes(codec).items()}

    def block_nbytes(self, codec: str) -> dict[LayerKind, int]:
        """Bytes that one sealed block of 256 tokens takes, for each kind of attention layer."""
        return {kind: nbytes * (BLOCK_TOKENS // GROUP_TOKENS) for kind, nbytes in self._sealed_nbytes(codec).items()}

    def _sealed_nbytes(self, codec: str) -> dict[LayerKind, int]:
        found: dict[LayerKind, int] = {}
        for group in self.groups:
            found[group.kind] = found.get(group.kind, 0) + group_nbytes(codec, group, self.dtype)
        return found

    def exact_nbytes(self, n_tokens: int) -> int:
        """Bytes of this many tokens in the compute dtype, all attention layers: an open group, the first tokens."""
        return sum(group.exact_nbytes(n_tokens, self.dtype) for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain values that `json.dumps` takes; `from_dict` undoes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelCacheSpec:
        """Read what `to_dict` wrote, before or after a trip through JSON."""
        layers = []
        for layer in data["layers"]:
            shapes = tuple(tuple(shape) for shape in layer["state_shapes"])
            layers.append(LayerSpec(**{**layer, "kind": LayerKind(layer["kind"]), "state_shapes": shapes}))
        return cls(tuple(layers), data["dtype"], data["kv_peak"])
