"""Prompts with images: what keys them, where they are cut, and what they resume from.

The oracle of bits is mlx-lm's own ``generate_step`` in this process, fed the embeddings of the
whole prompt in the chunks of the plan that is worked out here.
"""

# mlx's stubs and mlx-lm's generation leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import struct
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from blake3 import blake3
from hypothesis import assume, given
from hypothesis import strategies as st
from image_models import build_image_model
from mlx import nn
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from zoo import token_ids

import walkback
from walkback.integration.cache import Cache
from walkback.journal.errors import SettingsError
from walkback.journal.words import NotStoredReason
from walkback.restore.candidates import candidates
from walkback.restore.identity import Chain
from walkback.restore.images import ImageSpan, in_order, is_inside, overlapping
from walkback.restore.plan import Grid, Plan
from walkback.store.settings import MIB, StoreSettings
from walkback.store.store import MutableStore

NAMESPACE, SECRET = b"n" * 32, b"s" * 32
GRID = Grid(block_tokens=16, checkpoint_tokens=32, merge_tokens=4)

# Keys.


def span(start: int, end: int, digest: bytes = b"d" * 32) -> ImageSpan:
    return ImageSpan(start=start, end=end, digest=digest)


@st.composite
def drawn_images(draw: st.DrawFn, token_count: int = 60) -> tuple[ImageSpan, ...]:
    """Images of a prompt, some side by side."""
    edges = draw(st.lists(st.integers(0, token_count), unique=True, max_size=8).map(sorted))
    parts = draw(st.lists(st.booleans(), min_size=len(edges), max_size=len(edges)))
    return tuple(
        span(*edge) for edge, is_image in zip(pairwise(edges), parts, strict=False) if is_image
    )


def chain_of(images: Sequence[ImageSpan], tokens: Sequence[int] = range(60)) -> Chain:
    return Chain(tokens, namespace=NAMESPACE, secret=SECRET, block_tokens=8, images=images)


@given(drawn_images(), st.integers(0, 60), st.integers(1, 60))
def test_a_place_is_inside_an_image_if_rows_of_it_stand_on_both_sides(
    images: tuple[ImageSpan, ...], at: int, length: int
) -> None:
    rows = [set(range(each.start, each.end)) for each in images]
    its_rows = set(range(at, at + length))

    assert is_inside(images, at) == any({at - 1, at} <= each for each in rows)
    found = [each for each, its in zip(images, rows, strict=True) if its & its_rows]
    assert list(overlapping(images, at, at + length)) == found


def test_the_key_of_a_block_covers_whole_images_of_which_it_holds_a_part() -> None:
    images = [span(30, 37, b"b" * 32), span(5, 26, b"a" * 32)]
    parent = NAMESPACE
    for link, here in zip(chain_of(images).links, ("a", "a", "a", "ab", "b"), strict=False):
        content = parent + struct.pack("<q8q", 8, *range(link.start, link.end))
        content += struct.pack("<q", len(here))
        for start, end, letter in ((5, 26, "a"), (30, 37, "b")):
            if letter in here:
                content += struct.pack("<qq", start, end) + letter.encode() * 32
        assert link.key == blake3(content, key=SECRET).digest()
        parent = link.key


def test_images_that_differ_in_any_bit_of_their_digest_share_nothing_from_the_first_on() -> None:
    one = chain_of([span(20, 40, bytes(32))]).links
    for bit in range(256):
        two = chain_of([span(20, 40, (1 << bit).to_bytes(32, "little"))]).links

        assert [a.key == b.key for a, b in zip(one, two, strict=True)] == [True] * 2 + [False] * 5


def test_an_image_is_not_the_same_token_ids_without_one_nor_elsewhere_nor_larger() -> None:
    chains = [chain_of(images) for images in ([], [span(8, 12)], [span(8, 13)], [span(9, 12)])]

    assert len({chain.links[1].key for chain in chains}) == 4
    assert len({chain.links[0].key for chain in chains}) == 1


