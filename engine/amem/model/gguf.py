"""A llama model in one GGUF file, written out as an ordinary MLX model folder.

The quantized weights are taken over bit for bit: nothing is dequantized and quantized again. Only models of the
``llama`` architecture with a byte-level BPE tokenizer that splits digits one by one (``tokenizer.ggml.pre`` of
``smollm``) are read: that is what the bundled model is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from amem.errors import ModelError

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL = 3  # a special token in tokenizer.ggml.token_type
_GROUP_SIZE, _BITS = 32, 4


def convert(source: Path, folder: Path) -> None:
    """Write the model of the GGUF file ``source`` into the existing, empty ``folder``.

    Raises
    ------
    ModelError
        The file is not GGUF, or holds a kind of model that is not read here.
    """
    import mlx.core as mx

    try:
        loaded = mx.load(str(source), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{source} cannot be read as GGUF: {error}") from error
    arrays, metadata = cast("tuple[dict[str, mx.array], dict[str, Any]]", loaded)
    meta = {key: _plain(value) for key, value in metadata.items()}
    architecture, split = meta.get("general.architecture"), meta.get("tokenizer.ggml.pre")
    if (architecture, split) != ("llama", "smollm"):
        raise ModelError(f"{source} holds a {architecture!r} model with a {split!r} tokenizer; convert it with mlx-lm.")

    config = _config(meta, tied="output.weight" not in arrays)
    weights = {_name(key): _unpermuted(key, array, config) for key, array in arrays.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(folder / "config.json", config)
    eos = config["eos_token_id"]
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "bos_token_id": config["bos_token_id"]})
    _write_tokenizer(meta, folder)


def _plain(value: Any) -> Any:
    """A metadata value with scalars as Python's own."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _config(meta: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    def llama(key: str) -> Any:
        return meta[f"llama.{key}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": llama("rope.dimension_count"),
        "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),  # it was 1e-05 before float32
        "rope_theta": llama("rope.freq_base"),
        "max_position_embeddings": llama("context_length"),
        "vocab_size": llama("vocab_size"),
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float16",
        "quantization": {"group_size": _GROUP_SIZE, "bits": _BITS},
    }


def _name(key: str) -> str:
    """mlx-lm's name of a tensor: "blk.3.attn_q.scales" is "model.layers.3.self_attn.q_proj.scales"."""
    stem, kind = key.rsplit(".", 1)
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return f"{_TOP_NAMES[stem]}.{kind}"


def _unpermuted(key: str, array: Any, config: Mapping[str, Any]) -> Any:
    """The tensor in mlx-lm's order of rows, norms in the dtype of the scales.

    llama GGUF files interleave the two halves of each query and key head for RoPE on neighbouring pairs; mlx-lm
    rotates halves. Rows are whole groups, so packed weights, scales and biases are permuted alike.
    """
    import mlx.core as mx

    if ".attn_q." in key or ".attn_k." in key:
        heads = config["num_attention_heads" if ".attn_q." in key else "num_key_value_heads"]
        rows, columns = array.shape
        array = array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return array.astype(mx.float16) if array.ndim == 1 else array


def _write_tokenizer(meta: Mapping[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(vocab)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(vocab, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            # The general class takes tokenizer.json as it is; the architecture's own would set its own digit rule.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": vocab[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": vocab[meta["tokenizer.ggml.eos_token_id"]],
            "pad_token": vocab[meta["tokenizer.ggml.padding_token_id"]],
            "unk_token": vocab[meta["tokenizer.ggml.unknown_token_id"]],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
