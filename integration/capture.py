"""Cutting a live cache into blocks and point state, as bytes that nobody will write to."""

# mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from ..journal.errors import UnsupportedLayoutError, WalkbackError
from ..restore.layout import Layout
from ..restore.materialise import bytes_of, finite_flag
from ..store.tensors import Tensor, TensorSpec
from .leaves import arrays_of_kv, is_kv, layout_of, walk_leaves


class CaptureRefusedError(WalkbackError):
    """The cache must not be stored as it stands. ``reason`` is a field of events."""

    def __init__(self, reason: Literal["position", "layout", "non_finite"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One stop: the tensors of each range, and the point state, empty unless asked for."""

    blocks: tuple[tuple[Tensor, ...], ...]
    point: tuple[Tensor, ...]


def capture(
    cache: Sequence[Any],
    layout: Layout,
    *,
    position: int,
    ranges: Sequence[tuple[int, int]],
    with_point: bool,
) -> Captured:
    """The KV of each range of tokens and the point state, evaluated once for all.

    Call it on the thread that owns the arrays, with the cache exactly at ``position``; the bytes
    may then be read on any thread. They are read-only, later steps of the model never change them,
    and they pin at most 16 kB of a larger buffer each. CaptureRefusedError when a leaf stands
    elsewhere, the cache has another layout, or its point state is not finite.

    ``Layout.block_nbytes`` and ``Layout.point_nbytes`` tell the sizes beforehand.
    """
    for start, end in ranges:
        if not 0 <= start < end <= position:
            raise ValueError(f"tokens {start}:{end} are not below the position {position}")
    _require_layout(cache, layout)
    _require_position(cache, position)
    blocks = [_block_arrays(cache, layout, start, end) for start, end in ranges]
    point = _point_arrays(cache, layout) if with_point else []
    flags = {spec.name: flag for spec, a in point if (flag := finite_flag(a)) is not None}
    mx.eval([a for block in blocks for _, a in block], [a for _, a in point], flags)
    for name, flag in flags.items():
        if not flag.item():
            raise CaptureRefusedError("non_finite", f"{name} holds a value that is not finite")
    return Captured(
        blocks=tuple(tuple(_tensor(spec, a) for spec, a in block) for block in blocks),
        point=tuple(_tensor(spec, a) for spec, a in point),
    )


def _require_layout(cache: Sequence[Any], layout: Layout) -> None:
    try:
        found = layout_of(cache)
    except UnsupportedLayoutError as error:
        raise CaptureRefusedError("layout", str(error)) from error
    if (words := layout.difference(found)) is not None:
        raise CaptureRefusedError("layout", f"the cache has another layout: {words}")


def _require_position(cache: Sequence[Any], position: int) -> None:
    for path, leaf in walk_leaves(cache):
        if is_kv(leaf) and leaf.offset != position:
            raise CaptureRefusedError(
                "position", f"leaf {path} stands at {leaf.offset}, the tokens end at {position}"
            )


def _block_arrays(
    cache: Sequence[Any], layout: Layout, start: int, end: int
) -> list[tuple[TensorSpec, mx.array]]:
    # A slice is a view that pins the whole buffer and makes the next append copy it. contiguous()
    # copies the rows out; within 16 kB of the whole it shares the buffer instead, and then the
    # array made here counts as a user of it, so mlx copies before the next write in place.
    live = (array for _, leaf in walk_leaves(cache) if is_kv(leaf) for array in arrays_of_kv(leaf))
    return [
        (spec, mx.contiguous(array[:, :, start:end, :]))
        for spec, array in zip(layout.block_specs(start, end), live, strict=True)
    ]


def _point_arrays(cache: Sequence[Any], layout: Layout) -> list[tuple[TensorSpec, mx.array]]:
    # Many models keep a convolution window as a view of the last chunk; contiguous() frees the
    # chunk.
    live = (
        array
        for _, leaf in walk_leaves(cache)
        if not is_kv(leaf)
        for array in leaf.cache
        if array is not None
    )
    return [
        (spec, mx.contiguous(array)) for spec, array in zip(layout.point_specs(), live, strict=True)
    ]


def _tensor(spec: TensorSpec, array: mx.array) -> Tensor:
    # Read-only, since the memory may be the live cache's own.
    return Tensor(spec=spec, buffer=bytes_of(array).toreadonly())