@given(drawn_images(), st.integers(0, 60))
def test_a_chain_that_grows_keeps_its_images(images: tuple[ImageSpan, ...], cut: int) -> None:
    begun = [each for each in images if each.end <= cut]
    grown = chain_of(begun, range(cut)).longer(range(cut, 60))

    assert grown.links == chain_of(begun).links
    assert grown.ending_at(59) == chain_of(begun).ending_at(59)


@pytest.mark.parametrize("images", [[(0, 5), (4, 6)], [(3, 4), (3, 4)], [(55, 61)]])
def test_images_that_overlap_or_go_beyond_their_prompt_are_an_error(
    images: list[tuple[int, int]],
) -> None:
    with pytest.raises(ValueError, match="overlaps another, or goes beyond"):
        in_order([span(*each) for each in images], 60)


@pytest.mark.parametrize(("start", "end", "size"), [(-1, 4, 32), (4, 4, 32), (5, 4, 32), (0, 4, 8)])
def test_what_is_no_image_is_an_error(start: int, end: int, size: int) -> None:
    with pytest.raises(ValueError, match="image"):
        span(start, end, bytes(size))


# Where they are cut.


@given(
    drawn_images(),
    st.lists(st.integers(0, 60)),
    st.integers(1, 60),
    st.integers(1, 60) | st.none(),
)
def test_no_stop_is_inside_an_image_and_a_longer_prompt_stops_where_a_shorter_does(
    images: tuple[ImageSpan, ...], ends: list[int], length: int, junction: int | None
) -> None:
    grid = Grid(block_tokens=4, checkpoint_tokens=8, merge_tokens=3, junctions=True)
    assume(not is_inside(images, length))
    begun = [each for each in images if each.end <= length]
    shorter = Plan(grid, length, [each for each in ends if each < length], images=begun)
    longer = Plan(grid, 60, ends, images=images)
    joined = Plan(grid, 60, ends, junction=junction, images=images)

    assert not any(is_inside(images, stop) for stop in (*longer.stops, *joined.stops))
    assert shorter.stops == tuple(stop for stop in longer.stops if stop < length)


def test_stops_inside_an_image_are_left_out_and_the_plan_goes_on_behind_it() -> None:
    images = [span(20, 60), span(70, 95)]
    plan = Plan(GRID, 200, [18, 40, 61, 72], images=images)

    assert plan.stops == (18, 61, 96, 128, 160, 192)


@given(drawn_images(), st.integers(1, 60))
def test_the_digest_of_a_block_is_of_the_plan_up_to_the_stop_that_a_longer_prompt_captures_it_at(
    images: tuple[ImageSpan, ...], end: int
) -> None:
    grid = Grid(block_tokens=4, checkpoint_tokens=8, merge_tokens=3)
    whole = Plan(grid, 200, images=images)

    assert Plan(grid, 61, images=images).digest_of(end) == whole.digest_of(end)


class Everything:
    """Entries that have every block and every tail, each with its state."""

    def __init__(self, chain: Chain) -> None:
        ends = {chain.ending_at(end).key: end for end in range(1, chain.token_count + 1)}
        self._ends = ends

    def block(self, key: bytes) -> Any:
        end = self._ends.get(key)
        return None if end is None else Found(key, end)

    sidecar = block

    def short_lengths(self, parent: bytes) -> Sequence[int]:
        return range(7, 0, -1)


class Found:
    def __init__(self, key: bytes, end: int) -> None:
        self.key, self.end = key, end


@pytest.mark.parametrize("needs_sidecar", [False, True])
@given(images=drawn_images())
def test_no_candidate_ends_inside_an_image_and_every_other_place_is_one(
    images: tuple[ImageSpan, ...], needs_sidecar: bool
) -> None:
    chain = chain_of(images)
    entries: Any = Everything(chain)
    blocks = [entries.block(link.key) for link in chain.links]

    found = [
        each.endpoint for each in candidates(entries, chain, blocks, needs_sidecar=needs_sidecar)
    ]

    assert found == [end for end in range(59, 0, -1) if not is_inside(images, end)]


