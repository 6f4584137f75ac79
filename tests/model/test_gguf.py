"""GGUF files become MLX model folders."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from amem.errors import ModelError
from amem.model.gguf import convert
from tests.tiny import CHATML, SPECIAL, write_tiny_model

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    for ours, theirs in {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}.items():
        name = name.replace(ours, theirs)
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def _interleave(array: mx.array, heads: int) -> mx.array:
    rows, columns = array.shape
    return mx.contiguous(array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns))


def _write_gguf(source: Path, file: Path, **changes: object) -> None:
    """Write the tiny model in ``source`` as llama.cpp would, q and k rows interleaved."""
    config = json.loads((source / "config.json").read_text())
    weights = {}
    for name, array in mx.load(str(source / "model.safetensors")).items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        interleaved = next((n for part, n in heads.items() if part in name), None)
        weights[_gguf_name(name)] = _interleave(array, interleaved) if interleaved else array
    vocab = json.loads((source / "tokenizer.json").read_text())["model"]
    tokens = sorted(vocab["vocab"], key=vocab["vocab"].get)
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(config["hidden_size"], mx.uint32),
        "llama.feed_forward_length": mx.array(config["intermediate_size"], mx.uint32),
        "llama.block_count": mx.array(config["num_hidden_layers"], mx.uint32),
        "llama.attention.head_count": mx.array(config["num_attention_heads"], mx.uint32),
        "llama.attention.head_count_kv": mx.array(config["num_key_value_heads"], mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.rope.dimension_count": mx.array(config["head_dim"], mx.uint32),
        "llama.rope.freq_base": mx.array(config["rope_theta"], mx.float32),
        "llama.context_length": mx.array(config["max_position_embeddings"], mx.uint32),
        "llama.vocab_size": mx.array(config["vocab_size"], mx.uint32),
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in vocab["merges"]],
        "tokenizer.ggml.token_type": mx.array([3 if token in SPECIAL else 1 for token in tokens], mx.int32),
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.padding_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.unknown_token_id": mx.array(0, mx.uint32),
        "tokenizer.chat_template": CHATML,
    } | changes
    mx.save_gguf(str(file), weights, metadata)


def test_a_converted_model_computes_the_same_logits(tmp_path):
    """Names, the order of q and k rows, and the configuration all arrive as they were."""
    source = write_tiny_model(tmp_path / "source")
    _write_gguf(source, tmp_path / "tiny.gguf")
    (tmp_path / "converted").mkdir()

    convert(tmp_path / "tiny.gguf", tmp_path / "converted")

    tokens = mx.array([[5, 80, 200, 33, 7]])
    expected, _ = load_model(source)
    found, config = load_model(tmp_path / "converted")
    assert mx.allclose(expected(tokens), found(tokens), atol=1e-5)
    assert config["rms_norm_eps"] == 1e-5
    assert config["eos_token_id"] == 2


def test_the_tokenizer_splits_digits(tmp_path):
    """Numbers are tokenized digit by digit, and special tokens whole."""
    from mlx_lm.utils import load_tokenizer

    _write_gguf(write_tiny_model(tmp_path / "source"), tmp_path / "tiny.gguf")
    (tmp_path / "converted").mkdir()

    convert(tmp_path / "tiny.gguf", tmp_path / "converted")

    tokenizer = load_tokenizer(tmp_path / "converted", eos_token_ids=2)
    text = "in 1987<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[-5:] == ["1", "9", "8", "7", "<|im_end|>"]
    assert tokenizer.chat_template == CHATML


def test_other_architectures_are_refused(tmp_path):
    """The error says what the file holds."""
    source = write_tiny_model(tmp_path / "source")
    _write_gguf(source, tmp_path / "tiny.gguf", **{"general.architecture": "gemma"})
    (tmp_path / "converted").mkdir()

    with pytest.raises(ModelError, match="'gemma'"):
        convert(tmp_path / "tiny.gguf", tmp_path / "converted")


def test_a_file_that_is_not_gguf_is_refused(tmp_path):
    """A damaged download is a clear error."""
    (tmp_path / "bad.gguf").write_bytes(b"not gguf at all")

    with pytest.raises(ModelError, match=r"bad\.gguf cannot be read"):
        convert(tmp_path / "bad.gguf", tmp_path)
