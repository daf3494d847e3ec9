"""Captured bytes are the cache's, private for ever, and refused when the cache is not sound."""

# mlx's stubs and mlx-lm's caches leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from walkback.integration.capture import CaptureRefusedError, capture
from walkback.integration.leaves import layout_of
from walkback.restore.materialise import bytes_of
from walkback.store.tensors import Tensor

# Rows of 512 bytes, and one head, so that a slice of rows is contiguous: mlx then shares the buffer
# when at most 16 kB, 32 rows, are left out, and copies otherwise.
HEADS, WIDTH = 1, 128


def rows(first: int, count: int) -> mx.array:
    """(1, HEADS, count, WIDTH), each element telling its token."""
    tokens = mx.arange(first, first + count, dtype=mx.float32).reshape(1, 1, count, 1)
    return mx.contiguous(mx.broadcast_to(tokens, (1, HEADS, count, WIDTH)))


def append(leaf: KVCache, count: int) -> None:
    new = rows(int(leaf.offset), count)
    leaf.update_and_fetch(new, -new)
    mx.eval(leaf.keys, leaf.values)


def kv(count: int) -> KVCache:
    leaf = KVCache()
    append(leaf, count)
    return leaf


def arrays(*slots: mx.array | None) -> ArraysCache:
    leaf = ArraysCache(len(slots))
    leaf.cache = list(slots)
    return leaf


def contents(tensors: tuple[Tensor, ...]) -> dict[str, bytes]:
    return {tensor.spec.name: bytes(tensor.buffer) for tensor in tensors}


