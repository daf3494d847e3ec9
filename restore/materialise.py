"""From verified bytes to live cache objects, without a copy in between.

The final buffers are allocated first, readers fill them in place, and only then do cache objects
exist. The one module outside ``integration`` that knows mlx.
"""

# mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, cast

import mlx.core as mx

from ..journal.errors import PayloadDamagedError, UnsupportedLayoutError
from ..store.tensors import TensorSpec
from .layout import ArraysLeaf, KVLeaf, Layout, PerToken, QuantisedRows, Rows

# KVCache grows by steps of 256 tokens; a buffer that is no multiple is cut before its first append.
CAPACITY_STEP_TOKENS = 256

_CODE_TO_DTYPE: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F64": mx.float64,
    "C64": mx.complex64,
}
_DTYPE_TO_CODE = {dtype: code for code, dtype in _CODE_TO_DTYPE.items()}
_EMPTY = memoryview(b"")

# As integers, floats of one sign are in the order of their size, with infinity and what is no
# number behind all others. Two maxima take a sixth of the time of isfinite, and no memory.
_FLOAT_BITS = {
    mx.float32: (mx.int32, mx.uint32, 0x7F80_0000, 1 << 31),
    mx.bfloat16: (mx.int16, mx.uint16, 0x7F80, 1 << 15),
    mx.float16: (mx.int16, mx.uint16, 0x7C00, 1 << 15),
}


def dtype_of(code: str) -> mx.Dtype:
    """The mlx dtype of a safetensors code such as ``BF16``. KeyError for an unknown code."""
    return _CODE_TO_DTYPE[code]


def code_of(dtype: mx.Dtype) -> str:
    """The safetensors code of an mlx dtype. UnsupportedLayoutError when it has none."""
    if (code := _DTYPE_TO_CODE.get(dtype)) is None:
        raise UnsupportedLayoutError(f"arrays of {dtype} cannot be stored")
    return code


def bytes_of(array: mx.array) -> memoryview:
    """The memory of an evaluated, row-contiguous array as unsigned bytes: no copy, and writable.

    The view keeps the array alive. It sees what is written to the array in place, so a view of a
    buffer that a cache still appends to must never be handed out.
    """
    # The cast refuses an array without elements.
    return memoryview(cast(Any, array)).cast("B") if array.size else _EMPTY


def finite_flag(array: mx.array) -> mx.array | None:
    """A lazy scalar, true when every element is finite; None for a dtype that always is."""
    if (bits := _FLOAT_BITS.get(array.dtype)) is None or not array.size:
        return mx.isfinite(array).all() if mx.issubdtype(array.dtype, mx.inexact) else None
    signed, unsigned, infinity, sign = bits
    largest, lowest = mx.view(array, signed).max(), mx.view(array, unsigned).max()
    return mx.logical_and(largest < infinity, lowest < infinity + sign)


