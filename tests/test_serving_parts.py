"""The parts of the server that decide: its options, where turns end, rows of batches, the tiers."""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false

import argparse
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import ArraysCache, BatchKVCache, make_prompt_cache
from zoo import build, token_ids

from walkback.integration.leaves import layout_of, position_of, walk_leaves
from walkback.integration.serving.batching import RecordingBatchGenerator
from walkback.integration.serving.images import images_of, unshared_key
from walkback.integration.serving.options import (
    ServeOptions,
    address_of,
    parse_options,
    parse_size,
)
from walkback.integration.serving.padding import difference, padding_reaches_state
from walkback.integration.serving.rows import adopted, can_be_adopted, compact, row_of
from walkback.integration.serving.sequential import _fits
from walkback.integration.serving.session import MutableSession, Prepared
from walkback.integration.serving.tiers import TieredPromptCache
from walkback.integration.serving.turns import closing_ids, turn_ends
from walkback.journal.errors import SettingsError, UnsupportedLayoutError
from walkback.store.settings import GIB

# Options.


def test_our_flags_are_taken_and_all_others_are_left() -> None:
    options, rest = parse_options(
        ["--model", "m", "--ssd-max", "128G", "--salt", "a", "--temp", "0.5", "--off"], {}
    )

    assert (options.ssd_max, options.salt, options.off) == (128 * GIB, "a", True)
    assert rest == ["--model", "m", "--temp", "0.5", "--prefill-step-size", "2048"]


def test_where_it_will_listen_is_known_and_left_to_mlx_lm() -> None:
    _, rest = parse_options(["--port", "80", "--host=h"], {})

    assert rest[:3] == ["--port", "80", "--host=h"]
    assert address_of(rest) == ("h", "80")
    assert address_of([]) == ("127.0.0.1", "8080")