def address_of(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def keys_of(leaf: KVCache) -> memoryview:
    return bytes_of(cast(mx.array, leaf.keys))


def test_a_block_holds_the_rows_of_its_tokens() -> None:
    cache = [CacheList(kv(300))]

    captured = capture(
        cache, layout_of(cache), position=300, ranges=[(0, 256), (256, 300)], with_point=False
    )

    keys = rows(256, 44)
    mx.eval(keys)
    assert [tensor.spec.name for tensor in captured.blocks[0]] == ["0.0/keys", "0.0/values"]
    assert captured.blocks[1][0].spec.shape == (1, HEADS, 44, WIDTH)
    assert captured.blocks[1][0].buffer == bytes_of(keys)
    assert captured.point == ()


def test_the_sizes_known_beforehand_are_those_captured() -> None:
    cache = [kv(300), arrays(mx.ones((1, 3, 8), mx.bfloat16), None)]
    layout = layout_of(cache)

    captured = capture(cache, layout, position=300, ranges=[(256, 300)], with_point=True)

    assert sum(t.buffer.nbytes for t in captured.blocks[0]) == layout.block_nbytes(256, 300)
    assert sum(t.buffer.nbytes for t in captured.point) == layout.point_nbytes()


@pytest.mark.parametrize("position", [8, 250, 256, 512], ids=lambda n: f"at {n}")
def test_appending_to_the_live_cache_never_changes_captured_bytes(position: int) -> None:
    """At 250 and 256 the rows are within 16 kB of the whole buffer, and mlx shares the memory."""
    leaf = kv(position)
    cache = [leaf]
    captured = capture(
        cache, layout_of(cache), position=position, ranges=[(0, position)], with_point=False
    )
    before = contents(captured.blocks[0])

    append(leaf, 3)
    leaf.offset = 2
    append(leaf, 4)

    assert contents(captured.blocks[0]) == before


def test_a_block_near_the_whole_buffer_shares_it_until_the_live_cache_writes() -> None:
    """The dangerous case of the test above does occur; without it that test would prove nothing."""
    leaf = kv(250)
    cache = [leaf]

    captured = capture(cache, layout_of(cache), position=250, ranges=[(0, 250)], with_point=False)

    shared = captured.blocks[0][0].buffer
    assert address_of(shared) == address_of(keys_of(leaf))
    append(leaf, 1)
    assert address_of(shared) != address_of(keys_of(leaf))


def test_writing_in_place_to_live_point_state_never_changes_captured_bytes() -> None:
    leaf = arrays(mx.ones((1, 3, 8)))
    cache = [leaf]
    captured = capture(cache, layout_of(cache), position=1, ranges=[], with_point=True)
    before = contents(captured.point)

    state: Any = leaf.cache[0]
    state[:, 0, :] = 5
    state += 1
    mx.eval(state)

    assert state.sum().item() == 8 * (6 + 2 + 2)
    assert contents(captured.point) == before


def test_captured_bytes_cannot_be_written_to() -> None:
    """They may be the live cache's own memory, so a writer with a pen would be one too many."""
    cache = [kv(8), arrays(mx.ones((1, 3)))]
    captured = capture(cache, layout_of(cache), position=8, ranges=[(0, 8)], with_point=True)

    for tensor in (*captured.blocks[0], *captured.point):
        assert tensor.buffer.readonly
        with pytest.raises(TypeError):
            tensor.buffer[0] = 1


def test_a_captured_view_does_not_pin_the_chunk_it_was_cut_from() -> None:
    """Models keep convolution windows as views of a whole chunk; holding them held megabytes."""
    chunk = mx.ones((1, 2048, 1024))
    mx.eval(chunk)
    cache = [arrays(chunk[:, -3:, :])]
    mx.eval(cache[0].cache)
    layout = layout_of(cache)
    held = mx.get_active_memory()

    captured = capture(cache, layout, position=2048, ranges=[], with_point=True)
    cache.clear()
    del chunk

    assert held - mx.get_active_memory() > 2040 * 1024 * 4
    assert captured.point[0].buffer.nbytes == 3 * 1024 * 4


def test_a_captured_block_does_not_pin_the_buffer_it_was_cut_from() -> None:
    cache = [kv(2048)]
    layout = layout_of(cache)
    held = mx.get_active_memory()

    captured = capture(cache, layout, position=2048, ranges=[(0, 256)], with_point=False)
    cache.clear()

    freed = held - mx.get_active_memory()
    assert freed >= layout.block_nbytes(0, 2048) - layout.block_nbytes(0, 256) - 4096
    assert captured.blocks[0][0].buffer.nbytes == HEADS * 256 * WIDTH * 4


def test_capturing_does_not_make_the_next_append_copy_the_live_buffer() -> None:
    leaf = kv(2040)
    cache = [leaf]
    captured = capture(cache, layout_of(cache), position=2040, ranges=[(0, 256)], with_point=False)
    before = address_of(keys_of(leaf))

    append(leaf, 1)

    assert address_of(keys_of(leaf)) == before
    assert captured.blocks[0][0].spec.shape[2] == 256


def test_arrays_without_elements_and_integers_are_captured() -> None:
    cache = [arrays(mx.zeros((1, 0, 8)), None, mx.array([[2**60, -3]], mx.int64))]

    captured = capture(cache, layout_of(cache), position=4, ranges=[(0, 4)], with_point=True)

    assert contents(captured.point) == {
        "0/slot0": b"",
        "0/slot2": (2**60).to_bytes(8, "little") + (-3).to_bytes(8, "little", signed=True),
    }
    assert captured.blocks == ((),)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_point_state_that_is_not_finite_is_refused(bad: float, dtype: mx.Dtype) -> None:
    state = mx.zeros((1, 2, 3), dtype)
    state[0, 1, 2] = bad
    cache = [kv(4), arrays(mx.ones((1, 3)), state)]

    with pytest.raises(CaptureRefusedError, match="1/slot1") as refused:
        capture(cache, layout_of(cache), position=4, ranges=[(0, 4)], with_point=True)

    assert refused.value.reason == "non_finite"


def test_kv_alone_is_captured_beside_point_state_that_is_not_asked_for() -> None:
    cache = [kv(4), arrays(mx.array([[float("nan")]]))]

    captured = capture(cache, layout_of(cache), position=4, ranges=[(0, 4)], with_point=False)

    assert len(captured.blocks[0]) == 2


def test_layers_that_disagree_on_the_position_are_refused() -> None:
    """State of position 1832 was once stored under the key of 1831."""
    cache = [kv(1832), kv(1831)]

    with pytest.raises(CaptureRefusedError, match="leaf 0 stands at 1832") as refused:
        capture(cache, layout_of(cache), position=1831, ranges=[(0, 256)], with_point=True)

    assert refused.value.reason == "position"


def test_another_layout_than_the_bound_one_is_refused_by_its_field() -> None:
    bound = layout_of([kv(4), arrays(mx.ones((1, 3)))])
    cache = [kv(4), arrays(mx.ones((1, 3), mx.bfloat16))]

    with pytest.raises(CaptureRefusedError, match=r"leaf 1: slot 0 F32 .* BF16") as refused:
        capture(cache, bound, position=4, ranges=[(0, 4)], with_point=True)

    assert refused.value.reason == "layout"


def test_a_cache_that_no_token_went_through_is_refused() -> None:
    bound = layout_of([kv(4)])

    with pytest.raises(CaptureRefusedError) as refused:
        capture([KVCache()], bound, position=4, ranges=[(0, 4)], with_point=True)

    assert refused.value.reason == "layout"


def test_a_range_beyond_the_position_is_an_error_of_the_caller() -> None:
    cache = [kv(4)]

    with pytest.raises(ValueError, match="0:5"):
        capture(cache, layout_of(cache), position=4, ranges=[(0, 5)], with_point=False)
