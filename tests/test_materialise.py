"""An assembly turns segments filled by anybody into cache objects, or into nothing at all."""

# mlx's stubs leave the arguments of eval untyped, and mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from walkback.integration.capture import capture
from walkback.integration.leaves import layout_of, position_of
from walkback.journal.errors import PayloadDamagedError, UnsupportedLayoutError
from walkback.restore.layout import Layout
from walkback.restore.materialise import MutableAssembly, bytes_of
from walkback.store.tensors import Tensor, TensorSpec

ENDPOINT = 300
RANGES = [(0, 256), (256, 300)]


def make_cache() -> list[Any]:
    return [CacheList(ArraysCache(3), KVCache()), ArraysCache(0), KVCache()]


def filled_cache() -> list[Any]:
    """A cache of random contents: unequal keys and values, an empty slot, one without elements."""
    cache = make_cache()
    cache[0][0].cache = [normal(1, 3, 8), None, mx.zeros((1, 0, 8))]
    cache[0][1].update_and_fetch(normal(1, 2, ENDPOINT, 8), normal(1, 2, ENDPOINT, 4))
    cache[2].update_and_fetch(normal(1, 1, ENDPOINT, 16), normal(1, 1, ENDPOINT, 0))
    mx.eval([leaf.state for leaf in (cache[0][0], cache[0][1], cache[2])])
    return cache


def normal(*shape: int) -> mx.array:
    source = np.random.default_rng(sum(shape))
    return mx.array(source.standard_normal(shape, np.float32)).astype(mx.bfloat16)


def fill(segments: list[memoryview], tensor: Tensor) -> None:
    offset = 0
    for segment in segments:
        segment[:] = tensor.buffer[offset : offset + segment.nbytes]
        offset += segment.nbytes
    assert offset == tensor.spec.nbytes


def assembled(layout: Layout, cache: list[Any], *, capacity_tokens: int = 1000) -> MutableAssembly:
    stored = capture(cache, layout, position=ENDPOINT, ranges=RANGES, with_point=True)
    assembly = MutableAssembly(layout, endpoint=ENDPOINT, capacity_tokens=capacity_tokens)
    for (start, end), block in zip(RANGES, stored.blocks, strict=True):
        for tensor in block:
            fill(assembly.block_segments(tensor.spec, start=start, end=end), tensor)
    for tensor in stored.point:
        fill(assembly.point_segments(tensor.spec), tensor)
    return assembly


def contents(cache: list[Any], layout: Layout) -> list[bytes]:
    stored = capture(cache, layout, position=ENDPOINT, ranges=[(0, ENDPOINT)], with_point=True)
    return [bytes(tensor.buffer) for tensor in (*stored.blocks[0], *stored.point)]


def test_a_restored_cache_holds_the_bytes_that_were_captured() -> None:
    live = filled_cache()
    layout = layout_of(live)

    restored = assembled(layout, live).finish(make_cache)

    assert contents(restored, layout) == contents(live, layout)
    assert position_of(restored) == ENDPOINT
    assert layout_of(restored) == layout
    assert restored[0][0].cache[1] is None


def quantised_cache(*, filled: bool, bits: int = 4) -> list[Any]:
    """Keys and values of other widths, beside a leaf that mlx-lm does not quantise."""
    cache: list[Any] = [KVCache(), CacheList(KVCache(), ArraysCache(1))]
    if filled:
        cache[0].update_and_fetch(normal(1, 2, ENDPOINT, 64), normal(1, 2, ENDPOINT, 32))
        cache[1][0].update_and_fetch(normal(1, 1, ENDPOINT, 8), normal(1, 1, ENDPOINT, 8))
        cache[1][1].cache = [normal(1, 3, 8)]
    maybe_quantize: Any = maybe_quantize_kv_cache
    maybe_quantize(cache, quantized_kv_start=0, kv_group_size=32, kv_bits=bits)
    return cache


def test_a_restored_quantised_cache_holds_the_bytes_that_mlx_lm_made_and_goes_on_as_it() -> None:
    live = quantised_cache(filled=True)
    layout = layout_of(live)

    restored = assembled(layout, live).finish(lambda: quantised_cache(filled=False))

    assert contents(restored, layout) == contents(live, layout)
    assert position_of(restored) == ENDPOINT
    assert layout_of(restored) == layout
    more = normal(1, 2, 40, 64), normal(1, 2, 40, 32)
    kept, other = (each[0].update_and_fetch(*more) for each in (live, restored))
    for one, two in zip((*kept[0], *kept[1]), (*other[0], *other[1]), strict=True):
        assert mx.array_equal(one, two)


def test_what_a_quantised_cache_does_after_its_capture_never_reaches_the_stored_bytes() -> None:
    live = quantised_cache(filled=True)
    stored = capture(live, layout_of(live), position=ENDPOINT, ranges=RANGES, with_point=False)
    before = [bytes(tensor.buffer) for block in stored.blocks for tensor in block]

    live[0].trim(100)
    mx.eval(live[0].update_and_fetch(normal(1, 2, 90, 64), normal(1, 2, 90, 32)))

    assert [bytes(tensor.buffer) for block in stored.blocks for tensor in block] == before


