"""Prompts as callers have them, and the room that is made for what comes after them."""

import operator
from collections.abc import Iterable
from typing import Any, cast

# Room behind a restored prefix, so that decoding some hundred tokens copies no buffer.
DECODE_HEADROOM_TOKENS = 512


def token_ids_of(prompt: Any) -> list[int]:
    """A prompt as a list of integers: a sequence of them, or an mlx or NumPy array.

    ValueError for anything else, which names the first token id that is none.
    """
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Iterable):
        raise ValueError(f"a prompt is a sequence of token ids, not {type(prompt).__name__}")
    items = cast(Any, prompt)
    dimensions = getattr(items, "ndim", 1)
    if dimensions != 1:
        raise ValueError(f"a prompt has one dimension, not {dimensions}")
    values: list[Any] = items.tolist() if hasattr(items, "tolist") else list(items)
    try:
        return list(map(operator.index, values))
    except TypeError:
        position = next(at for at, each in enumerate(values) if not hasattr(each, "__index__"))
        raise ValueError(
            f"token id {position} is {values[position]!r}, which is not an integer"
        ) from None
