"""What a cache says about itself: its leaves, its layout, its position."""

# mlx's stubs and mlx-lm's generator leave arguments and results untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from zoo import CONFIGS, build, token_ids

from walkback.integration.leaves import (
    PositionsDisagreeError,
    layout_of,
    position_of,
    walk_leaves,
)
from walkback.integration.probe import learn_layout
from walkback.journal.errors import UnsupportedLayoutError
from walkback.restore.layout import ArraysLeaf, KVLeaf, Layout, PerToken, QuantisedRows, Slot
from walkback.restore.materialise import MutableAssembly


class OddCache(KVCache):
    """A class of someone else's that keeps its rows in its own way."""


class SizedArraysCache(ArraysCache):
    """A wrapper like those that servers put around the arrays of a restored cache."""


def kv(tokens: int = 5, *, batch: int = 1, width: int = 4) -> KVCache:
    leaf = KVCache()
    rows = mx.zeros((batch, 2, tokens, width), mx.bfloat16)
    leaf.update_and_fetch(rows, rows)
    return leaf


def arrays(*slots: mx.array | None, kind: type[ArraysCache] = ArraysCache) -> ArraysCache:
    leaf = kind(len(slots))
    leaf.cache = list(slots)
    return leaf


@pytest.mark.parametrize(
    "leaf",
    [
        RotatingKVCache(max_size=8),
        ChunkedKVCache(8),
        ConcatenateKVCache(),
        OddCache(),
        object(),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_a_leaf_of_another_kind_is_refused_by_its_class_and_path(leaf: object) -> None:
    with pytest.raises(UnsupportedLayoutError, match=rf"leaf 1\.0 is a {type(leaf).__name__};"):
        layout_of([kv(), CacheList(leaf, kv())])


def test_a_rotating_cache_is_refused_by_the_probe_too() -> None:
    model = build("llama")

    with pytest.raises(UnsupportedLayoutError, match="leaf 3 is a RotatingKVCache"):
        learn_layout(model, lambda: [KVCache(), KVCache(), KVCache(), RotatingKVCache(64)])


def test_a_nested_cache_list_gives_dotted_paths_in_order() -> None:
    cache = [CacheList(arrays(None), CacheList(kv(), arrays())), kv()]

    assert [path for path, _ in walk_leaves(cache)] == ["0.0", "0.1.0", "0.1.1", "1"]
    assert [leaf.path for leaf in layout_of(cache).leaves] == ["0.0", "0.1.0", "0.1.1", "1"]


@pytest.mark.parametrize(
    ("leaf", "slots"),
    [
        (arrays(), ()),
        (arrays(mx.zeros((1, 7), mx.int64)), (Slot(dtype="I64", shape=(1, 7)),)),
        (
            arrays(None, mx.zeros((1, 0, 8), mx.bfloat16)),
            (None, Slot(dtype="BF16", shape=(1, 0, 8))),
        ),
        (
            arrays(mx.zeros((1, 3)), None, None, mx.zeros((1, 2, 2), mx.float16)),
            (Slot(dtype="F32", shape=(1, 3)), None, None, Slot(dtype="F16", shape=(1, 2, 2))),
        ),
    ],
    ids=["no slots", "one of integers", "empty and zero size", "four, two empty"],
)
def test_arrays_of_any_arity_have_a_layout(
    leaf: ArraysCache, slots: tuple[Slot | None, ...]
) -> None:
    assert layout_of([leaf]) == Layout(leaves=(ArraysLeaf(path="0", slots=slots),))


def test_keys_and_values_may_differ_in_heads_and_width() -> None:
    leaf = KVCache()
    leaf.keys, leaf.values, leaf.offset = mx.zeros((1, 1, 8, 32)), mx.zeros((1, 2, 8, 0)), 3

    described = layout_of([leaf]).leaves[0]

    assert described == KVLeaf(
        path="0",
        keys=PerToken(heads=1, width=32, dtype="F32"),
        values=PerToken(heads=2, width=0, dtype="F32"),
    )


def test_quantised_keys_are_packed_with_a_scale_and_a_bias_for_each_group() -> None:
    leaf = kv(width=64).to_quantized(group_size=32, bits=4)

    described = layout_of([leaf]).leaves[0]

    packed = PerToken(heads=2, width=64 * 4 // 32, dtype="U32")
    of_groups = PerToken(heads=2, width=64 // 32, dtype="BF16")
    rows = QuantisedRows(bits=4, group_size=32, packed=packed, scales=of_groups, biases=of_groups)
    assert described == KVLeaf(path="0", keys=rows, values=rows)


def test_a_quantised_leaf_without_a_token_has_no_layout_yet() -> None:
    with pytest.raises(UnsupportedLayoutError, match="leaf 0: keys are not packed"):
        layout_of([QuantizedKVCache()])


def test_the_layout_ignores_offset_and_capacity() -> None:
    assert layout_of([kv(5)]).digest() == layout_of([kv(700)]).digest()


def test_a_subclass_of_the_arrays_cache_gives_the_same_digest() -> None:
    """Another server wrapped restored arrays in a class of its own, hashed the class's name into
    the layout, and never hit again."""
    array = mx.zeros((1, 3, 8))

    plain, sized = layout_of([arrays(array)]), layout_of([arrays(array, kind=SizedArraysCache)])

    assert sized.digest() == plain.digest()


@pytest.mark.parametrize("leaf", [KVCache(), kv(batch=2), arrays(mx.zeros((2, 3)))])
def test_a_leaf_that_is_not_of_one_sequence_with_tokens_is_refused(leaf: Any) -> None:
    with pytest.raises(UnsupportedLayoutError, match="leaf 0"):
        layout_of([leaf])


def test_a_slot_without_axes_is_refused() -> None:
    with pytest.raises(UnsupportedLayoutError, match="slot 0"):
        layout_of([arrays(mx.array(1.0))])


def test_a_cache_without_leaves_is_refused() -> None:
    with pytest.raises(UnsupportedLayoutError, match="no leaf"):
        layout_of([])


def test_the_position_is_the_one_offset_of_all_kv_leaves() -> None:
    assert position_of([kv(5), CacheList(arrays(None), kv(5))]) == 5


def test_a_cache_without_kv_has_no_position() -> None:
    assert position_of([arrays(mx.zeros((1, 3)))]) is None


def test_leaves_that_disagree_on_the_position_are_named() -> None:
    with pytest.raises(PositionsDisagreeError, match=r"leaf 1\.0 stands at 4, leaf 0 at 5"):
        position_of([kv(5), CacheList(kv(4))])


def run(model: nn.Module, cache: list[Any], ids: list[int]) -> None:
    step: Any = model
    mx.eval(step(mx.array([ids]), cache=cache))


@pytest.mark.parametrize("name", CONFIGS)
def test_live_restored_and_unbatched_caches_have_the_digest_of_the_probe(name: str) -> None:
    model = build(name)
    learnt = learn_layout(model)
    live = make_prompt_cache(model)
    run(model, live, token_ids(20))

    restored = blank_restore(learnt, model)
    generator = BatchGenerator(model, max_tokens=4)
    uids = generator.insert([token_ids(20), token_ids(20, seed=2)])
    while not any(response.finish_reason is None for response in generator.next()[1]):
        pass
    unbatched: list[Any] = generator.extract_cache(uids)[uids[1]][0]

    assert layout_of(live).digest() == learnt.digest()
    assert layout_of(restored).digest() == learnt.digest()
    assert layout_of(unbatched).digest() == learnt.digest()


def blank_restore(layout: Layout, model: nn.Module) -> list[Any]:
    assembly = MutableAssembly(layout, endpoint=20, capacity_tokens=20)
    for spec in layout.block_specs(0, 20):
        assembly.block_segments(spec, start=0, end=20)
    for spec in layout.point_specs():
        assembly.point_segments(spec)
    return assembly.finish(lambda: make_prompt_cache(model))


def test_the_probe_leaves_the_random_state_alone() -> None:
    model = build("qwen3_5")
    mx.random.seed(7)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(7)

    learn_layout(model)

    assert mx.random.uniform(shape=(4,)).tolist() == expected


class GrowingModel(nn.Module):
    """A model whose point state gets a row for each token."""

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        seen = cache[0][0]
        rows = mx.zeros((1, ids.shape[1], 4))
        cache[0][0] = rows if seen is None else mx.concatenate([seen, rows], axis=1)
        return rows


def test_point_state_that_grows_with_the_position_is_refused_by_the_probe() -> None:
    with pytest.raises(UnsupportedLayoutError, match="leaf 0: slot 0"):
        learn_layout(GrowingModel(), lambda: [ArraysCache(1)])