@pytest.mark.parametrize(
    "make_other",
    [
        lambda: [KVCache(), CacheList(KVCache(), ArraysCache(1))],
        lambda: quantised_cache(filled=False, bits=8),
    ],
    ids=["as it is", "other bits"],
)
def test_a_quantised_leaf_goes_into_no_cache_of_another_form(
    make_other: Callable[[], list[Any]],
) -> None:
    live = quantised_cache(filled=True)

    with pytest.raises(UnsupportedLayoutError, match="other bits"):
        assembled(layout_of(live), live).finish(make_other)


def test_kv_as_it_is_goes_into_no_quantised_cache() -> None:
    live: list[Any] = [KVCache()]
    live[0].update_and_fetch(normal(1, 2, ENDPOINT, 64), normal(1, 2, ENDPOINT, 64))

    with pytest.raises(UnsupportedLayoutError, match="other bits"):
        assembled(layout_of(live), live).finish(lambda: [QuantizedKVCache(32, 4)])


def test_segments_may_be_filled_on_another_thread() -> None:
    live = filled_cache()
    layout = layout_of(live)
    stored = capture(live, layout, position=ENDPOINT, ranges=[(0, ENDPOINT)], with_point=True)
    assembly = MutableAssembly(layout, endpoint=ENDPOINT, capacity_tokens=ENDPOINT)
    work = [
        (assembly.block_segments(tensor.spec, start=0, end=ENDPOINT), tensor)
        for tensor in stored.blocks[0]
    ] + [(assembly.point_segments(tensor.spec), tensor) for tensor in stored.point]

    def read() -> None:
        for segments, tensor in work:
            fill(segments, tensor)

    reader = threading.Thread(target=read)
    reader.start()
    reader.join()
    restored = assembly.finish(make_cache)

    assert contents(restored, layout) == contents(live, layout)


def test_the_capacity_is_rounded_up_and_its_tail_is_zero() -> None:
    live = filled_cache()
    layout = layout_of(live)

    assembly = assembled(layout, live, capacity_tokens=ENDPOINT + 1)
    keys = assembly.finish(make_cache)[0][1].keys

    assert (assembly.capacity_tokens, keys.shape) == (512, (1, 2, 512, 8))
    assert not keys[:, :, ENDPOINT:, :].any().item()


def test_the_first_append_after_a_restore_does_not_copy_the_buffers() -> None:
    live = filled_cache()
    leaf = assembled(layout_of(live), live).finish(make_cache)[0][1]
    before = address_of(leaf.keys), address_of(leaf.values)

    leaf.update_and_fetch(normal(1, 2, 40, 8), normal(1, 2, 40, 4))
    mx.eval(leaf.keys, leaf.values)

    assert leaf.offset == ENDPOINT + 40
    assert (address_of(leaf.keys), address_of(leaf.values)) == before


def address_of(array: mx.array) -> int:
    return np.frombuffer(bytes_of(array), np.uint8).ctypes.data


def test_what_a_restored_cache_does_never_reaches_the_stored_bytes() -> None:
    live = filled_cache()
    layout = layout_of(live)
    stored = capture(live, layout, position=ENDPOINT, ranges=RANGES, with_point=True)
    before = [bytes(tensor.buffer) for tensor in (*stored.blocks[1], *stored.point)]
    restored = assembled(layout, live).finish(make_cache)

    restored[0][0].cache[0][:, 0] = 9
    restored[0][1].trim(100)
    restored[0][1].update_and_fetch(normal(1, 2, 50, 8), normal(1, 2, 50, 4))
    mx.eval(restored[0][0].cache[0], restored[0][1].keys)

    assert [bytes(tensor.buffer) for tensor in (*stored.blocks[1], *stored.point)] == before


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("2/values of 256:300", r"2/values has tokens 0:256 of 0:300"),
        ("0.1/keys of 0:256", r"0\.1/keys has tokens 0:0 of 0:300"),
        ("0.0/slot0", r"0\.0/slot0 is in no sidecar"),
        ("0.0/slot2", r"0\.0/slot2 is in no sidecar"),
    ],
)
def test_a_partial_set_of_layers_is_refused(left_out: str, message: str) -> None:
    """A damaged payload was once decoded against empty layers, and served."""
    layout = layout_of(filled_cache())
    assembly = MutableAssembly(layout, endpoint=ENDPOINT, capacity_tokens=ENDPOINT)
    for start, end in RANGES:
        for spec in layout.block_specs(start, end):
            if f"{spec.name} of {start}:{end}" != left_out:
                assembly.block_segments(spec, start=start, end=end)
    for spec in layout.point_specs():
        if spec.name != left_out:
            assembly.point_segments(spec)

    with pytest.raises(PayloadDamagedError, match=message):
        assembly.finish(make_cache)