class MutableAssembly:
    """The buffers of one restore while they fill.

    Invariants:
    - no cache object knows a buffer before ``finish``, which hands all of them out, once;
    - every byte that is not asked for stays zero, so the tail behind the endpoint is deterministic;
    - a row of KV and a slot are each given out once, and ``finish`` refuses when one was not.

    One owner: the thread that made it calls every method, until another takes it with
    ``hand_over``. The segments that it gives out may be
    filled on other threads; those must be done, and must have let go of them, before ``finish``.
    """

    def __init__(self, layout: Layout, *, endpoint: int, capacity_tokens: int) -> None:
        """Allocate everything: KV as (1, heads, capacity, width), slots as the layout says.

        Capacity is ``capacity_tokens``, at least ``endpoint``, rounded up to 256. Ask for the whole
        prompt and some answer: the first append within the capacity copies nothing.
        """
        if endpoint < 1:
            raise ValueError(f"{endpoint} is no endpoint")
        steps = -(-max(capacity_tokens, endpoint) // CAPACITY_STEP_TOKENS)
        self.endpoint = endpoint
        self.capacity_tokens = steps * CAPACITY_STEP_TOKENS
        self._layout = layout
        self._kv = dict(_kv_parts(layout))
        self._slots = {spec.name: spec for spec in layout.point_specs()}
        self._owner = threading.get_ident()
        self._buffers = self._allocate()
        # Sorted, apart from each other: a million tokens are 4,000 blocks for each of 100 tensors.
        self._rows_given: dict[str, list[tuple[int, int]]] = {name: [] for name in self._kv}
        self._slots_given: set[str] = set()
        self._finished = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated, headroom included."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def hand_over(self) -> None:
        """Make the calling thread the owner. Every buffer is evaluated, so it belongs to none."""
        self._owner = threading.get_ident()

    def block_segments(self, spec: TensorSpec, *, start: int, end: int) -> list[memoryview]:
        """Where the payload of one tensor of the block ``start:end`` goes, in the payload's order.

        The tensor is (1, heads, end - start, width): one segment for each head, none when it has no
        bytes. PayloadDamagedError when the tensor is not what the layout says.
        """
        self._require_open()
        if not 0 <= start < end <= self.endpoint:
            raise ValueError(f"tokens {start}:{end} are not below the endpoint {self.endpoint}")
        if (part := self._kv.get(spec.name)) is None:
            raise PayloadDamagedError(f"{spec.name} is not in the KV of this layout")
        rows = end - start
        _require_same(spec, dtype=part.dtype, shape=(1, part.heads, rows, part.width))
        self._give_out_rows(spec.name, start, end)
        if spec.nbytes == 0:
            return []
        view = bytes_of(self._buffers[spec.name])
        row_nbytes = spec.nbytes // (part.heads * rows)
        starts = (row_nbytes * (head * self.capacity_tokens + start) for head in range(part.heads))
        return [view[first : first + rows * row_nbytes] for first in starts]

    def point_segments(self, spec: TensorSpec) -> list[memoryview]:
        """Where the payload of one slot goes: one segment, none when it has no bytes.

        PayloadDamagedError when the tensor is not what the layout says.
        """
        self._require_open()
        if (wanted := self._slots.get(spec.name)) is None:
            raise PayloadDamagedError(f"{spec.name} is not in the point state of this layout")
        _require_same(spec, dtype=wanted.dtype, shape=wanted.shape)
        if spec.name in self._slots_given:
            raise ValueError(f"{spec.name} was given out before")
        self._slots_given.add(spec.name)
        return [bytes_of(self._buffers[spec.name])] if spec.nbytes else []

    def finish(self, make_cache: Callable[[], list[Any]]) -> list[Any]:
        """Fresh cache objects, filled, at the endpoint; the assembly then holds no buffer any more.

        ``make_cache`` makes them as ``make_prompt_cache`` does. PayloadDamagedError when a part of
        the state was never asked for or a slot is not finite; UnsupportedLayoutError when the
        objects do not have the layout. A failure costs the caller nothing but the assembly.
        """
        self._require_open()
        self._require_complete()
        self._require_finite()
        cache = make_cache()
        leaves = dict(_walk(cache))
        if list(leaves) != [leaf.path for leaf in self._layout.leaves]:
            raise UnsupportedLayoutError(
                f"the fresh cache has leaves {', '.join(leaves)}, not those of the layout"
            )
        for leaf in self._layout.leaves:
            match leaf:
                case KVLeaf():
                    self._fill_kv(leaf, leaves[leaf.path])
                case ArraysLeaf():
                    self._fill_arrays(leaf, leaves[leaf.path])
        # A buffer that two objects hold would be copied by the first append.
        self._buffers = {}
        self._finished = True
        return cache

    def _allocate(self) -> dict[str, mx.array]:
        buffers = {
            name: mx.zeros(spec.shape, dtype_of(spec.dtype)) for name, spec in self._slots.items()
        }
        for name, part in self._kv.items():
            shape = (1, part.heads, self.capacity_tokens, part.width)
            buffers[name] = mx.zeros(shape, dtype_of(part.dtype))
        mx.eval(buffers)
        return buffers

    def _give_out_rows(self, name: str, start: int, end: int) -> None:
        given = self._rows_given[name]
        at = bisect_left(given, (start, end))
        follows = at == 0 or given[at - 1][1] <= start
        precedes = at == len(given) or end <= given[at][0]
        if not (follows and precedes):
            raise ValueError(f"{name}: some of the tokens {start}:{end} were given out before")
        given.insert(at, (start, end))

    def _fill_kv(self, leaf: KVLeaf, target: Any) -> None:
        _require_attributes(leaf.path, target, ("keys", "values", "offset"))
        for role, rows in (("keys", leaf.keys), ("values", leaf.values)):
            _require_precision(leaf.path, target, rows)
            buffers = [self._buffers[name] for name, _ in rows.arrays(f"{leaf.path}/{role}")]
            # As mlx-lm has it: an array, or a tuple of what mx.quantize gives.
            setattr(target, role, buffers[0] if isinstance(rows, PerToken) else tuple(buffers))
        target.offset = self.endpoint

    def _fill_arrays(self, leaf: ArraysLeaf, target: Any) -> None:
        _require_attributes(leaf.path, target, ("cache",))
        if len(target.cache) != len(leaf.slots):
            raise UnsupportedLayoutError(
                f"leaf {leaf.path} has {len(target.cache)} slots, not {len(leaf.slots)}"
            )
        names = (f"{leaf.path}/slot{index}" for index in range(len(leaf.slots)))
        target.cache = [self._buffers.get(name) for name in names]

    def _require_open(self) -> None:
        assert not self._finished, "the buffers belong to the cache since finish"
        assert threading.get_ident() == self._owner, "only the thread that owns it may call it"

    def _require_complete(self) -> None:
        if missing := self._slots.keys() - self._slots_given:
            raise PayloadDamagedError(f"{min(missing)} is in no sidecar that was read")
        for name, given in self._rows_given.items():
            covered = 0
            for start, end in given:
                if start != covered:
                    break
                covered = end
            if covered != self.endpoint:
                raise PayloadDamagedError(
                    f"{name} has tokens 0:{covered} of 0:{self.endpoint}; the next block is missing"
                )

    def _require_finite(self) -> None:
        flags = {
            name: flag
            for name in self._slots
            if (flag := finite_flag(self._buffers[name])) is not None
        }
        mx.eval(flags)
        for name, flag in flags.items():
            if not flag.item():
                raise PayloadDamagedError(f"{name} holds a value that is not finite")


def _kv_parts(layout: Layout) -> Iterator[tuple[str, PerToken]]:
    for leaf in layout.leaves:
        if isinstance(leaf, KVLeaf):
            yield from leaf.arrays()


def _walk(cache: list[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf with its path. By attribute: mlx-lm's classes are ``integration``'s business."""
    for index, entry in enumerate(cache):
        path = f"{prefix}{index}"
        if hasattr(entry, "caches"):
            yield from _walk(list(entry.caches), f"{path}.")
        else:
            yield path, entry


def _require_attributes(path: str, target: Any, attributes: tuple[str, ...]) -> None:
    if missing := [name for name in attributes if not hasattr(target, name)]:
        raise UnsupportedLayoutError(
            f"leaf {path} is a {type(target).__name__} without {', '.join(missing)}"
        )


def _require_precision(path: str, target: Any, rows: Rows) -> None:
    """A quantised cache says its bits and its group size, any other has neither."""
    found = (getattr(target, "bits", None), getattr(target, "group_size", None))
    is_quantised = isinstance(rows, QuantisedRows)
    if found != ((rows.bits, rows.group_size) if is_quantised else (None, None)):
        raise UnsupportedLayoutError(
            f"leaf {path} is a {type(target).__name__} of other bits than the layout's {rows}"
        )


def _require_same(spec: TensorSpec, *, dtype: str, shape: tuple[int, ...]) -> None:
    if (spec.dtype, spec.shape) != (dtype, shape):
        raise PayloadDamagedError(f"{spec.name} is {spec.dtype} {spec.shape}, not {dtype} {shape}")
