"""Tiny models that chat: a byte-level tokenizer with ChatML or a thinking template beside them."""

# mlx's stubs and those of tokenizers leave arguments untyped.
# pyright: reportUnknownMemberType=false

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from zoo import CONFIGS, DTYPES, VOCAB

from walkback.integration.fingerprint import sorted_parameters
from walkback.integration.tiny import build_tiny_model

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# As Qwen's: in history the reasoning of earlier answers is left out.
CHATML = """{%- for m in messages -%}
<|im_start|>{{ m['role'] }}
{% if m['role'] == 'assistant' and '</think>' in m['content'] -%}
{{ m['content'].split('</think>')[-1].lstrip('\\n') }}
{%- else -%}
{{ m['content'] }}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""


def write_chat_model(
    directory: Path, name: str, *, seed: int = 0, changes: Mapping[str, Any] | None = None
) -> None:
    """A folder that ``mlx_lm.load`` takes: the zoo's architecture, with random weights.

    Its tokens are bytes, so every text has a known number of them. ``changes`` are of its
    configuration.
    """
    write_tokenizer(directory, template=CHATML)
    config = _with_ending({**CONFIGS[name], **(changes or {})})
    model = build_tiny_model(config, dtype=DTYPES[name], seed=seed)
    weights = dict(sorted_parameters(model))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))


def write_tokenizer(directory: Path, *, template: str, more: Sequence[str] = ()) -> Tokenizer:
    """Make the folder, with a tokenizer of bytes and special tokens, ``more`` of them too."""
    directory.mkdir(parents=True)
    tokenizer = _tokenizer(more)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 20,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(template)
    return tokenizer


def letters_only() -> dict[int, float]:
    """A logit bias under which a model answers in small letters.

    So an answer has the same token ids when it comes back as history, and none ends by itself.
    """
    tokenizer = _tokenizer()
    spoken = {tokenizer.token_to_id(each) for each in ascii_lowercase}
    return {each: -1e4 for each in range(VOCAB) if each not in spoken}


def _with_ending(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>")}


def _tokenizer(more: Sequence[str] = ()) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: index for index, each in enumerate((*SPECIAL_TOKENS, *letters, *more))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True) for each in (*SPECIAL_TOKENS, *more)]
    )
    return tokenizer
