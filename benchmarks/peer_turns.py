"""One turn of amem, or of what people would use instead, in the process that runs this: what `benchmarks.peers` starts.

Each peer restores a history from its own file and continues it with the same tokens. What is imported is what a user of
that peer imports: no process of stock mlx-lm or llama.cpp loads anything of amem's. Transformers has a room of its own,
`benchmarks.peer_transformers`.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.next_turn import SENTENCE

MESSAGE = SENTENCE + "What does the crew do before it goes on?"
TOKENS = 16  #: of each reply
THREADS = os.cpu_count() or 1
_CONTEXT = 8192  #: tokens, the bundled model's
IDS, MLX, _GGUF = "ids.json", "mlx", "model.gguf"  # in a length's folder, and in the models' folder


@dataclass(frozen=True)
class Turn:
    """What a process is to do."""

    folder: Path  #: of the history: its ids, and each peer's saved state
    models: Path  #: of the models in the peers' forms
    case: str  #: "next", "again" (the identical prompt) or "cold"

    def ids(self) -> tuple[list[int], list[int]]:
        """The tokens that are restored, and those that are computed."""
        ids = json.loads((self.folder / IDS).read_text(encoding="utf-8"))
        if self.case == "cold":
            return [], ids["prompt"]
        if self.case == "again":
            return ids["prompt"][:-1], ids["prompt"][-1:]
        return ids["history"], ids["message"]


def text_of(n_tokens: int) -> str:
    """A text of about this many tokens."""
    return SENTENCE * max(1, round(n_tokens / 20))


def amem_turn(turn: Turn) -> dict[str, Any]:
    """One turn of an agent, on a copy of the store that `tell` made (on an empty one if it is to be cold)."""
    from amem import Engine

    started = time.perf_counter()
    with Engine(store=turn.folder / "store") as engine:
        loaded = time.perf_counter()
        agent = engine.agent("reader")
        told = json.loads((turn.folder / IDS).read_text(encoding="utf-8"))["text"]
        if turn.case == "again":
            agent.rewind()
        stream = iter(agent.stream(MESSAGE if turn.case == "next" else told, max_tokens=TOKENS))
        first = next(time.time() for event in stream if event.text)
        reply = next(event.reply for event in stream if event.reply is not None)
        status = engine.status()
    metrics = reply.metrics
    return {
        "first_token_at": first,
        "load_s": loaded - started,
        "ttft_s": metrics.ttft_ms / 1e3,
        "restore_s": metrics.restore_ms / 1e3,
        "decode_tokens_per_s": metrics.tokens_per_second,
        "prefill_tokens_per_s": metrics.computed_tokens / (metrics.prefill_ms + metrics.first_decode_ms) * 1e3,
        "n_history": metrics.reused_tokens,
        "n_message": metrics.computed_tokens,
        "state_bytes": metrics.disk_bytes,
        "bytes_written": metrics.bytes_written,
        "attention": status.attention,
        "blas": status.blas,
        "reply_ids": list(reply.token_ids),
    }


def mlx_lm_turn(turn: Turn, *, bits: int | None) -> dict[str, Any]:
    """Stock mlx-lm on a saved prompt cache."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache

    history, message = turn.ids()
    file = turn.folder / ("cache-q4.safetensors" if bits else "cache.safetensors")
    started = time.perf_counter()
    model = load(str(turn.models / MLX))[0]
    loaded = time.perf_counter()
    cache = load_prompt_cache(str(file)) if history else make_prompt_cache(model)
    for layer in cache if history else ():
        layer.trim(layer.offset - len(history))
    mx.eval([layer.state for layer in cache] if history else [])
    restored = time.perf_counter()
    steps = generate_step(mx.array(message), model, max_tokens=TOKENS, prompt_cache=cache, kv_bits=bits)
    return timed(steps, started, loaded, restored, history, message, file)


def llama_cpp_turn(turn: Turn, *, quantized: bool) -> dict[str, Any]:
    """llama.cpp on a saved state. Its own state file is read: `Llama.load_state` copies logits besides."""
    import llama_cpp

    history, message = turn.ids()
    file = turn.folder / f"state-{'q4_0' if quantized else 'f16'}.bin"
    started = time.perf_counter()
    llama = _llama(turn.models, quantized=quantized)
    loaded = time.perf_counter()
    if history:
        tokens, count = (llama_cpp.llama_token * _CONTEXT)(), ctypes.c_size_t(0)
        read = llama_cpp.llama_state_load_file(llama.ctx, str(file).encode(), tokens, _CONTEXT, ctypes.byref(count))
        if not read or list(tokens[: len(history)]) != history:
            raise SystemExit(f"{file} was not read, or has another history")
        llama.n_tokens = len(history)
    restored = time.perf_counter()

    def steps() -> Iterable[None]:
        llama.eval(message)
        token = llama.sample(temp=0.0)
        for _ in range(TOKENS - 1):
            yield
            llama.eval([token])
            token = llama.sample(temp=0.0)
        yield

    return timed(steps(), started, loaded, restored, history, message, file)


