"""What is stored: the cache of a hybrid model at one stop, in the shapes of a real one."""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from walkback.journal.words import Kind
from walkback.restore.identity import Chain
from walkback.restore.layout import ArraysLeaf, KVLeaf, Layout, Leaf, PerToken, Slot
from walkback.restore.materialise import bytes_of, dtype_of
from walkback.restore.plan import Grid, plan_after, plan_start
from walkback.store.boundary import Boundary, Part
from walkback.store.tensors import Tensor

GRID = Grid()
STOP = GRID.checkpoint_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """A hybrid: of each four layers, three keep a state and one keeps KV."""

    layers: int
    state_heads: int
    state_width: int
    convolution: int
    kv_heads: int
    kv_width: int

    def layout(self, *, with_kv: bool) -> Layout:
        """The whole layout, or that of the point state alone."""
        leaves: list[Leaf] = []
        for index in range(self.layers):
            if index % 4 < 3:
                state = (1, self.state_heads, self.state_width, self.state_width)
                slots = (
                    Slot(dtype="BF16", shape=(1, 3, self.convolution)),
                    Slot(dtype="F32", shape=state),
                )
                leaves.append(ArraysLeaf(path=str(len(leaves)), slots=slots))
            elif with_kv:
                part = PerToken(heads=self.kv_heads, width=self.kv_width, dtype="BF16")
                leaves.append(KVLeaf(path=str(len(leaves)), keys=part, values=part))
        return Layout(leaves=tuple(leaves))


# Qwen3.6-27B: 153,944,064 bytes of state at each stop, and 16.8 MB of KV in each block.
QWEN3_6_27B = Shapes(
    layers=64, state_heads=48, state_width=128, convolution=10240, kv_heads=4, kv_width=256
)
SMALL = Shapes(layers=8, state_heads=4, state_width=64, convolution=512, kv_heads=2, kv_width=32)


def live_cache(layout: Layout) -> list[Any]:
    """Cache objects that stand at ``STOP``, with random values."""
    cache = fresh_cache(layout)
    for leaf, target in zip(layout.leaves, cache, strict=True):
        match leaf:
            case KVLeaf(keys=PerToken() as part):
                target.keys, target.values = (
                    mx.random.normal((1, part.heads, STOP, part.width)).astype(dtype_of(part.dtype))
                    for _ in range(2)
                )
                target.offset = STOP
            case KVLeaf():
                raise AssertionError("the shapes of the benchmarks have no quantised KV")
            case ArraysLeaf(slots=slots):
                target.cache = [
                    mx.random.normal(slot.shape).astype(dtype_of(slot.dtype))
                    for slot in slots
                    if slot is not None
                ]
    mx.eval(arrays_of(cache))
    return cache


def fresh_cache(layout: Layout) -> list[Any]:
    """Cache objects as mlx-lm makes them, empty."""
    return [
        KVCache() if isinstance(leaf, KVLeaf) else ArraysCache(len(leaf.slots))
        for leaf in layout.leaves
    ]


def arrays_of(cache: Sequence[Any]) -> dict[str, mx.array]:
    """Every array of a cache, by the name that its tensor has."""
    arrays: dict[str, mx.array] = {}
    for index, leaf in enumerate(cache):
        if isinstance(leaf, KVCache):
            parts: dict[str, Any] = {"keys": leaf.keys, "values": leaf.values}
        else:
            parts = {f"slot{slot}": array for slot, array in enumerate(leaf.cache)}
        arrays |= {f"{index}/{part}": array for part, array in parts.items()}
    return arrays


def point_tensors(layout: Layout, cache: Sequence[Any]) -> list[Tensor]:
    """The point state as the bytes that a store takes."""
    arrays = arrays_of(cache)
    return [Tensor(spec=each, buffer=bytes_of(arrays[each.name])) for each in layout.point_specs()]


def random_chain(namespace: bytes, secret: bytes) -> Chain:
    """The blocks of a prompt that nobody has seen, up to ``STOP``."""
    token_ids = [random.getrandbits(17) for _ in range(STOP)]
    return Chain(token_ids, namespace=namespace, secret=secret, block_tokens=GRID.block_tokens)


def stop_of(layout: Layout, namespace: bytes, chain: Chain) -> Boundary:
    """The first stop of a prompt: its blocks, which are records only without KV, and a sidecar."""
    parts = [
        Part(
            kind=Kind.BLOCK,
            key=link.key,
            parent=link.parent,
            start=link.start,
            end=link.end,
            tensors=layout.block_specs(link.start, link.end),
        )
        for link in chain.links
    ]
    tip = parts[-1]
    parts.append(
        Part(
            kind=Kind.SIDECAR,
            key=tip.key,
            parent=tip.parent,
            start=STOP,
            end=STOP,
            tensors=layout.point_specs(),
        )
    )
    return Boundary(
        namespace=namespace,
        layout_digest=layout.digest(),
        plan_digest=plan_after(plan_start(GRID), STOP),
        position=STOP,
        parts=tuple(parts),
    )


def drop_from_page_cache(path: Path) -> None:
    """Have the next read of a synced file come from the disk. Linux only."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