@pytest.mark.parametrize("path", ["./none", "/none", "~/none"])
def test_a_model_that_is_not_where_it_should_be_is_refused_before_anything_starts(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    with pytest.raises(SettingsError, match="is no directory here"):
        parse_options(["--model", path], {})
    # What a hub may have is mlx-lm's to find.
    assert parse_options(["--model", "org/model"], {})[1][:2] == ["--model", "org/model"]


def test_a_variable_that_is_empty_is_not_set_and_one_that_is_nonsense_is_named() -> None:
    empty = {"WALKBACK_CACHE_DIR": "", "WALKBACK_SSD_MAX": "", "WALKBACK_BLOCK_TOKENS": ""}

    assert parse_options([], empty)[0] == parse_options([], {})[0]
    with pytest.raises(SettingsError, match="WALKBACK_SSD_MAX is 'lots'"):
        parse_options([], {"WALKBACK_SSD_MAX": "lots"})


def test_every_option_is_a_variable_of_the_environment_too_and_a_flag_wins() -> None:
    environment = {
        "WALKBACK_CACHE_DIR": "/c",
        "WALKBACK_SSD_MAX": "1G",
        "WALKBACK_HOT_MAX": "2G",
        "WALKBACK_PENDING_MAX": "3G",
        "WALKBACK_DISK_FLOOR": "4G",
        "WALKBACK_BLOCK_TOKENS": "64",
        "WALKBACK_CHECKPOINT_TOKENS": "512",
        "WALKBACK_SALT": "s",
        "WALKBACK_READ_ONLY": "1",
        "WALKBACK_UNSAFE_BATCHING": "true",
        "WALKBACK_OFF": "yes",
    }

    options, _ = parse_options([], environment)
    flagged, _ = parse_options(["--ssd-max", "7G"], environment)

    assert options == ServeOptions(
        cache_dir=Path("/c"),
        ssd_max=GIB,
        hot_max=2 * GIB,
        pending_max=3 * GIB,
        disk_floor=4 * GIB,
        block_tokens=64,
        checkpoint_tokens=512,
        salt="s",
        read_only=True,
        unsafe_batching=True,
        off=True,
    )
    assert flagged.ssd_max == 7 * GIB


def test_prefill_stops_at_checkpoints_whichever_flag_says_where() -> None:
    assert parse_options(["--prefill-step-size", "512"], {})[0].checkpoint_tokens == 512
    assert parse_options(["--checkpoint-tokens", "512"], {})[1][-1] == "512"
    with pytest.raises(SettingsError, match="give one of them"):
        parse_options(["--checkpoint-tokens", "512", "--prefill-step-size", "256"], {})


def test_a_switch_that_is_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(SettingsError, match="WALKBACK_OFF is 'perhaps'"):
        parse_options([], {"WALKBACK_OFF": "perhaps"})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("1024", 1024), ("1k", 1024), ("1.5GiB", 3 * GIB // 2), ("512MB", 512 << 20)],
)
def test_sizes_have_units(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "many", "1X", "-1G", "nan", "inf"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


# Turns.


class Tokenizer:
    eos_token_ids = frozenset({7})

    def get_vocab(self) -> dict[str, int]:
        return {"a": 1, "<|im_end|>": 8, "<|eot_id|>": 9}


def test_a_turn_ends_behind_the_token_that_closes_it_whoever_spoke() -> None:
    closing = closing_ids(Tokenizer())
    prompt = [1] * 100 + [8] + [1] * 200 + [9] + [1] * 50 + [7] + [1] * 5

    assert closing == {7, 8, 9}
    assert turn_ends(prompt, closing, distance=64) == [101, 302, 353]


def test_a_prompt_without_turns_ends_a_few_tokens_early() -> None:
    assert turn_ends([1] * 100, {7}, distance=64) == [96]
    assert turn_ends([7] + [1] * 99, {7}, distance=64) == [1, 96]
    assert turn_ends([1, 1, 1], {7}, distance=64) == []


def test_a_turn_that_ends_with_the_prompt_leaves_nothing_to_compute_and_so_does_not_count() -> None:
    assert turn_ends([1] * 99 + [7], {7}, distance=64) == [100, 96]


# Rows.


NAMES = ("qwen3_5", "falcon_h1", "lfm2", "rwkv7", "llama")
LENGTHS = (90, 40, 130)


def arrays_of(cache: Any, end: int) -> list[bytes]:
    found: list[bytes] = []
    for _, leaf in walk_leaves(cache):
        arrays = leaf.cache if hasattr(leaf, "cache") else [leaf.keys, leaf.values]
        for array in arrays:
            rows = array if hasattr(leaf, "cache") else array[:, :, :end]
            found.append(bytes(memoryview(cast(Any, mx.contiguous(rows).view(mx.uint8)))))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_a_batch_is_what_extracting_it_gives(name: str) -> None:
    model = build(name)
    generator = BatchGenerator(model, prefill_batch_size=3)
    prompts = [token_ids(n, seed=n) for n in LENGTHS]
    generator.insert(prompts, max_tokens=[4] * 3)
    while not generator._generation_batch.uids:
        generator.next()
    batch: Any = generator._generation_batch

    for index in range(len(batch.uids)):
        row, extracted = row_of(batch.prompt_cache, index), batch.extract_cache(index)
        length = len(batch.tokens[index])
        assert position_of(row) in (length, None)
        assert layout_of(row) == layout_of(extracted)
        assert arrays_of(row, length) == arrays_of(extracted, length)


def test_a_leaf_that_is_not_stored_has_no_row() -> None:
    with pytest.raises(UnsupportedLayoutError, match="object"):
        row_of([object()], 0)


@pytest.mark.parametrize("name", NAMES)
def test_an_adopted_row_goes_on_as_a_merged_one_and_keeps_its_buffers(name: str) -> None:
    model: Any = build(name)
    prompt = token_ids(100)
    caches = [make_prompt_cache(model) for _ in range(2)]
    for cache in caches:
        mx.eval(model(mx.array([prompt[:90]]), cache=cache))
    merged = [leaf.merge([leaf]) for leaf in caches[0]]

    assert can_be_adopted(caches[1])
    assert not can_be_adopted(make_prompt_cache(model))
    taken = adopted(caches[1])
    for leaf, before in zip(_leaves(taken), _leaves(caches[1]), strict=True):
        if isinstance(leaf, BatchKVCache):
            assert leaf.keys is before.keys
    outputs = [model(mx.array([prompt[90:]]), cache=batch) for batch in (merged, taken)]
    mx.eval(outputs)

    assert mx.array_equal(outputs[0], outputs[1])


def _leaves(cache: list[Any]) -> list[Any]:
    return [leaf for _, leaf in walk_leaves(cache)]


def test_a_compacted_cache_lets_go_of_the_batch_that_it_came_from() -> None:
    before = mx.get_active_memory()
    whole = mx.zeros((64, 3, 1024), dtype=mx.float32)
    mx.eval(whole)
    cache = ArraysCache(2)
    cache.cache = [whole[5:6], None]

    compact([cache])

    (kept, empty) = cache.cache
    del whole
    assert empty is None
    assert kept is not None and memoryview(cast(Any, kept)).nbytes == 3 * 1024 * 4
    assert mx.get_active_memory() - before < 64 * 3 * 1024 * 4


@pytest.mark.parametrize(
    ("name", "is_reached"),
    [
        ("qwen3_5", False),
        ("falcon_h1", False),
        ("lfm2", False),
        ("nemotron_h", True),
        ("rwkv7", True),
        ("llama", False),
    ],
)
@pytest.mark.skipif(version("mlx-lm") != "0.32.2", reason="it changes with mlx-lm")
def test_a_model_is_asked_whether_padding_reaches_its_state(name: str, is_reached: bool) -> None:
    assert padding_reaches_state(build(name)) is is_reached


def test_a_state_that_is_no_number_is_a_difference() -> None:
    one, nan = mx.ones((1, 4)), mx.full((1, 4), float("nan"))

    assert difference(one, nan) > 1
    assert difference(one, one) == 0
    assert difference(mx.zeros((1, 4)), one) > 1


# The tiers, without a cache: as upstream, but for what would end its thread.


def session() -> MutableSession:
    return MutableSession(None, ServeOptions(cache_dir=Path()))


def prefilled(name: str, token_count: int) -> list[Any]:
    model: Any = build(name)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([token_ids(token_count)]), cache=cache))
    return cache