# What they resume from.

NAMES = ("llama", "qwen3_5", "lfm2")
PATCH = 300
TOKENS = 4
FIRST, SECOND = (20, 60), (70, 95)
LENGTH = 110
# 32 is inside the first image.
STOPS = (64, 96)

Generated = list[tuple[int, bytes]]


def picture(seed: int, tokens: int) -> mx.array:
    """Pixels that a model makes so many rows of."""
    return mx.random.normal((3, 28 * tokens, 28), key=mx.random.key(seed))


class Prompt:
    """Text, an image of 40 tokens, text, an image of 25, text."""

    def __init__(self, model: Any, *seeds: int) -> None:
        self.ids = token_ids(LENGTH)
        for start, end in (FIRST, SECOND):
            self.ids[start:end] = [PATCH] * (end - start)
        pixels = [
            picture(seed, end - start)
            for seed, (start, end) in zip(seeds, (FIRST, SECOND), strict=True)
        ]
        self.images = [
            span(start, end, blake3(seed.to_bytes(8, "little")).digest())
            for seed, (start, end) in zip(seeds, (FIRST, SECOND), strict=True)
        ]
        self.embeddings = model.embed_inputs(mx.array(self.ids), pixel_values=pixels)
        mx.eval(self.embeddings)


def seen(generated: Any) -> Generated:
    return [
        (int(token), bytes(memoryview(cast(Any, mx.contiguous(logprobs.view(mx.uint8))))))
        for token, logprobs in generated
    ]


def plain(model: Any, prompt: Prompt) -> Generated:
    """What mlx-lm makes of it, prefilled from its start in the chunks of the plan."""
    cache, start = make_prompt_cache(model), 0
    with mx.stream(generation_stream):
        for stop in STOPS:
            for at in range(start, stop, 32):
                end = min(at + 32, stop)
                rows = prompt.embeddings[at:end][None]
                model(mx.array([prompt.ids[at:end]]), cache=cache, input_embeddings=rows)
                mx.eval([leaf.state for leaf in cache])
            start = stop
    generate: Any = generate_step
    return seen(
        generate(
            mx.array(prompt.ids[start:]),
            model,
            prompt_cache=cache,
            input_embeddings=prompt.embeddings[start:],
            max_tokens=TOKENS,
        )
    )


def run(bound: walkback.BoundModel, prompt: Prompt) -> tuple[int, Generated]:
    """What it resumed from, and what came of it."""
    endpoints: list[int] = []

    def note(restoration: walkback.Restoration) -> None:
        endpoints.append(restoration.endpoint)

    generated = seen(
        bound.generate_step(
            prompt.ids,
            images=prompt.images,
            input_embeddings=prompt.embeddings,
            max_tokens=TOKENS,
            on_restore=note,
        )
    )
    return endpoints[0], generated


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {name: build_image_model(name, image_token_id=PATCH) for name in NAMES}