def _llama(models: Path, *, quantized: bool) -> Any:
    import llama_cpp

    kind = llama_cpp.GGML_TYPE_Q4_0 if quantized else llama_cpp.GGML_TYPE_F16
    return llama_cpp.Llama(
        str(models / _GGUF),
        n_ctx=_CONTEXT,
        n_threads=THREADS,
        n_threads_batch=THREADS,
        type_k=kind,
        type_v=kind,
        flash_attn=True,
        verbose=False,
    )


def timed(
    steps: Iterable[Any],
    started: float,
    loaded: float,
    restored: float,
    history: list[int],
    message: list[int],
    file: Path,
) -> dict[str, Any]:
    """The figures of a turn whose tokens come one by one; `perf_counter` has what was before."""
    times, first = [], 0.0
    for _ in steps:
        first = first or time.time()
        times.append(time.perf_counter())
    return {
        "first_token_at": first,
        "load_s": loaded - started,
        "ttft_s": times[0] - loaded,
        "restore_s": restored - loaded,
        "decode_tokens_per_s": (len(times) - 1) / (times[-1] - times[0]),
        "prefill_tokens_per_s": len(message) / (times[0] - restored),
        "n_history": len(history),
        "n_message": len(message),
        "state_bytes": file.stat().st_size if history else 0,
    }


# -- what is made before anything is measured --------------------------------------------------------------------------


def tell(folder: Path, n_tokens: int) -> dict[str, Any]:
    """Tell an agent a text of about this length: its store, and the figures of this cold turn."""
    folder.mkdir(parents=True)
    (folder / IDS).write_text(json.dumps({"text": text_of(n_tokens)}), encoding="utf-8")
    return amem_turn(Turn(folder, folder, "cold"))


def prepare(folder: Path, models: Path, reply_ids: list[int]) -> dict[str, Any]:
    """Save the same history for each peer, and the models if they are not there yet.

    (With a faster BLAS than stock mlx-lm has: only the use of its caches is measured.)
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

    from amem.model.load import load
    from amem.model.prompt import Prompter

    loaded = load("smollm2-135m")
    prompter = Prompter(loaded.tokenizer, loaded.eos_token_ids)
    told = json.loads((folder / IDS).read_text(encoding="utf-8"))["text"]
    prompt = prompter.first(None, told)
    history = [*prompt, *reply_ids]
    ids = {"text": told, "prompt": prompt, "history": history, "message": prompter.next(MESSAGE, last_id=history[-1])}
    (folder / IDS).write_text(json.dumps(ids), encoding="utf-8")
    save_models(models, loaded.model, loaded.path)
    cache = make_prompt_cache(loaded.model)
    for at in range(0, len(history), 256):
        loaded.model(mx.array([history[at : at + 256]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    save_prompt_cache(str(folder / "cache.safetensors"), cache)
    packed = [layer.to_quantized(group_size=64, bits=4) for layer in cache]
    save_prompt_cache(str(folder / "cache-q4.safetensors"), packed)
    return {name: len(found) for name, found in ids.items() if name != "text"}


def prepare_llama_cpp(folder: Path, models: Path) -> dict[str, Any]:
    """Save the same history as llama.cpp's states."""
    import llama_cpp

    history = json.loads((folder / IDS).read_text(encoding="utf-8"))["history"]
    for name, quantized in (("f16", False), ("q4_0", True)):
        llama = _llama(models, quantized=quantized)
        llama.eval(history)
        tokens = (llama_cpp.llama_token * len(history))(*history)
        file = str(folder / f"state-{name}.bin").encode()
        if not llama_cpp.llama_state_save_file(llama.ctx, file, tokens, len(history)):
            raise SystemExit(f"llama.cpp did not write {file.decode()}")
    return {}


def save_models(target: Path, model: Any, source: Path) -> None:
    """The bundled model's GGUF file, and a folder of its weights in float32, which is best for stock mlx-lm here."""
    from mlx_lm.utils import save_model

    from amem.model import bundled

    target.mkdir(parents=True, exist_ok=True)
    if not (target / _GGUF).exists():
        bundled.fetch_gguf(target / _GGUF)
    folder = target / MLX
    if folder.exists():
        return
    save_model(folder, model)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}), encoding="utf-8")
    for file in source.iterdir():
        if not (folder / file.name).exists() and not file.name.startswith("model"):
            shutil.copy(file, folder / file.name)


PEERS: dict[str, Callable[[Turn], dict[str, Any]]] = {
    "amem": amem_turn,
    "mlx-lm": lambda turn: mlx_lm_turn(turn, bits=None),
    "mlx-lm q4": lambda turn: mlx_lm_turn(turn, bits=4),
    "llama.cpp f16": lambda turn: llama_cpp_turn(turn, quantized=False),
    "llama.cpp q4_0": lambda turn: llama_cpp_turn(turn, quantized=True),
}
