"""The layout is pure: these tests build it by hand."""

from dataclasses import replace

import cbor2
import pytest

from walkback.restore.layout import ArraysLeaf, KVLeaf, Layout, Leaf, PerToken, QuantisedRows, Slot

KEYS = PerToken(heads=2, width=16, dtype="BF16")
VALUES = PerToken(heads=2, width=8, dtype="BF16")
CONV = Slot(dtype="BF16", shape=(1, 3, 64))
STATE = Slot(dtype="F32", shape=(1, 4, 32, 32))
KV = KVLeaf(path="0.1", keys=KEYS, values=VALUES)
ARRAYS = ArraysLeaf(path="1", slots=(CONV, None, STATE))
LAYOUT = Layout(leaves=(KV, ARRAYS))
GROUPS = PerToken(heads=2, width=2, dtype="BF16")
QUANTISED = QuantisedRows(
    bits=4,
    group_size=32,
    packed=PerToken(heads=2, width=8, dtype="U32"),
    scales=GROUPS,
    biases=GROUPS,
)
QUANTISED_KV = KVLeaf(path="0.1", keys=QUANTISED, values=QUANTISED)

CHANGED: dict[str, tuple[Leaf, ...]] = {
    "a leaf less": (KV,),
    "a leaf more": (KV, ARRAYS, replace(ARRAYS, path="2")),
    "another order": (ARRAYS, KV),
    "path of kv": (replace(KV, path="0"), ARRAYS),
    "heads of keys": (replace(KV, keys=replace(KEYS, heads=4)), ARRAYS),
    "width of keys": (replace(KV, keys=replace(KEYS, width=32)), ARRAYS),
    "dtype of keys": (replace(KV, keys=replace(KEYS, dtype="F16")), ARRAYS),
    "heads of values": (replace(KV, values=replace(VALUES, heads=4)), ARRAYS),
    "width of values": (replace(KV, values=replace(VALUES, width=0)), ARRAYS),
    "dtype of values": (replace(KV, values=replace(VALUES, dtype="F32")), ARRAYS),
    "keys and values swapped": (replace(KV, keys=VALUES, values=KEYS), ARRAYS),
    "path of arrays": (KV, replace(ARRAYS, path="2")),
    "an empty slot more": (KV, replace(ARRAYS, slots=(CONV, None, STATE, None))),
    "a slot less": (KV, replace(ARRAYS, slots=(CONV, STATE))),
    "slots in another order": (KV, replace(ARRAYS, slots=(None, CONV, STATE))),
    "dtype of a slot": (KV, replace(ARRAYS, slots=(replace(CONV, dtype="F16"), None, STATE))),
    "shape of a slot": (KV, replace(ARRAYS, slots=(replace(CONV, shape=(1, 64, 3)), None, STATE))),
    "rank of a slot": (KV, replace(ARRAYS, slots=(replace(CONV, shape=(1, 192)), None, STATE))),
    "a slot of no elements": (
        KV,
        replace(ARRAYS, slots=(CONV, Slot(dtype="F32", shape=(1, 0)), STATE)),
    ),
    "arrays where kv was": (ArraysLeaf(path="0.1", slots=()), ARRAYS),
    "quantised keys": (replace(KV, keys=QUANTISED), ARRAYS),
    "quantised kv": (QUANTISED_KV, ARRAYS),
    "quantised kv of other bits": (replace(KV, keys=replace(QUANTISED, bits=8)), ARRAYS),
    "quantised kv of other groups": (replace(KV, keys=replace(QUANTISED, group_size=64)), ARRAYS),
    "quantised kv of other scales": (replace(KV, keys=replace(QUANTISED, scales=KEYS)), ARRAYS),
    "quantised kv of other biases": (replace(KV, keys=replace(QUANTISED, biases=KEYS)), ARRAYS),
}


@pytest.mark.parametrize("leaves", CHANGED.values(), ids=CHANGED)
def test_changing_any_field_changes_the_digest(leaves: tuple[Leaf, ...]) -> None:
    assert Layout(leaves=leaves).digest() != LAYOUT.digest()


@pytest.mark.parametrize("leaves", CHANGED.values(), ids=CHANGED)
def test_changing_any_field_is_put_into_words(leaves: tuple[Leaf, ...]) -> None:
    assert LAYOUT.difference(Layout(leaves=leaves)) is not None


