"""One turn of Transformers on torch's CPU, from a saved cache: as the model has it, and quantized to 4 bits by quanto.

It runs in an environment of its own, without mlx-lm and amem. mlx-lm imports transformers, which imports torch where it
is installed: beside torch amem and stock mlx-lm would take longer to start.

Weights and cache are bfloat16, the fastest dtype on a processor that computes in it (AVX-512 BF16); samples say it.
A quantized cache cannot be cut back, so there is a state more for the identical prompt. It is saved as `torch.save`
writes its layers: its tensors are packed, and of a class of quanto's. What it does at each step is Transformers': it
unpacks the whole cache, and packs it anew once 128 tokens have come.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.peer_turns import IDS, MLX, THREADS, TOKENS, Turn, timed

PACKAGES = ("torch", "transformers", "optimum-quanto")
DTYPE = "bfloat16"
_PLAIN, _PACKED, _PACKED_PROMPT = "transformers.safetensors", "transformers-q4.pt", "transformers-q4-prompt.pt"


def transformers_turn(turn: Turn, *, quantized: bool) -> dict[str, Any]:
    """Transformers on a saved cache."""
    import torch
    from safetensors.torch import load_file
    from transformers import DynamicCache

    history, message = turn.ids()
    file = turn.folder / (_PLAIN if not quantized else _PACKED if turn.case == "next" else _PACKED_PROMPT)
    started = time.perf_counter()
    model = _model(turn.models, quantized=quantized)
    loaded = time.perf_counter()
    if quantized:
        cache = _packed(model)
        if history:
            cache.layers = torch.load(file, weights_only=False)  # our own file; the layers are objects
    else:
        cache = DynamicCache(config=model.config)
        saved = load_file(file) if history else {}
        for n in range(len(saved) // 2):
            cache.update(*(saved[f"{n}.{name}"][:, :, : len(history)] for name in ("keys", "values")), n)
    if cache.get_seq_length() != len(history):
        raise SystemExit(f"{file} has {cache.get_seq_length()} tokens, not {len(history)}")
    restored = time.perf_counter()
    reply_ids: list[int] = []

    def steps() -> Iterable[None]:
        ids = message
        for _ in range(TOKENS):
            with torch.inference_mode():
                logits = model(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1).logits  # [1, 1, V]
            ids = [int(logits[0, -1].argmax())]
            reply_ids.extend(ids)
            yield

    figures = timed(steps(), started, loaded, restored, history, message, file)
    return figures | {"dtype": DTYPE, "reply_ids": reply_ids}


def prepare(folder: Path, models: Path, *, quantized: bool) -> dict[str, Any]:
    """Save the same history as Transformers' caches, quantized too where quanto is installed."""
    import torch
    from safetensors.torch import save_file
    from transformers import DynamicCache

    ids = json.loads((folder / IDS).read_text(encoding="utf-8"))
    model = _model(models, quantized=quantized)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([ids["history"]]), cache=cache, use_cache=True, logits_to_keep=1)
        layers = {
            f"{n}.{name}": getattr(layer, name).contiguous()  # [1, H, T, D]
            for n, layer in enumerate(cache.layers)
            for name in ("keys", "values")
        }
        save_file(layers, folder / _PLAIN)
        if quantized:
            for file, n_tokens in ((_PACKED, len(ids["history"])), (_PACKED_PROMPT, len(ids["prompt"]) - 1)):
                packed = _packed(model)
                for n in range(len(cache.layers)):
                    packed.update(*(layers[f"{n}.{name}"][:, :, :n_tokens] for name in ("keys", "values")), n)
                torch.save(packed.layers, folder / file)
    return {}


def _model(models: Path, *, quantized: bool) -> Any:
    """The bundled model; and quanto's kernel, which would otherwise be compiled or looked up at the first token."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(models / MLX, dtype=getattr(torch, DTYPE))
    if quantized:
        import optimum.quanto  # noqa: F401  # registers its operations

        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja is there
        torch.ops.quanto.unpack(torch.zeros(1, dtype=torch.uint8), 4)
    return model


def _packed(model: Any) -> Any:
    from transformers import QuantizedCache

    return QuantizedCache("quanto", model.config, nbits=4, q_group_size=64)


PEERS: dict[str, Callable[[Turn], dict[str, Any]]] = {
    "transformers": lambda turn: transformers_turn(turn, quantized=False),
    "transformers q4": lambda turn: transformers_turn(turn, quantized=True),
}