@pytest.mark.parametrize(("name", "cached"), [("lfm2", 30), ("llama", 39)])
def test_a_prompt_that_memory_holds_entirely_leaves_a_token_to_compute(
    name: str, cached: int
) -> None:
    tiers = TieredPromptCache(session())
    prompt = token_ids(40)
    for end in (30, 40):
        tiers.insert_cache("m", prompt[:end], prefilled(name, end))

    depth = tiers.depth("m", prompt)
    cache, rest = tiers.fetch_nearest_cache("m", prompt)

    assert depth == cached
    assert rest == prompt[cached:]
    assert cache is not None and position_of(cache) == cached


@pytest.mark.parametrize("length", [1, 2, 29, 30, 31, 41])
def test_the_depth_that_is_told_is_the_depth_that_is_fetched(length: int) -> None:
    tiers = TieredPromptCache(session())
    prompt = token_ids(60)
    tiers.insert_cache("m", prompt[:30], prefilled("lfm2", 30))

    depth = tiers.depth("m", prompt[:length])
    _, rest = tiers.fetch_nearest_cache("m", prompt[:length])

    assert len(rest) == length - depth > 0


def test_memory_is_bounded_by_bytes() -> None:
    options = ServeOptions(cache_dir=Path(), hot_max=1)
    tiers = TieredPromptCache(MutableSession(None, options))

    tiers.insert_cache("m", token_ids(30), prefilled("lfm2", 30))

    assert len(tiers) == 0


def test_what_goes_wrong_in_a_tier_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TieredPromptCache):
        def _from_memory(self, model: Any, tokens: list[int]) -> Any:
            raise RuntimeError("no such thing")

    cache, rest = Broken(session()).fetch_nearest_cache("m", [1, 2, 3])

    assert (cache, rest) == (None, [1, 2, 3])
    assert "no such thing" in caplog.text


def test_a_request_that_the_next_seam_did_not_take_is_given_up() -> None:
    class Pending:
        cancelled = 0

        def cancel(self) -> None:
            self.cancelled += 1

    shared, pending = session(), Pending()
    prepared = Prepared(
        model_key="m",
        token_ids=[1, 2],
        segments=[[1, 2]],
        segment_types=["assistant"],
        initial_state="normal",
        turn_ends=[],
        beyond=0,
        pending=cast(Any, pending),
    )

    shared.put(prepared)
    assert shared.current([1, 3]) is None
    assert shared.current([1, 2]) is prepared
    shared.put(None)

    assert pending.cancelled == 1
    assert shared.take() is None


# Images.