@pytest.fixture
def opener(tmp_path: Path) -> Generator[Callable[[], Cache]]:
    """Opens one cache, again and again."""
    opened: list[Cache] = []

    def open_it() -> Cache:
        for each in opened:
            each.close()
        settings = StoreSettings(budget_bytes=64 * MIB, free_floor_bytes=0, staging_bytes=64 * MIB)
        opened.append(Cache(MutableStore.open(tmp_path / "cache", settings), GRID, salt=""))
        return opened[-1]

    yield open_it
    for each in opened:
        each.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_with_images_resumes_between_them_with_the_same_bits_and_after_a_restart_too(
    name: str, models: dict[str, nn.Module], opener: Callable[[], Cache]
) -> None:
    model = models[name]
    prompt, edited = Prompt(model, 1, 2), Prompt(model, 1, 3)
    first_edited = Prompt(model, 4, 2)
    expected = {each: plain(model, each) for each in (prompt, edited, first_edited)}
    assert len({str(each) for each in expected.values()}) == 3

    cache = opener()
    cold = run(cache.bind(model), prompt)
    warm = run(cache.bind(model), prompt)
    cache = opener()
    bound = cache.bind(model)
    # Without point state every block serves: one ends before the first image.
    before = 16 if name == "llama" else 0

    assert cold == (0, expected[prompt])
    assert warm == (96, expected[prompt])
    assert bound.lookup(prompt.ids, images=prompt.images) == 96
    assert bound.lookup(edited.ids, images=edited.images) == 64
    assert bound.lookup(prompt.ids) == before
    assert run(bound, prompt) == (96, expected[prompt])
    assert run(bound, edited) == (64, expected[edited])
    assert run(bound, first_edited) == (before, expected[first_edited])
    assert cache.violations() == []


def test_a_stop_inside_an_image_is_refused_and_named(
    models: dict[str, nn.Module], opener: Callable[[], Cache]
) -> None:
    model, cache = models["llama"], opener()
    prompt = Prompt(model, 1, 2)
    bound = cache.bind(model)
    restoration = bound.restore(prompt.ids, images=prompt.images)
    model(
        mx.array([prompt.ids[:48]]),
        cache=restoration.cache,
        input_embeddings=prompt.embeddings[:48][None],
    )

    refusal = restoration.recording.stop(48, restoration.cache)
    restoration.recording.finish()

    assert refusal is not None and refusal.reason is NotStoredReason.INSIDE_IMAGE
    assert cache.statistics().not_stored == {NotStoredReason.INSIDE_IMAGE: 1}
    assert restoration.stops == STOPS


def test_a_cache_of_the_callers_that_stands_inside_an_image_is_not_adopted(
    models: dict[str, nn.Module], opener: Callable[[], Cache]
) -> None:
    model = models["llama"]
    prompt, bound = Prompt(model, 1, 2), opener().bind(model)
    pending = bound.start_restore(prompt.ids, images=prompt.images)

    with pytest.raises(ValueError, match="40 is inside an image"):
        pending.adopt(make_prompt_cache(model), 40)


def test_what_is_reported_bad_is_that_of_these_images(
    models: dict[str, nn.Module], opener: Callable[[], Cache]
) -> None:
    model = models["qwen3_5"]
    cache = opener()
    one, other, bound = Prompt(model, 1, 2), Prompt(model, 1, 3), cache.bind(model)
    run(bound, one)
    run(bound, other)
    cache.flush()

    bound.report_bad(one.ids, 96, images=one.images)

    assert bound.lookup(one.ids, images=one.images) == 64
    assert bound.lookup(other.ids, images=other.images) == 96


@pytest.mark.parametrize("rows", [None, LENGTH - 1])
def test_images_without_an_embedding_for_each_token_are_refused(
    rows: int | None, models: dict[str, nn.Module], opener: Callable[[], Cache]
) -> None:
    model = models["llama"]
    prompt, bound = Prompt(model, 1, 2), opener().bind(model)
    embeddings = None if rows is None else prompt.embeddings[:rows]

    with pytest.raises(SettingsError, match="one row for each token id"):
        list(bound.generate_step(prompt.ids, images=prompt.images, input_embeddings=embeddings))


def test_embeddings_without_images_are_refused(
    models: dict[str, nn.Module], opener: Callable[[], Cache]
) -> None:
    prompt, bound = Prompt(models["llama"], 1, 2), opener().bind(models["llama"])

    with pytest.raises(SettingsError, match="only with images="):
        list(bound.generate_step(prompt.ids, input_embeddings=prompt.embeddings))
