"""Tiny models of real architectures with random weights: for demo, benchmarks and tests."""

# mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from .fingerprint import sorted_parameters
from .probe import unchanged_random_state

# A recurrent layer forgets exp(-rate * softplus(x)) of its state with each token. The rates that
# architectures start from, up to 16, forget everything in two tokens, and then no test could tell
# a restored state from an empty one. These remember some hundreds of tokens.
DECAY_RANGE = (0.002, 0.05)
# RWKV-7 keeps exp(-0.61 * sigmoid(x)) of its state, and this is the bias in x: near 0.99 at -4.
RWKV_DECAY_BIAS = "w_lora.lora.2.bias"

# A hybrid: three layers of Gated DeltaNet for each one of attention.
TINY_QWEN3_5: Mapping[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": 512,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "tie_word_embeddings": False,
    },
}


def build_tiny_model(
    config: Mapping[str, Any], *, dtype: str = "bfloat16", seed: int = 0, scale: float = 2.0
) -> nn.Module:
    """A model of ``config["model_type"]``, evaluated, with weights that depend on the seed alone.

    Mixtures of experts need float32 on the CPU. mlx's random state is as it was.
    """
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    with unchanged_random_state():
        mx.random.seed(seed)
        model: nn.Module = module.Model(module.ModelArgs.from_dict(dict(config)))
        mx.eval(model.parameters())
    return with_random_weights(model, dtype=dtype, seed=seed, scale=scale)


def with_random_weights(model: nn.Module, *, dtype: str, seed: int, scale: float) -> nn.Module:
    """The same model, its floats replaced and of ``dtype``.

    Matrices are normal with a deviation of scale / sqrt(fan in): large enough that logits differ
    and that the state remembers.
    """
    target: mx.Dtype = getattr(mx, dtype)
    casts: Any = getattr(model, "cast_predicate", _is_cast)
    lively: list[tuple[str, mx.array]] = []
    for index, (name, array) in enumerate(sorted_parameters(model)):
        if mx.issubdtype(array.dtype, mx.floating):
            key = mx.random.key(seed << 20 | index)
            if name.endswith("A_log"):
                array = mx.log(mx.random.uniform(*DECAY_RANGE, array.shape, key=key))
            elif name.endswith(RWKV_DECAY_BIAS):
                array = mx.full(array.shape, -4.0)
            elif array.ndim >= 2:
                deviation = scale / max(array.shape[-1], 4) ** 0.5
                array = mx.random.normal(array.shape, key=key) * deviation
            array = array.astype(target) if casts(name) else array
        lively.append((name, array))
    model.update(tree_unflatten(lively))
    model.eval()
    mx.eval(model.parameters())
    return model


def write_tiny_model(
    directory: Path,
    *,
    config: Mapping[str, Any],
    dtype: str = "bfloat16",
    seed: int = 0,
    scale: float = 2.0,
) -> None:
    """Write config.json and model.safetensors, loadable by ``mlx_lm.utils.load_model``.

    The same arguments give the same bytes. There is no tokenizer: prompts are token ids.
    """
    model = build_tiny_model(config, dtype=dtype, seed=seed, scale=scale)
    directory.mkdir(parents=True, exist_ok=True)
    weights = dict(sorted_parameters(model))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(dict(config), indent=1) + "\n")


def _is_cast(name: str) -> bool:
    return not name.endswith("A_log")
