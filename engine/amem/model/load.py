"""Load any model that mlx-lm runs: the bundled one, a local folder, or one from the hub."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from amem.errors import ModelError, UnsupportedModel
from amem.model import blas, bundled, hub, packed
from amem.model.fingerprint import fingerprint

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "n_ctx", "seq_length")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
_NO_LIMIT = 1 << 20  # tokens; for recurrent models, which state no context length


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, on the thread that loaded it."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: Mapping[str, Any]
    path: Path
    name: str  #: as it was asked for
    context_length: int  #: tokens
    dtype: str  #: that it computes in: "float32", "float16" or "bfloat16"
    eos_token_ids: frozenset[int]  #: each of them ends a reply
    fingerprint: str


@dataclass(frozen=True)
class ModelInfo:
    """A model that can be named to `load`."""

    name: str
    source: str  #: "bundled" or "hub cache"
    path: Path | None  #: None if it would be downloaded first
    nbytes: int  #: on disk, or to download


def load(name_or_path: str | Path, *, progress: bundled.Progress | None = None) -> LoadedModel:
    """Load a model and its tokenizer. All of it is evaluated, so that other threads may use it.

    Parameters
    ----------
    name_or_path
        "smollm2-135m", a model folder, or a hub id ("owner/name").
    progress
        Called with a sentence before each step that takes a while.

    Raises
    ------
    ModelError
        No such model, a folder that is not a model, or a model that cannot be downloaded.
    UnsupportedModel
        An architecture that mlx-lm does not know, or one that brings its own code (which is never run).
    """
    blas.ensure()
    products = packed.prepare()
    name = str(name_or_path)
    folder = _resolve(name, progress)
    if progress is not None:
        progress(f"Loading {name}.")
    return _load_folder(name, folder, products)


def models() -> list[ModelInfo]:
    """The models that need no download, and the bundled one in any case."""
    path = bundled.cached()
    nbytes = sum(file.stat().st_size for file in path.iterdir()) if path else bundled.DOWNLOAD_NBYTES
    cached = [ModelInfo(name, "hub cache", folder, size) for name, folder, size in hub.cached_models()]
    return [ModelInfo(bundled.NAME, "bundled", path, nbytes), *cached]


def _resolve(name: str, progress: bundled.Progress | None) -> Path:
    if name == bundled.NAME:
        return bundled.path(progress)
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:
        raise ModelError(f"There is no folder {name}: no such user.") from error
    if name.strip() and folder.exists():
        return folder
    if _HUB_ID.fullmatch(name):
        if progress is not None:
            progress(f"Looking for {name} in the hub's cache, then on the hub.")
        return hub.download(name)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(f"There is no folder {name}: check its path, or give a hub id like 'owner/name'.")
    known = [info.name for info in models()]
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}."
    raise ModelError(f"Unknown model {name!r}; {hint} A model folder or a hub id like 'owner/name' works too.")


def _load_folder(name: str, folder: Path, products: Future[ModuleType | None] | None) -> LoadedModel:
    _check_folder(folder)
    import mlx.core as mx
    from mlx_lm.utils import load_model, load_tokenizer

    with _said_of(name):
        model, config = load_model(folder, lazy=True)
    with ThreadPoolExecutor(1, "amem-tokenizer") as pool:  # its file is read while the weights are
        options = {"trust_remote_code": False}
        loading = pool.submit(load_tokenizer, folder, options, eos_token_ids=config.get("eos_token_id"))
        matrices = {}
        if _widen(model):
            matrices = packed.collect(model)
            _as_float32(model)
        mx.eval(model.state)  # RoPE frequencies are no parameters, but lazy all the same
        with _said_of(name):
            tokenizer = loading.result()
    if products is not None and (compiled := products.result()) is not None:
        packed.register(model, matrices, compiled)
    dtype = _compute_dtype(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        path=folder,
        name=name,
        context_length=_context_length(config, tokenizer),
        dtype=dtype,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        fingerprint=fingerprint(folder, dtype=dtype),
    )


@contextlib.contextmanager
def _said_of(name: str) -> Iterator[None]:
    """A model's files may be wrong in any way, and mlx-lm raises what it meets."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        kind = UnsupportedModel if "not supported" in reason or "custom" in reason else ModelError
        raise kind(f"The model {name} cannot be loaded: {reason}") from error


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelError(f"{folder} is a file; give the folder that holds config.json and model.safetensors.")
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json.")
    try:
        parsed = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{config} cannot be read: {error}") from error
    if not isinstance(parsed, dict) or "model_type" not in parsed:
        raise ModelError(f"{config} does not say its model_type, so it is not a language model's.")
    if not any(folder.glob("model*.safetensors")):
        raise ModelError(
            f"{folder} is not a model folder for MLX: it has no model.safetensors. (Other formats are converted with "
            "`mlx_lm.convert`.)"
        )
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(f"{folder} is not a whole model folder: it has no tokenizer.json.")


def _widen(model: nn.Module) -> bool:
    """Whether the weights shall be held as float32: on Linux's CPU, where that is fastest, if they fit.

    MLX has no vector code there for quantized or 16-bit products; float32 goes to BLAS.
    """
    import mlx.core as mx
    from mlx_lm.utils import get_total_parameters

    if sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu):
        return False
    return int(get_total_parameters(model)) * 4 <= _memory_nbytes() // 4


def _as_float32(model: nn.Module) -> None:
    """Dequantize in place. Scales are widened first: a product rounded to 16 bits would be another model."""
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model

    model.set_dtype(mx.float32)
    dequantize_model(model)
    model.set_dtype(mx.float32)  # formats with scales of 8 bits are dequantized to bfloat16


def _memory_nbytes() -> int:
    """Memory of the machine, or of the container that limits it."""
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            nbytes = min(nbytes, int(limit.read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such control group, or its limit is "max"
            continue
    return nbytes


def _compute_dtype(model: nn.Module) -> str:
    """The floating dtype that most of the model's floating bytes have."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    nbytes: Counter[str] = Counter()
    leaves = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    for _, array in leaves:
        if mx.issubdtype(array.dtype, mx.floating):
            nbytes[str(array.dtype).removeprefix("mlx.core.")] += array.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else "float32"


def _context_length(config: Mapping[str, Any], tokenizer: TokenizerWrapper) -> int:
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(value := part.get(key), int) and value > 0:
                return value
    length = getattr(tokenizer, "model_max_length", None)
    return int(length) if isinstance(length, int) and 0 < length < _NO_LIMIT else _NO_LIMIT
