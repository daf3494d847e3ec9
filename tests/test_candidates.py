"""What a prompt could resume from: the pure choice, held against one that tries every position."""

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walkback.journal.words import Kind
from walkback.restore.candidates import Candidate, candidates, match, matched_blocks
from walkback.restore.identity import BlockLink, Chain
from walkback.store.lookup import Located

BLOCK_TOKENS = 4


def chain_of(token_count: int) -> Chain:
    return Chain(
        range(token_count), namespace=b"n" * 32, secret=b"s" * 32, block_tokens=BLOCK_TOKENS
    )


LONGEST = chain_of(30)
CHAIN = LONGEST.links[:6]


def located(kind: Kind, link: BlockLink) -> Located:
    return Located(
        kind=kind,
        key=link.key,
        parent=link.parent,
        namespace=b"n" * 32,
        start=link.end if kind is Kind.SIDECAR else link.start,
        end=link.end,
        generation=1,
        file=None,
        nbytes=0,
        header_digest=b"",
        plan_digest=b"",
        sequence=1,
    )


class Held:
    """The entries of a cache, named by where they end: those off the grid are tails."""

    def __init__(self, blocks: Iterable[int], sidecars: Iterable[int]) -> None:
        self.blocks = {
            link.key: located(Kind.BLOCK, link) for link in map(LONGEST.ending_at, blocks)
        }
        self.sidecars = {
            link.key: located(Kind.SIDECAR, link) for link in map(LONGEST.ending_at, sidecars)
        }
        self.asked: list[bytes] = []

    def block(self, key: bytes) -> Located | None:
        return self.blocks.get(key)

    def short_lengths(self, parent: bytes) -> list[int]:
        """Of every block below, as if none could be told from a tail."""
        self.asked.append(parent)
        found = {each.end - each.start for each in self.blocks.values() if each.parent == parent}
        return sorted(found, reverse=True)

    def sidecar(self, key: bytes) -> Located | None:
        return self.sidecars.get(key)


def all_candidates(
    held: Held, prompt_tokens: int, *, needs_sidecar: bool = True, refused: Iterable[int] = ()
) -> list[Candidate]:
    chain = chain_of(prompt_tokens)
    return list(
        candidates(
            held,
            chain,
            matched_blocks(held, chain.links),
            needs_sidecar=needs_sidecar,
            refused={LONGEST.ending_at(end).key for end in refused},
        )
    )


def endpoints(
    held: Held, prompt_tokens: int, *, needs_sidecar: bool = True, refused: Iterable[int] = ()
) -> list[int]:
    found = all_candidates(held, prompt_tokens, needs_sidecar=needs_sidecar, refused=refused)
    return [each.endpoint for each in found]


ENDS = range(4, 25, 4)
SOME_ENDS = st.sets(st.integers(1, 30))


@settings(deadline=None)
@given(
    blocks=SOME_ENDS,
    sidecars=SOME_ENDS,
    prompt_tokens=st.integers(0, 30),
    needs_sidecar=st.booleans(),
    refused=SOME_ENDS,
)
def test_candidates_are_those_of_an_oracle_that_tries_every_position(
    blocks: set[int],
    sidecars: set[int],
    prompt_tokens: int,
    needs_sidecar: bool,
    refused: set[int],
) -> None:
    usable = [
        end
        for end in range(1, prompt_tokens)
        if all(each in blocks - refused for each in (end, *range(4, end, 4)))
        and (end in sidecars or not needs_sidecar)
    ]

    found = endpoints(
        Held(blocks, sidecars), prompt_tokens, needs_sidecar=needs_sidecar, refused=refused
    )

    assert found == sorted(usable, reverse=True)


@settings(deadline=None)
@given(blocks=SOME_ENDS, sidecars=SOME_ENDS, prompt_tokens=st.integers(0, 30))
def test_no_candidate_has_kv_deeper_than_its_state(
    blocks: set[int], sidecars: set[int], prompt_tokens: int
) -> None:
    for each in all_candidates(Held(blocks, sidecars), prompt_tokens):
        assert each.sidecar is not None
        assert each.sidecar.end == each.blocks[-1].end == each.endpoint < prompt_tokens
        assert [block.start for block in each.blocks] == list(range(0, each.endpoint, BLOCK_TOKENS))
        assert all(block.end - block.start == BLOCK_TOKENS for block in each.blocks[:-1])


def test_the_longest_comes_first() -> None:
    assert endpoints(Held(ENDS, [8, 16, 24]), 26) == [24, 16, 8]


@pytest.mark.parametrize(
    ("prompt_tokens", "expected"), [(26, 24), (25, 24), (24, 16), (17, 16), (16, 8), (9, 8)]
)
def test_one_token_is_always_left_to_compute(prompt_tokens: int, expected: int) -> None:
    assert endpoints(Held(ENDS, [8, 16, 24]), prompt_tokens)[0] == expected