def picture(seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal((3, 4, 4), key=mx.random.key(seed)).astype(dtype)


class Vision:
    """What mlx-lm makes of a prompt's images, with ids of its own that may collide."""

    def __init__(self, prompt: list[int], pixels: list[mx.array], starts: list[int]) -> None:
        self.pixel_values, self.starts = pixels, starts
        self.cache_key = [-7 if each == 9 else each for each in prompt]


SEEING = [1, 9, 9, 2, 9, 9, 9, 3]


def test_a_request_is_keyed_by_what_its_images_show() -> None:
    def keyed(*pixels: mx.array) -> Any:
        return images_of(SEEING, Vision(SEEING, list(pixels), [1, 4]))

    one = keyed(picture(1), picture(2))
    others = [keyed(picture(1), picture(3)), keyed(picture(2), picture(1))]
    other_dtype = keyed(picture(1, mx.float16), picture(2))

    assert [(each.start, each.end) for each in one.spans] == [(1, 3), (4, 7)]
    first, second = (-1 - int.from_bytes(each.digest, "little") for each in one.spans)
    assert one.key == [1, first, first, 2, second, second, second, 3]
    assert one == keyed(picture(1), picture(2))
    assert one.key[:4] == others[0].key[:4]
    assert len({each.key[4] for each in (one, *others)}) == 3
    assert other_dtype.key[1] != first


@pytest.mark.parametrize(
    ("starts", "count"), [([1], 1), ([1, 4], 1), ([1, 5], 2), ([1, 4, 6], 3), ([], 0)]
)
def test_images_that_do_not_fit_their_token_ids_are_not_told_apart(
    starts: list[int], count: int
) -> None:
    vision = Vision(SEEING, [picture(seed) for seed in range(count)], starts)

    assert images_of(SEEING, vision) is None


def test_a_key_that_nothing_shares_is_another_each_time_from_the_first_image_on() -> None:
    vision = Vision(SEEING, [], [])
    one, other = unshared_key(SEEING, vision), unshared_key(SEEING, vision)

    assert one[0] == other[0] == 1
    assert one[1] != other[1]
    assert one.count(one[1]) == 5


@pytest.mark.parametrize("end", [1, 2, 3])
def test_memory_that_holds_a_part_of_an_image_is_a_miss(end: int) -> None:
    tiers = TieredPromptCache(session())
    key = [token_ids(1)[0], -5, -5, *token_ids(37)]
    tiers.insert_cache("m", key[:end], prefilled("llama", end))

    cache, rest = tiers.fetch_nearest_cache("m", key)

    depth = 0 if end == 2 else end
    assert tiers.depth("m", key) == len(key) - len(rest) == depth
    assert (cache is None) == (depth == 0)


@pytest.mark.parametrize(
    ("endpoint", "rows", "fits"),
    [
        (0, None, False),
        (0, 8, True),
        (0, 7, False),
        (3, 5, True),
        (3, None, False),
        (7, None, True),
        (7, 1, False),
    ],
)
def test_what_is_recorded_was_fed_an_image_wherever_its_key_has_one(
    endpoint: int, rows: int | None, fits: bool
) -> None:
    images = images_of(SEEING, Vision(SEEING, [picture(1), picture(2)], [1, 4]))
    prepared: Any = SimpleNamespace(spans=() if images is None else images.spans)
    restoration: Any = SimpleNamespace(endpoint=endpoint, uncached=len(SEEING) - endpoint)

    embeddings = None if rows is None else mx.zeros((rows, 4))
    assert _fits(prepared, restoration, embeddings) == fits


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "llama"])
def test_rows_from_their_start_that_join_one_under_way_are_as_many_as_they_are(name: str) -> None:
    model: Any = build(name)
    prompts = [token_ids(150, seed=1), token_ids(40, seed=2), token_ids(40, seed=3)]
    alone: list[list[int]] = []
    for prompt in prompts:
        generator = BatchGenerator(model, prefill_step_size=32)
        alone.append(answers_of(generator, generator.insert([prompt], max_tokens=[4]))[0])
    session = MutableSession(None, ServeOptions(cache_dir=Path(), off=True))
    together = RecordingBatchGenerator(session, model, prefill_step_size=32)

    first = together.insert(prompts[:1], max_tokens=[4])
    together.next()
    later = together.insert(prompts[1:], max_tokens=[4] * 2)

    assert answers_of(together, [*first, *later]) == alone


def answers_of(generator: BatchGenerator, uids: list[int]) -> list[list[int]]:
    """What a generator answers to each request, all of which are in it."""
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    finished = 0
    while finished < len(uids):
        for response in generator.next()[1]:
            answers[response.uid].append(response.token)
            finished += response.finish_reason is not None
    return [answers[uid] for uid in uids]