def test_point_state_that_is_not_finite_is_refused_by_its_name() -> None:
    live = filled_cache()
    layout = layout_of(live)
    assembly = MutableAssembly(layout, endpoint=ENDPOINT, capacity_tokens=ENDPOINT)
    for spec in layout.block_specs(0, ENDPOINT):
        assembly.block_segments(spec, start=0, end=ENDPOINT)
    for spec in layout.point_specs():
        for segment in assembly.point_segments(spec):
            segment[6:8] = b"\xc0\x7f"

    with pytest.raises(PayloadDamagedError, match=r"0\.0/slot0 .* not finite"):
        assembly.finish(make_cache)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(name="0.1/keys", dtype="F16", shape=(1, 2, 256, 8)),
        TensorSpec(name="0.1/keys", dtype="BF16", shape=(1, 2, 255, 8)),
        TensorSpec(name="0.1/keys", dtype="BF16", shape=(1, 2, 256, 4)),
        TensorSpec(name="7/keys", dtype="BF16", shape=(1, 2, 256, 8)),
        TensorSpec(name="0.0/slot0", dtype="BF16", shape=(1, 3, 8)),
    ],
    ids=["dtype", "rows", "width", "unknown leaf", "point state in a block"],
)
def test_a_tensor_that_the_layout_does_not_have_is_refused(spec: TensorSpec) -> None:
    layout = layout_of(filled_cache())
    assembly = MutableAssembly(layout, endpoint=ENDPOINT, capacity_tokens=ENDPOINT)

    with pytest.raises(PayloadDamagedError, match=spec.name):
        assembly.block_segments(spec, start=0, end=256)


def test_a_slot_of_another_shape_is_refused() -> None:
    layout = layout_of(filled_cache())
    assembly = MutableAssembly(layout, endpoint=ENDPOINT, capacity_tokens=ENDPOINT)

    with pytest.raises(PayloadDamagedError, match=r"0\.0/slot0"):
        assembly.point_segments(TensorSpec(name="0.0/slot0", dtype="BF16", shape=(1, 3, 9)))


@pytest.mark.parametrize(
    ("first", "second"),
    [((0, 256), (255, 300)), ((256, 300), (0, 257)), ((256, 300), (256, 300)), ((9, 10), (0, 300))],
)
def test_rows_are_never_given_out_twice(first: tuple[int, int], second: tuple[int, int]) -> None:
    layout = layout_of(filled_cache())
    assembly = MutableAssembly(layout, endpoint=ENDPOINT, capacity_tokens=ENDPOINT)
    assembly.block_segments(layout.block_specs(*first)[0], start=first[0], end=first[1])

    with pytest.raises(ValueError, match="before"):
        assembly.block_segments(layout.block_specs(*second)[0], start=second[0], end=second[1])


def test_a_slot_is_never_given_out_twice() -> None:
    layout = layout_of(filled_cache())
    assembly = MutableAssembly(layout, endpoint=ENDPOINT, capacity_tokens=ENDPOINT)
    assembly.point_segments(layout.point_specs()[0])

    with pytest.raises(ValueError, match="before"):
        assembly.point_segments(layout.point_specs()[0])


def test_blocks_may_be_asked_for_in_any_order() -> None:
    layout = layout_of(filled_cache())
    assembly = MutableAssembly(layout, endpoint=ENDPOINT, capacity_tokens=ENDPOINT)
    for start, end in ((100, 200), (200, 300), (0, 100)):
        for spec in layout.block_specs(start, end):
            assembly.block_segments(spec, start=start, end=end)
    for spec in layout.point_specs():
        assembly.point_segments(spec)

    assert position_of(assembly.finish(make_cache)) == ENDPOINT


def test_rows_beyond_the_endpoint_are_not_given_out() -> None:
    layout = layout_of(filled_cache())
    assembly = MutableAssembly(layout, endpoint=ENDPOINT, capacity_tokens=1000)

    with pytest.raises(ValueError, match="endpoint"):
        assembly.block_segments(layout.block_specs(256, 301)[0], start=256, end=301)


@pytest.mark.parametrize(
    "other",
    [
        lambda: [KVCache(), ArraysCache(0), KVCache()],
        lambda: [CacheList(ArraysCache(2), KVCache()), ArraysCache(0), KVCache()],
        lambda: [CacheList(KVCache(), KVCache()), ArraysCache(0), KVCache()],
        lambda: [CacheList(ArraysCache(3), KVCache()), ArraysCache(0), ArraysCache(2)],
    ],
    ids=["other paths", "other arity", "kv for arrays", "arrays for kv"],
)
def test_fresh_objects_of_another_layout_are_refused(other: Callable[[], list[Any]]) -> None:
    live = filled_cache()

    with pytest.raises(UnsupportedLayoutError):
        assembled(layout_of(live), live).finish(other)


def test_the_size_of_an_assembly_includes_its_headroom() -> None:
    layout = layout_of(filled_cache())

    assembly = MutableAssembly(layout, endpoint=ENDPOINT, capacity_tokens=1000)

    assert assembly.nbytes == layout.block_nbytes(0, 1024) + layout.point_nbytes()
