"""One row of a batch as a cache of its own, to be captured: views, and nothing is copied."""

# mlx-lm's caches leave their elements untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportPrivateUsage=false

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache

from ...journal.errors import UnsupportedLayoutError
from ..leaves import arrays_of_kv, is_kv


def row_of(batch: Sequence[Any], index: int) -> list[Any]:
    """The caches of one row: lazy slices that are to be let go of before the batch goes on.

    KV of the row stands right-justified between its padding and the batch's end; its offset is
    counted from there, so a row at another position than its tokens shows. UnsupportedLayoutError
    for a leaf that is not stored.
    """
    return [_row_of_leaf(leaf, index) for leaf in batch]


def _row_of_leaf(leaf: Any, index: int) -> Any:
    if isinstance(leaf, CacheList):
        return CacheList(*(_row_of_leaf(each, index) for each in leaf.caches))
    if type(leaf) is BatchKVCache:
        row = KVCache()
        paddings: Any = leaf.left_padding.tolist()
        padding: int = paddings[index]
        assert leaf.keys is not None and leaf.values is not None, "a row is captured once it is fed"
        row.keys = leaf.keys[index : index + 1, :, padding : leaf._idx]
        row.values = leaf.values[index : index + 1, :, padding : leaf._idx]
        row.offset = leaf._idx - padding
        return row
    if isinstance(leaf, ArraysCache):
        row = ArraysCache(len(leaf.cache))
        row.cache = [None if each is None else each[index : index + 1] for each in leaf.cache]
        return row
    raise UnsupportedLayoutError(f"a row of {type(leaf).__name__} is not stored")


def adopted(cache: Sequence[Any]) -> list[Any]:
    """A batch of one row around the arrays of a single cache, which keep their headroom.

    Merging would copy them, without the headroom, and so have the first append copy them again.
    """
    return [_adopted_leaf(leaf) for leaf in cache]


def can_be_adopted(cache: Sequence[Any]) -> bool:
    """Whether all leaves are of the kinds that ``adopted`` knows and have seen a token."""
    return all(_can_be_adopted(leaf) for leaf in cache)


def _can_be_adopted(leaf: Any) -> bool:
    if isinstance(leaf, CacheList):
        return all(map(_can_be_adopted, leaf.caches))
    if type(leaf) is KVCache:
        return leaf.keys is not None and leaf.offset > 0
    return type(leaf) is ArraysCache and not leaf.empty()


def _adopted_leaf(leaf: Any) -> Any:
    if isinstance(leaf, CacheList):
        return CacheList(*map(_adopted_leaf, leaf.caches))
    if type(leaf) is KVCache:
        batch = BatchKVCache([0])
        batch.keys, batch.values = leaf.keys, leaf.values
        batch.offset = mx.array([leaf.offset])
        batch._idx = leaf.offset
        return batch
    row = ArraysCache(len(leaf.cache))
    row.cache = list(leaf.cache)
    return row


def unpadded(batch: Sequence[Any]) -> None:
    """Drop the padding of batches that have none: rows that no token has gone into yet."""
    for leaf in batch:
        if isinstance(leaf, CacheList):
            unpadded(leaf.caches)
        elif isinstance(leaf, ArraysCache) and leaf.empty():
            leaf.left_padding = None


def compact(cache: Sequence[Any]) -> None:
    """Copy point state out of the larger buffers that it may be a view of, and evaluate it all.

    A row of a batch pins the whole batch, and a convolution window the chunk that it was cut from.
    """
    pending: list[Any] = []
    for leaf in cache:
        if isinstance(leaf, CacheList):
            compact(leaf.caches)
        elif isinstance(leaf, ArraysCache):
            leaf.cache = [None if each is None else mx.contiguous(each) for each in leaf.cache]
            pending += [each for each in leaf.cache if each is not None]
        elif is_kv(leaf) and leaf.keys is not None:
            pending += arrays_of_kv(leaf)
    mx.eval(pending)