def test_a_missing_sidecar_walks_back_to_the_next_older_pair() -> None:
    assert endpoints(Held(ENDS, [8, 24]), 24) == [8]
    assert endpoints(Held(ENDS, [8, 16]), 26) == [16, 8]


def test_a_missing_block_ends_the_match_whatever_stands_behind_it() -> None:
    assert endpoints(Held([4, 8, 16, 20, 24], [8, 16, 24]), 26) == [8]


def test_state_without_its_blocks_is_no_candidate() -> None:
    assert endpoints(Held([], [8, 16, 24]), 26) == []


def test_blocks_without_state_are_no_candidate_unless_the_layout_has_none() -> None:
    assert endpoints(Held(ENDS, []), 26) == []
    assert endpoints(Held(ENDS, []), 26, needs_sidecar=False) == [24, 20, 16, 12, 8, 4]


def test_a_layout_without_state_reads_no_sidecar() -> None:
    found = all_candidates(Held(ENDS, [8, 16, 24]), 26, needs_sidecar=False)

    assert {each.sidecar for each in found} == {None}


@pytest.mark.parametrize("end", [4, 8, 12, 16, 20])
def test_the_endpoint_is_exactly_the_boundary_that_was_stored(end: int) -> None:
    """Elsewhere it was cut to a coarser grid than the one that was stored."""
    assert endpoints(Held(ENDS, [end]), 26) == [end]


@pytest.mark.parametrize("below", range(1, 16))
def test_what_does_not_end_before_a_limit_is_passed_over(below: int) -> None:
    held = Held([4, 6, 8, 12, 14], [4, 6, 12, 14])

    found = match(held, chain_of(16), needs_sidecar=True, below=below).candidate

    usable = [end for end in (4, 6, 12, 14) if end < below]
    assert (0 if found is None else found.endpoint) == max(usable, default=0)


def test_what_could_not_be_read_just_now_is_not_offered_and_neither_is_what_hangs_on_it() -> None:
    held = Held(ENDS, [8, 16, 24])

    assert endpoints(held, 26, refused=[24]) == [16, 8]
    assert endpoints(held, 26, refused=[20]) == [16, 8]
    assert endpoints(held, 26, refused=[12]) == [8]
    assert endpoints(held, 26, refused=[4]) == []


def test_a_sidecar_of_another_position_under_this_key_is_passed_over() -> None:
    held = Held(ENDS, [8, 16])
    key = CHAIN[3].key
    held.sidecars[key] = dataclasses.replace(held.sidecars[key], start=12, end=12)

    assert endpoints(held, 26) == [8]


def test_a_block_of_another_length_under_this_key_ends_the_match() -> None:
    held = Held(ENDS, [8, 16, 24])
    key = CHAIN[2].key
    held.blocks[key] = dataclasses.replace(held.blocks[key], end=11)

    assert endpoints(held, 26) == [8]


def test_a_match_tells_how_much_was_there_apart_from_what_can_be_resumed() -> None:
    found = match(Held(ENDS, [8]), chain_of(26), needs_sidecar=True)

    assert [block.end for block in found.blocks] == list(ENDS)
    assert found.candidate is not None
    assert found.candidate.endpoint == 8


def test_without_a_candidate_a_match_still_tells_what_was_there() -> None:
    found = match(Held([4, 8], []), chain_of(26), needs_sidecar=True)

    assert found.candidate is None
    assert [block.end for block in found.blocks] == [4, 8]


# Tails.


def test_a_tail_is_deeper_than_the_block_above_it_and_less_deep_than_the_block_beside_it() -> None:
    held = Held([4, 8, 12, 6, 10, 11], [8, 12, 6, 10, 11])

    assert endpoints(held, 26) == [12, 11, 10, 8, 6]


def test_a_tail_of_a_prompt_shorter_than_a_block_serves() -> None:
    assert endpoints(Held([3], [3]), 30) == [3]
    assert endpoints(Held([3], [3]), 4) == [3]
    assert endpoints(Held([3], [3]), 3) == []


def test_a_tail_of_other_token_ids_is_passed_over() -> None:
    other = Chain(
        [*range(5), 99], namespace=b"n" * 32, secret=b"s" * 32, block_tokens=BLOCK_TOKENS
    ).ending_at(6)
    held = Held([4], [4])
    held.blocks[other.key] = located(Kind.BLOCK, other)
    held.sidecars[other.key] = located(Kind.SIDECAR, other)

    assert endpoints(held, 26) == [4]


def test_the_deepest_block_of_a_match_may_be_the_candidates_tail() -> None:
    found = match(Held([4, 6], [6]), chain_of(26), needs_sidecar=True)

    assert [block.end for block in found.blocks] == [4]
    assert found.deepest is not None and found.deepest.end == 6


def test_tails_are_asked_for_only_as_far_back_as_the_endpoint() -> None:
    """A prompt has thousands of blocks; a hit at its end must not ask below each of them."""
    held = Held(ENDS, [24])

    match(held, LONGEST, needs_sidecar=True)

    assert held.asked == [CHAIN[-1].key]
