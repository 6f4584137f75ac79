"""Tiny random models made of mlx-lm's own classes, one for each architecture that tests speak of.

Float32, seeded, a vocabulary of 128 tokens where the architecture allows it. Windows are short enough for tests to
cross them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

VOCABULARY = 128
_SEED = 20261130

#: What most configurations have in common.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}

#: Latent attention: the keys' 192 dims are 128 without positions and 64 with, the values have 128.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}

_GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 96,
        "sliding_window_pattern": 3,
    },
    "deepseek_v2": {
        **_LATENT,
        "topk_method": "greedy",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
    "qwen2": {"hidden_size": 128},  # head dim 32
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64, **_EXPERTS},
    "mixtral": {"hidden_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2},  # head dim 32
    "phi3": {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2},  # head dim 96
    "gpt_oss": {
        "num_hidden_layers": 4,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_next": {
        **_EXPERTS,
        **_GATED_DELTA,
        "shared_expert_intermediate_size": 48,
        "partial_rotary_factor": 0.25,
    },
    "qwen3_5": _GATED_DELTA,
    "falcon_h1": {
        "head_dim": 64,
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 2,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 32,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, float("inf")),
        "time_step_rank": "auto",
    },
    "llama4_text": {
        "head_dim": 64,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0],
        "use_qk_norm": True,
    },
    "gemma2": {"head_dim": 64},
    "gemma3n": {
        "num_hidden_layers": 4,
        "head_dim": 64,
        "intermediate_size": [96] * 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "sliding_window": 96,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "deepseek_v3": _LATENT,
    "llama4": {
        "num_hidden_layers": 4,
        "head_dim": 64,
        "attention_bias": False,
        "attention_chunk_size": 96,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "rope_scaling": None,
        "use_qk_norm": True,
    },
    "phi3small": {
        "vocab_size": 100352,  # it writes to logits of its own unused ids, past the end of a smaller vocabulary's
        "hidden_size": 256,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
    },
}

#: Architectures whose configuration lies one level down.
_NESTED = {"qwen3_5", "gemma3n", "llama4"}


def build(name: str, **changes: Any) -> nn.Module:
    """The tiny model of an architecture, with some of its configuration changed."""
    config = {**_COMMON, **_CONFIGS[name], "model_type": name, **changes}
    if name in _NESTED:
        config = {"model_type": name, "text_config": config}
    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(_SEED)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_vary, model.parameters()))
    mx.eval(model.state)
    return model.eval()


def _vary(weight: mx.array) -> mx.array:
    """Give constant weights (norms, sinks, biases) values too, so that a layer that ignores them is seen."""
    if mx.issubdtype(weight.dtype, mx.floating) and weight.size > 1 and bool(mx.all(weight == weight.flatten()[0])):
        weight = weight + 0.2 * mx.random.normal(weight.shape)
    return weight.astype(mx.float32)


def _builder(name: str) -> Callable[[], nn.Module]:
    return lambda: build(name)


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {name: _builder(name) for name in _CONFIGS}

#: Those whose attention cannot be carried; tests/model/test_spec.py says why.
REFUSED = ("gemma2", "gemma3n", "deepseek_v3", "llama4", "phi3small")

CARRIED = tuple(name for name in ARCHITECTURES if name not in REFUSED)
