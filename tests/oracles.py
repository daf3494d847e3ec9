"""What mlx-lm alone answers, without a server and without us."""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from chat_models import letters_only
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors


class Oracle:
    """One model. An answer is computed once."""

    def __init__(self, model: Path) -> None:
        load: Any = mlx_lm.load
        self._model, self._tokenizer = load(str(model))
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def tokens(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> tuple[int, ...]:
        """The greedy token ids that follow a conversation."""
        prompt: list[int] = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True
        )
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            generate: Any = generate_step
            generated = generate(
                mx.array(prompt),
                self._model,
                max_tokens=max_tokens,
                logits_processors=make_logits_processors(letters_only()),
            )
            self._known[key] = tuple(int(token) for token, _ in generated)
        return self._known[key]
