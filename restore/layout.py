"""The shape of a model's cache: what one token, and one position, cost in each leaf.

Pure. A layout is learnt once by a probe and enters the namespace, so a live cache, a restored one
and one taken out of a batch must describe themselves alike: the names of classes never enter it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import cbor2
from blake3 import blake3

from ..store.tensors import DTYPE_BYTES, TensorSpec

# Changes with the canonical form, so that two versions of it can never give one digest.
_DOMAIN = "walkback layout 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """What one token adds to the keys, or to the values, of a leaf: an array (heads, width)."""

    heads: int
    width: int
    dtype: str

    def __post_init__(self) -> None:
        _require_dtype(self.dtype)
        _require_sizes((self.heads, self.width))

    def arrays(self, name: str) -> tuple[tuple[str, "PerToken"], ...]:
        """The arrays that hold these rows, each with the name of its tensor: one, ``name``."""
        return ((name, self),)

    def canonical(self) -> list[object]:
        return [self.heads, self.width, self.dtype]

    def __str__(self) -> str:
        return f"{self.heads} heads of {self.width} {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedRows:
    """What one token adds to quantised keys, or values: packed integers, scales and biases.

    ``group_size`` numbers of ``bits`` bits each share a scale and a bias, within one token: so rows
    can be cut at any token.
    """

    bits: int
    group_size: int
    packed: PerToken
    scales: PerToken
    biases: PerToken

    def arrays(self, name: str) -> tuple[tuple[str, PerToken], ...]:
        """The arrays that hold these rows, each with the name of its tensor, in mlx's order."""
        return (
            (f"{name}/packed", self.packed),
            (f"{name}/scales", self.scales),
            (f"{name}/biases", self.biases),
        )

    def canonical(self) -> list[object]:
        parts = [part.canonical() for _, part in self.arrays("")]
        return ["quantised", self.bits, self.group_size, *parts]

    def __str__(self) -> str:
        return f"{self.packed} ({self.bits} bits in groups of {self.group_size})"


