"""Tiny models of seven architectures, and prompts for them."""

import random
from collections.abc import Mapping
from typing import Any

from mlx import nn

from walkback.integration.tiny import TINY_QWEN3_5, build_tiny_model

VOCAB = 512

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    },
    "qwen3_5": TINY_QWEN3_5,
    "qwen3_next": {
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 8192,
        "head_dim": 32,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 128,
        "mamba_d_ssm": 128,
        "mamba_d_state": 32,
        "mamba_d_head": 32,
        "mamba_n_heads": 4,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 8192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "-", "M", "*", "M", "-", "M", "*"],
        "num_hidden_layers": 8,
        "head_dim": 16,
    },
    "lfm2": {
        "model_type": "lfm2",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 128,
        "full_attn_idxs": [2, 5],
    },
    "rwkv7": {
        "model_type": "rwkv7",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "norm_eps": 1e-5,
        "head_dim": 32,
        "num_hidden_layers": 3,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
}

# mlx on a CPU multiplies gathered experts in float32 only.
DTYPES = {name: "float32" if name == "qwen3_next" else "bfloat16" for name in CONFIGS}


def build(name: str, seed: int = 0) -> nn.Module:
    """The tiny model of that architecture; every process builds the same one."""
    return build_tiny_model(CONFIGS[name], dtype=DTYPES[name], seed=seed)


def token_ids(n: int, seed: int = 1) -> list[int]:
    """``n`` token ids below the vocabulary's size, the same for the same seed."""
    source = random.Random(seed)
    return [source.randrange(VOCAB) for _ in range(n)]