def test_no_two_different_layouts_share_a_digest() -> None:
    layouts = [LAYOUT, *(Layout(leaves=leaves) for leaves in CHANGED.values())]

    assert len({layout.digest() for layout in layouts}) == len(layouts)


def test_equal_layouts_have_one_digest_of_32_bytes_and_no_difference() -> None:
    twin = Layout(leaves=(replace(KV), replace(ARRAYS)))

    assert twin.digest() == LAYOUT.digest()
    assert len(twin.digest()) == 32
    assert twin.difference(LAYOUT) is None


def test_the_digest_does_not_change_from_one_version_to_the_next() -> None:
    """A namespace holds it: another value for the same layout would lose every cache on disk."""
    assert LAYOUT.digest().hex() == (
        "2bdb10428f5659d09a05b993c49b6034683ba04cbf04e756c5fb3d2069c126f1"
    )


def test_a_difference_names_the_leaf_and_both_values() -> None:
    other = Layout(leaves=(replace(KV, values=replace(VALUES, width=9)), ARRAYS))

    words = LAYOUT.difference(other)

    assert words == "leaf 0.1: values 2 heads of 8 BF16 against 2 heads of 9 BF16"


def test_the_canonical_form_survives_cbor() -> None:
    assert cbor2.loads(cbor2.dumps(LAYOUT.canonical())) == LAYOUT.canonical()


def test_a_block_has_the_keys_and_values_of_its_tokens() -> None:
    specs = LAYOUT.block_specs(256, 300)

    assert [(spec.name, spec.dtype, spec.shape) for spec in specs] == [
        ("0.1/keys", "BF16", (1, 2, 44, 16)),
        ("0.1/values", "BF16", (1, 2, 44, 8)),
    ]
    assert LAYOUT.block_nbytes(256, 300) == 44 * 2 * (16 + 8) * 2


def test_point_state_leaves_empty_slots_out_and_keeps_their_numbers() -> None:
    specs = LAYOUT.point_specs()

    assert [(spec.name, spec.dtype, spec.shape) for spec in specs] == [
        ("1/slot0", "BF16", (1, 3, 64)),
        ("1/slot2", "F32", (1, 4, 32, 32)),
    ]
    assert LAYOUT.point_nbytes() == 3 * 64 * 2 + 4 * 32 * 32 * 4


def test_quantised_kv_has_six_tensors_a_block() -> None:
    layout = Layout(leaves=(QUANTISED_KV,))

    specs = layout.block_specs(64, 128)

    assert [(spec.name, spec.dtype, spec.shape) for spec in specs] == [
        (f"0.1/{role}/{part}", dtype, (1, 2, 64, width))
        for role in ("keys", "values")
        for part, dtype, width in (
            ("packed", "U32", 8),
            ("scales", "BF16", 2),
            ("biases", "BF16", 2),
        )
    ]
    assert layout.block_nbytes(64, 128) == 2 * 64 * 2 * (8 * 4 + 2 * 2 + 2 * 2)


def test_a_purely_recurrent_layout_has_no_kv() -> None:
    layout = Layout(leaves=(ARRAYS,))

    assert (layout.has_kv, layout.has_point_state) == (False, True)
    assert layout.block_specs(0, 256) == ()


def test_a_layout_whose_slots_are_all_empty_has_no_point_state() -> None:
    layout = Layout(leaves=(KV, ArraysLeaf(path="1", slots=(None, None))))

    assert (layout.has_kv, layout.has_point_state) == (True, False)


@pytest.mark.parametrize(("start", "end"), [(-1, 4), (4, 4), (5, 4)])
def test_a_range_without_tokens_is_no_block(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="no block"):
        LAYOUT.block_specs(start, end)


def test_a_path_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        Layout(leaves=(KV, replace(ARRAYS, path="0.1")))


@pytest.mark.parametrize("path", ["", "a", "1.", "1/keys", "-1", "²"])
def test_only_indices_make_a_path(path: str) -> None:
    with pytest.raises(ValueError, match="no path"):
        Layout(leaves=(replace(KV, path=path),))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="no dtype"):
        PerToken(heads=1, width=1, dtype="bfloat16")


def test_a_slot_of_two_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="batch axis"):
        Slot(dtype="F32", shape=(2, 4))