Rows = PerToken | QuantisedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One array of point state. ``shape`` starts with the batch axis of 1; zero sizes are legal."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _require_dtype(self.dtype)
        _require_sizes(self.shape)
        if self.shape[:1] != (1,):
            raise ValueError(f"a slot of shape {self.shape} has no leading batch axis of 1")

    def canonical(self) -> list[object]:
        return [self.dtype, list(self.shape)]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLeaf:
    """A leaf whose keys and values can be cut at any token. The two may differ in every field."""

    path: str
    keys: Rows
    values: Rows

    def arrays(self) -> tuple[tuple[str, PerToken], ...]:
        """The arrays of the leaf with the names of their tensors: of the keys, then of the values.

        One token adds a row of (heads, width) to each.
        """
        keys, values = f"{self.path}/keys", f"{self.path}/values"
        return (*self.keys.arrays(keys), *self.values.arrays(values))

    def canonical(self) -> list[object]:
        return ["kv", self.path, self.keys.canonical(), self.values.canonical()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraysLeaf:
    """A leaf of arrays that are valid at exactly one position. None is a slot that stays empty."""

    path: str
    slots: tuple[Slot | None, ...]

    def canonical(self) -> list[object]:
        return ["arrays", self.path, [s.canonical() if s is not None else None for s in self.slots]]


Leaf = KVLeaf | ArraysLeaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Every leaf of a cache, in the cache's own order.

    A path is the index of a leaf in the cache's list, ``"3"``, or in nested lists, ``"3.0"``.
    Names of tensors are made here and nowhere else: ``{path}/keys``, ``{path}/values``, with
    ``/packed``, ``/scales`` and ``/biases`` behind them if they are quantised, ``{path}/slot{j}``.
    """

    leaves: tuple[Leaf, ...]

    def __post_init__(self) -> None:
        paths = [leaf.path for leaf in self.leaves]
        if len(set(paths)) != len(paths):
            raise ValueError(f"a path occurs twice: {paths}")
        for path in paths:
            if not all(part.isascii() and part.isdigit() for part in path.split(".")):
                raise ValueError(f"{path!r} is no path of a leaf")

    @property
    def has_kv(self) -> bool:
        """Whether blocks hold any tensor; without one a block is a record and no file."""
        return any(isinstance(leaf, KVLeaf) for leaf in self.leaves)

    @property
    def has_point_state(self) -> bool:
        """Whether resuming at a position needs a sidecar for that position."""
        return bool(self.point_specs())

    def canonical(self) -> list[object]:
        """The layout as plain lists, integers, strings and None: what the digest covers."""
        return [leaf.canonical() for leaf in self.leaves]

    def digest(self) -> bytes:
        """32 bytes of BLAKE3 that differ as soon as any field of any leaf does."""
        return blake3(cbor2.dumps([_DOMAIN, self.canonical()], canonical=True)).digest()

    def block_specs(self, start: int, end: int) -> tuple[TensorSpec, ...]:
        """The tensors of the KV of tokens ``start:end``: (1, heads, end - start, width) each."""
        if not 0 <= start < end:
            raise ValueError(f"tokens {start}:{end} are no block")
        return tuple(
            TensorSpec(name=name, dtype=part.dtype, shape=(1, part.heads, end - start, part.width))
            for leaf in self.leaves
            if isinstance(leaf, KVLeaf)
            for name, part in leaf.arrays()
        )

    def point_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of the point state of one position; empty slots have none."""
        return tuple(
            TensorSpec(name=f"{leaf.path}/slot{index}", dtype=slot.dtype, shape=slot.shape)
            for leaf in self.leaves
            if isinstance(leaf, ArraysLeaf)
            for index, slot in enumerate(leaf.slots)
            if slot is not None
        )

    def block_nbytes(self, start: int, end: int) -> int:
        """Bytes of tensor data in the block ``start:end``, known before anything is captured."""
        return sum(spec.nbytes for spec in self.block_specs(start, end))

    def point_nbytes(self) -> int:
        """Bytes of tensor data in one sidecar, known before anything is captured."""
        return sum(spec.nbytes for spec in self.point_specs())

    def difference(self, other: "Layout") -> str | None:
        """The first field in which ``other`` differs, in words, or None when the two are equal."""
        for mine, theirs in zip_longest(self.leaves, other.leaves):
            if mine is None or theirs is None:
                return f"{len(self.leaves)} leaves against {len(other.leaves)}"
            if (words := _leaf_difference(mine, theirs)) is not None:
                return words
        return None


def _leaf_difference(mine: Leaf, theirs: Leaf) -> str | None:
    if mine.path != theirs.path:
        return f"a leaf at {mine.path} against one at {theirs.path}"
    for what, left, right in _fields(mine, theirs):
        if left != right:
            return f"leaf {mine.path}: {what} {left} against {right}"
    return None


def _fields(mine: Leaf, theirs: Leaf) -> Iterator[tuple[str, object, object]]:
    match mine, theirs:
        case KVLeaf(), KVLeaf():
            yield "keys", mine.keys, theirs.keys
            yield "values", mine.values, theirs.values
        case ArraysLeaf(), ArraysLeaf():
            yield "slot count", len(mine.slots), len(theirs.slots)
            for index, (left, right) in enumerate(zip(mine.slots, theirs.slots, strict=True)):
                yield f"slot {index}", left or "empty", right or "empty"
        case _:
            yield "kind", _kind(mine), _kind(theirs)


def _kind(leaf: Leaf) -> str:
    return "kv" if isinstance(leaf, KVLeaf) else "arrays"


def _require_dtype(code: str) -> None:
    if code not in DTYPE_BYTES:
        raise ValueError(f"{code!r} is no dtype of a cache")


def _require_sizes(sizes: tuple[int, ...]) -> None:
    if any(size < 0 for size in sizes):
        raise ValueError(f"a negative size in {sizes}")
