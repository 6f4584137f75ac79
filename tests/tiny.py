"""Small random-weight models with a real tokenizer, for tests that need a model but not its knowledge."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 384

_CORPUS = (
    "You are a helpful assistant. The quick brown fox jumps over the lazy dog, and the planner makes a plan in three "
    "steps. What is the capital of France? The capital of France is Paris. One two three four five six seven eight."
)


def write_tiny_model(folder: Path, model_type: str = "llama", seed: int = 0, **config: Any) -> Path:
    """Write a model folder that `amem.model.load.load` takes: random weights, a byte-level BPE tokenizer, ChatML.

    ``model_type`` names a module of ``mlx_lm.models``; ``config`` overrides its configuration. The same arguments
    write the same model.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    folder.mkdir(parents=True, exist_ok=True)
    full = {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | config
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(full))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(full, indent=2), encoding="utf-8")
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path, chat_template: str | None = CHATML, **config: Any) -> Path:
    """Write the tokenizer alone: 256 bytes, some merges, and the three special tokens of ChatML (end of turn: 2)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    full = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    } | config
    if chat_template is not None:
        full["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(full, indent=2), encoding="utf-8")
    return folder
