"""Namespaces and block keys: two that differ in anything that matters never share an entry."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walkback.restore.identity import Chain, Namespace, block_chain, difference
from walkback.restore.images import ImageSpan
from walkback.restore.layout import ArraysLeaf, KVLeaf, Layout, PerToken, Slot

LAYOUT = Layout(
    leaves=(
        KVLeaf(
            path="0",
            keys=PerToken(heads=2, width=8, dtype="BF16"),
            values=PerToken(heads=2, width=8, dtype="BF16"),
        ),
        ArraysLeaf(path="1", slots=(Slot(dtype="F32", shape=(1, 3, 4)), None)),
    )
)
OTHER_LAYOUT = Layout(leaves=LAYOUT.leaves[:1])
NAMESPACE = Namespace(weights=b"w" * 32, adapter=b"a" * 32, layout=LAYOUT, block_tokens=4)

# One other value for each field, and the name under which a miss speaks of it.
CHANGES = {
    "weights": (b"W" * 32, "weights"),
    "adapter": (b"A" * 32, "adapter"),
    "layout": (OTHER_LAYOUT, "layout"),
    "block_tokens": (8, "block_tokens"),
    "kv_quantisation": ("4 bits in groups of 64", "kv_quantisation"),
    "rank": (1, "rank"),
    "world": (2, "rank"),
    "salt": ("a tenant", "salt"),
}

SECRET = b"s" * 32
OTHER_SECRET = b"S" * 32
INT64 = st.integers(min_value=-(1 << 63), max_value=(1 << 63) - 1)


def keys(
    token_ids: Sequence[int],
    *,
    namespace: bytes = b"n" * 32,
    secret: bytes = SECRET,
    block_tokens: int = 4,
) -> list[bytes]:
    chain = block_chain(token_ids, namespace=namespace, secret=secret, block_tokens=block_tokens)
    return [link.key for link in chain]


def changed(name: str) -> Namespace:
    return dataclasses.replace(NAMESPACE, **{name: CHANGES[name][0]})


# Namespaces.


def test_every_field_of_a_namespace_has_a_change_here() -> None:
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(Namespace)}


def test_equal_fields_give_one_digest_of_32_bytes() -> None:
    again = dataclasses.replace(NAMESPACE, layout=Layout(leaves=LAYOUT.leaves))

    assert again.digest() == NAMESPACE.digest()
    assert len(NAMESPACE.digest()) == 32


@pytest.mark.parametrize("name", CHANGES)
def test_a_namespace_that_differs_in_one_field_has_another_digest(name: str) -> None:
    assert changed(name).digest() != NAMESPACE.digest()


@pytest.mark.parametrize("name", CHANGES)
def test_a_miss_names_the_field_that_differs_and_no_other(name: str) -> None:
    assert difference(NAMESPACE.fields(secret=SECRET), changed(name).fields(secret=SECRET)) == [
        CHANGES[name][1]
    ]


def test_a_miss_names_every_field_that_differs() -> None:
    other = dataclasses.replace(NAMESPACE, weights=b"W" * 32, salt="a tenant")

    assert difference(NAMESPACE.fields(secret=SECRET), other.fields(secret=SECRET)) == [
        "weights",
        "salt",
    ]
    assert difference(NAMESPACE.fields(secret=SECRET), NAMESPACE.fields(secret=SECRET)) == []


def test_a_field_that_an_older_walkback_did_not_record_differs() -> None:
    older = [each for each in NAMESPACE.fields(secret=SECRET) if each[0] != "kv_quantisation"]

    assert difference(NAMESPACE.fields(secret=SECRET), older) == ["kv_quantisation"]


@pytest.mark.parametrize("text", ["x", "a tenant", "none", "0"])
def test_a_salt_never_passes_for_another_field(text: str) -> None:
    """A salt and an adapter of the same name shared one hash domain elsewhere, and collided."""
    raw = text.encode()
    digests = {
        dataclasses.replace(NAMESPACE, salt=text).digest(),
        dataclasses.replace(NAMESPACE, adapter=raw).digest(),
        dataclasses.replace(NAMESPACE, weights=raw).digest(),
        dataclasses.replace(NAMESPACE, kv_quantisation=text).digest(),
        NAMESPACE.digest(),
    }

    assert len(digests) == 5 - (text == "none")


@settings(deadline=None)
@given(
    one=st.tuples(st.binary(max_size=3), st.binary(max_size=3), st.text("ab", max_size=3)),
    other=st.tuples(st.binary(max_size=3), st.binary(max_size=3), st.text("ab", max_size=3)),
)
def test_bytes_never_move_from_one_field_to_its_neighbour(
    one: tuple[bytes, bytes, str], other: tuple[bytes, bytes, str]
) -> None:
    def digest(fields: tuple[bytes, bytes, str]) -> bytes:
        weights, adapter, salt = fields
        return dataclasses.replace(NAMESPACE, weights=weights, adapter=adapter, salt=salt).digest()

    assert (digest(one) == digest(other)) == (one == other)


def test_the_salt_is_not_readable_in_what_the_journal_gets() -> None:
    fields = dataclasses.replace(NAMESPACE, salt="a tenant").fields(secret=SECRET)

    assert "a tenant" not in str(fields)
    assert ("salt", "none") in NAMESPACE.fields(secret=SECRET)


def test_shards_of_one_model_have_namespaces_of_their_own() -> None:
    digests = {
        dataclasses.replace(NAMESPACE, rank=rank, world=world).digest()
        for rank, world in ((0, 1), (0, 2), (1, 2), (0, 12), (1, 12))
    }

    assert len(digests) == 5


# Keys.


@pytest.mark.parametrize(
    ("token_count", "ranges"),
    [(0, []), (3, []), (4, [(0, 4)]), (7, [(0, 4)]), (8, [(0, 4), (4, 8)])],
)
def test_only_full_blocks_have_a_link(token_count: int, ranges: list[tuple[int, int]]) -> None:
    chain = block_chain(range(token_count), namespace=b"n" * 32, secret=SECRET, block_tokens=4)

    assert [(link.start, link.end) for link in chain] == ranges


def test_the_first_block_hangs_on_the_namespace_and_each_other_on_the_one_before() -> None:
    chain = block_chain(range(12), namespace=b"n" * 32, secret=SECRET, block_tokens=4)

    assert [link.parent for link in chain] == [b"n" * 32, chain[0].key, chain[1].key]
    assert {len(link.key) for link in chain} == {32}


@settings(deadline=None)
@given(token_ids=st.lists(INT64, min_size=12, max_size=12), at=st.integers(0, 11), other=INT64)
def test_a_key_names_its_whole_prefix(token_ids: list[int], at: int, other: int) -> None:
    edited = [*token_ids[:at], other, *token_ids[at + 1 :]]

    same = [one == two for one, two in zip(keys(token_ids), keys(edited), strict=True)]

    if other == token_ids[at]:
        assert same == [True] * 3
    else:
        assert same == [block < at // 4 for block in range(3)]


@settings(deadline=None)
@given(token_ids=st.lists(INT64, min_size=4, max_size=20), more=st.lists(INT64, max_size=9))
def test_what_follows_a_block_does_not_change_its_key(
    token_ids: list[int], more: list[int]
) -> None:
    whole = len(token_ids) // 4

    assert keys([*token_ids, *more])[:whole] == keys(token_ids)


@pytest.mark.parametrize("value", [-1, -(1 << 60), (1 << 60) - 1, -(1 << 63), (1 << 63) - 1])
def test_negative_and_sixty_bit_ids_are_whole_in_the_key(value: int) -> None:
    """Images are pseudo-ids of 60 bits, below zero: no bit of them may be cut off."""
    near = value + 1 if value < 0 else value - 1

    assert keys([value, 1, 2, 3]) != keys([near, 1, 2, 3])
    assert keys([value, 1, 2, 3]) != keys([value & 0xFFFFFFFF, 1, 2, 3])
    assert keys([value, 1, 2, 3]) != keys([-value & 0x7FFFFFFFFFFFFFFF, 1, 2, 3])


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1])
def test_an_id_that_needs_more_than_64_bits_is_an_error(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        keys([value, 1, 2, 3])


def test_two_caches_give_one_prompt_different_keys() -> None:
    assert not set(keys(range(12))) & set(keys(range(12), secret=OTHER_SECRET))


def test_two_namespaces_give_one_prompt_different_keys() -> None:
    assert not set(keys(range(12))) & set(keys(range(12), namespace=b"m" * 32))


def test_blocks_of_another_size_share_no_key() -> None:
    assert not set(keys(range(16), block_tokens=4)) & set(keys(range(16), block_tokens=8))


def test_no_two_blocks_of_a_repetitive_prompt_share_a_key() -> None:
    found = keys([0] * 400)

    assert len(set(found)) == len(found) == 100


def test_keys_are_what_they_were_in_the_first_release() -> None:
    """What is on a disk must be found again: a change here is a change of format."""
    [key] = keys([1, 2, 3, -4])

    assert key.hex() == "75438d077c7b54ae55a4a9c3f7115dd92ea5dfda2cb15fcf9bc463420294f915"
    assert (
        NAMESPACE.digest().hex()
        == "d44ccca96851ad66beab73a0271b2ce77cd535e1358bbdff431db272a7fb5b62"
    )


# Tails, and prompts that grow.


def chain_of(token_ids: list[int]) -> Chain:
    return Chain(token_ids, namespace=b"n" * 32, secret=SECRET, block_tokens=4)


def test_a_tail_is_a_short_block_below_the_last_full_one() -> None:
    chain = chain_of(list(range(11)))

    tail = chain.ending_at(10)

    assert (tail.start, tail.end) == (8, 10)
    assert tail.parent == chain.links[1].key == chain.ending_at(8).key == chain.tip
    assert chain_of([7, 8, 9]).ending_at(3).parent == b"n" * 32


def test_all_tails_and_blocks_of_a_prompt_have_different_keys() -> None:
    chain = chain_of([0] * 32)

    assert len({chain.ending_at(end).key for end in range(1, 33)}) == 32


def test_a_tail_does_not_depend_on_what_comes_behind_it() -> None:
    assert chain_of([*range(10), 5, 6]).ending_at(10) == chain_of([*range(10), 9]).ending_at(10)
    assert chain_of([*range(9), 5]).ending_at(10) != chain_of([*range(9), 6]).ending_at(10)


@pytest.mark.parametrize("end", [0, -1, 12])
def test_where_a_prompt_does_not_reach_no_block_ends(end: int) -> None:
    with pytest.raises(ValueError, match="no block of 11 tokens"):
        chain_of(list(range(11))).ending_at(end)


@pytest.mark.parametrize("cut", range(0, 14))
def test_a_chain_that_grew_is_the_chain_of_the_longer_prompt(cut: int) -> None:
    token_ids = list(range(13))
    whole, grown = chain_of(token_ids), chain_of(token_ids[:cut]).longer(token_ids[cut:])

    assert grown.links == whole.links
    assert grown.token_count == 13
    assert [grown.ending_at(end) for end in range(1, 14)] == [
        whole.ending_at(end) for end in range(1, 14)
    ]


def test_the_full_blocks_between_two_positions_are_those_that_end_there() -> None:
    chain = chain_of(list(range(20)))

    ends = {
        (start, end): [link.end for link in chain.between(start, end)]
        for start, end in ((0, 8), (0, 9), (5, 8), (5, 7), (8, 12), (7, 19))
    }

    assert ends == {
        (0, 8): [4, 8],
        (0, 9): [4, 8],
        (5, 8): [8],
        (5, 7): [],
        (8, 12): [12],
        (7, 19): [8, 12, 16],
    }


def test_a_chain_in_another_namespace_is_the_one_that_is_made_there() -> None:
    image = ImageSpan(start=10, end=20, digest=b"i" * 32)

    def made(namespace: bytes) -> Chain:
        return Chain(
            range(100), namespace=namespace, secret=SECRET, block_tokens=16, images=[image]
        )

    moved, expected = made(b"a" * 32).under(b"b" * 32), made(b"b" * 32)

    assert moved.links == expected.links
    assert moved.ending_at(99) == expected.ending_at(99)
    assert moved.longer([7] * 40).links == expected.longer([7] * 40).links
    assert moved.images == expected.images
