"""Learning a model's layout by running a few tokens through it: fresh leaves have no dtype yet."""

# mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from ..journal.errors import UnsupportedLayoutError
from ..restore.layout import ArraysLeaf, KVLeaf, Layout
from .leaves import arrays_of_kv, layout_of, position_of, walk_leaves

PROBE_TOKENS = 16


def learn_layout(model: nn.Module, make_cache: Callable[[], list[Any]] | None = None) -> Layout:
    """The layout of the model's cache, after 16 tokens and again after one more.

    UnsupportedLayoutError names a leaf that walkback cannot store, or one whose point state
    depends on the number of tokens seen. The model and mlx's random state are as they were;
    nothing is kept.
    """
    cache = make_cache() if make_cache is not None else make_prompt_cache(model)
    with unchanged_random_state():
        layout = _layout_after(model, cache, token_count=PROBE_TOKENS, position=PROBE_TOKENS)
        later = _layout_after(model, cache, token_count=1, position=PROBE_TOKENS + 1)
    if (words := layout.difference(later)) is not None:
        raise UnsupportedLayoutError(f"the layout changes from one token to the next: {words}")
    return layout


@contextmanager
def unchanged_random_state() -> Generator[None]:
    """Put mlx's random state of this thread back as it was, whatever happens inside."""
    # mlx keeps one key of two 32-bit words, and seeding with their number makes the same key.
    high, low = cast(tuple[int, int], cast(Any, mx.random.state)[0].tolist())
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)


def _layout_after(model: Any, cache: list[Any], *, token_count: int, position: int) -> Layout:
    # Every vocabulary has an id 0, and shapes do not depend on which ids go through.
    output = model(mx.zeros((1, token_count), mx.int32), cache=cache)
    layout = layout_of(cache)
    mx.eval(output, _arrays(cache, layout))
    if layout.has_kv and position_of(cache) != position:
        raise UnsupportedLayoutError(
            f"after {position} tokens the cache stands at {position_of(cache)}"
        )
    return layout


def _arrays(cache: list[Any], layout: Layout) -> list[Any]:
    arrays: list[Any] = []
    for (_, leaf), described in zip(walk_leaves(cache), layout.leaves, strict=True):
        match described:
            case KVLeaf():
                arrays += arrays_of_kv(leaf)
            case ArraysLeaf():
                arrays += [array for array in leaf.cache if array is not None]
    return arrays
