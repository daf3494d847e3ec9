"""Walking the cache of an mlx-lm model: its leaves, its layout, its position.

Attributes only (``keys``, ``values``, ``offset``, ``cache``, ``caches``): they are the same in
every mlx-lm from 0.31.3 on, while ``state`` and ``meta_state`` came, went and changed their
contents.
"""

# mlx-lm's caches leave their elements untyped.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from collections.abc import Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from ..journal.errors import UnsupportedLayoutError, WalkbackError
from ..restore.layout import ArraysLeaf, KVLeaf, Layout, Leaf, PerToken, QuantisedRows, Rows, Slot
from ..restore.materialise import code_of


class PositionsDisagreeError(WalkbackError):
    """The KV leaves of one cache stand at different positions, so it is valid at none."""


def walk_leaves(cache: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each leaf with its path, nested cache lists flattened, in the cache's own order."""
    for index, entry in enumerate(cache):
        if isinstance(entry, CacheList):
            for path, leaf in walk_leaves(list(entry.caches)):
                yield f"{index}.{path}", leaf
        else:
            yield str(index), entry


def is_kv(leaf: object) -> bool:
    """Whether the leaf's rows can be cut at any token.

    Exactly these: a class made from one may keep its rows in another order or drop some.
    """
    return type(leaf) in (KVCache, QuantizedKVCache)


def arrays_of_kv(leaf: Any) -> tuple[mx.array, ...]:
    """The arrays of a KV leaf, rows first to last in each, in the order of ``KVLeaf.arrays``."""
    if type(leaf) is QuantizedKVCache:
        keys, values = cast("Sequence[Any]", (leaf.keys, leaf.values))
        return (*keys, *values)
    return (leaf.keys, leaf.values)


def layout_of(cache: Sequence[Any]) -> Layout:
    """The layout of a cache that has seen at least one token, whichever way it came to be.

    UnsupportedLayoutError names the leaf that walkback cannot store. Reads shapes and dtypes,
    evaluates nothing.
    """
    leaves = tuple(_describe(path, leaf) for path, leaf in walk_leaves(cache))
    if not leaves:
        raise UnsupportedLayoutError("the cache has no leaf at all")
    return Layout(leaves=leaves)


def position_of(cache: Sequence[Any]) -> int | None:
    """The position at which all KV leaves stand; None when there is no KV leaf to tell."""
    offsets = {path: int(leaf.offset) for path, leaf in walk_leaves(cache) if is_kv(leaf)}
    if len(set(offsets.values())) > 1:
        low, high = min(offsets, key=lambda p: offsets[p]), max(offsets, key=lambda p: offsets[p])
        raise PositionsDisagreeError(
            f"leaf {low} stands at {offsets[low]}, leaf {high} at {offsets[high]}"
        )
    return next(iter(offsets.values()), None)


def _describe(path: str, leaf: Any) -> Leaf:
    if is_kv(leaf):
        return KVLeaf(
            path=path,
            keys=_rows(path, "keys", leaf.keys, leaf),
            values=_rows(path, "values", leaf.values, leaf),
        )
    if isinstance(leaf, ArraysCache):
        slots = tuple(_slot(path, index, array) for index, array in enumerate(leaf.cache))
        return ArraysLeaf(path=path, slots=slots)
    raise UnsupportedLayoutError(
        f"leaf {path} is a {type(leaf).__name__}; walkback stores KVCache and ArraysCache"
    )


def _rows(path: str, role: str, held: Any, leaf: Any) -> Rows:
    if type(leaf) is not QuantizedKVCache:
        return _per_token(path, role, held, leaf.offset)
    parts = cast("Sequence[object]", held) if isinstance(held, tuple | list) else ()
    if len(parts) != 3:
        raise UnsupportedLayoutError(f"leaf {path}: {role} are not packed with scales and biases")
    packed, scales, biases = (_per_token(path, role, each, leaf.offset) for each in parts)
    return QuantisedRows(
        bits=leaf.bits, group_size=leaf.group_size, packed=packed, scales=scales, biases=biases
    )


def _per_token(path: str, role: str, array: object, offset: int) -> PerToken:
    if not isinstance(array, mx.array):
        raise UnsupportedLayoutError(
            f"leaf {path}: {role} are {type(array).__name__}, not an array; "
            "a KVCache has a layout once a token went through it"
        )
    if array.ndim != 4 or array.shape[0] != 1:
        raise UnsupportedLayoutError(
            f"leaf {path}: {role} of shape {array.shape}, not (1, heads, tokens, width)"
        )
    if not 0 <= offset <= array.shape[2]:
        raise UnsupportedLayoutError(
            f"leaf {path}: offset {offset} outside of {array.shape[2]} rows of {role}"
        )
    return PerToken(heads=array.shape[1], width=array.shape[3], dtype=code_of(array.dtype))


def _slot(path: str, index: int, array: object) -> Slot | None:
    if array is None:
        return None
    if not isinstance(array, mx.array):
        raise UnsupportedLayoutError(
            f"leaf {path}: slot {index} holds a {type(array).__name__}, not an array"
        )
    if array.ndim == 0 or array.shape[0] != 1:
        raise UnsupportedLayoutError(
            f"leaf {path}: slot {index} of shape {array.shape} is not of one sequence"
        )
    return Slot(dtype=code_of(array.dtype), shape=tuple(array.shape))
