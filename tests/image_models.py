"""Tiny models that take images: their architecture is a file that stands beside their weights.

The one architecture of mlx-lm that takes images (Muse Spark) runs on kernels for Metal only. These
are others of its architectures with an encoder of images in front, behind mlx-lm's own processor.
"""

# mlx's stubs leave arguments untyped.
# pyright: reportUnknownMemberType=false

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from chat_models import write_tokenizer
from mlx import nn
from zoo import CONFIGS, DTYPES

from walkback.integration.fingerprint import sorted_parameters
from walkback.integration.tiny import with_random_weights

ARCHITECTURE = Path(__file__).parent / "image_architecture.py"
IMAGE_TOKENS = ("<|image_start|>", "<|patch|>", "<|image_end|>")
# One token of an image is a square of so many pixels.
TOKEN_PIXELS = 28
CHATML = """{%- for m in messages -%}
<|im_start|>{{ m['role'] }}
{% if m['content'] is string -%}
{{ m['content'] }}
{%- else -%}
{%- for part in m['content'] -%}
{{ part['text'] if part['type'] == 'text' else '<|patch|>' }}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""


def config_of(name: str, *, fault: str = "") -> dict[str, Any]:
    """The configuration of an architecture of the zoo that takes images."""
    return {
        **CONFIGS[name],
        "model_file": ARCHITECTURE.name,
        "processor_type": "muse_spark",
        "vision_config": {"patch_size": TOKEN_PIXELS // 2, "merge_size": 2},
        "text_architecture": CONFIGS[name],
        "fault": fault,
        "eos_token_id": 2,
    }


def build_image_model(name: str, *, fault: str = "", image_token_id: int) -> nn.Module:
    """A model with weights that depend on nothing but its name. ``fault`` is one of the file's."""
    spec = importlib.util.spec_from_file_location("custom_model", ARCHITECTURE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = {**config_of(name, fault=fault), "image_token_id": image_token_id}
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    return with_random_weights(model, dtype=DTYPES[name], seed=0, scale=2.0)


def write_image_model(directory: Path, name: str, *, fault: str = "") -> None:
    """A folder that ``mlx_lm.load`` takes if it trusts the code in it."""
    tokenizer = write_tokenizer(directory, template=CHATML, more=IMAGE_TOKENS)
    image_token_id = tokenizer.token_to_id("<|patch|>")
    assert image_token_id is not None
    model = build_image_model(name, fault=fault, image_token_id=image_token_id)
    weights = dict(sorted_parameters(model))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    config = {**config_of(name, fault=fault), "image_token_id": image_token_id}
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(ARCHITECTURE, directory)
