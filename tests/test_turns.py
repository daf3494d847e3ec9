"""Stops off the grid: turns, answers and junctions are resumed where they end, not a stride before.

lfm2, rwkv7 and llama give the same bits under every plan on a CPU, so blocks and strides are small.
"""

# mlx's stubs and mlx-lm's caches leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import shutil
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cache_maker import Gate, HookedFiles, core_of, files_of
from mlx import nn
from mlx_lm.generate import generate_step as mlx_generate_step
from zoo import build, token_ids

from walkback.integration.binding import BoundModel
from walkback.integration.cache import Cache
from walkback.integration.restoration import Restoration
from walkback.journal.words import EvictReason, Kind, MissReason
from walkback.restore.plan import Grid
from walkback.store.eviction import choose_victims
from walkback.store.settings import MIB, StoreSettings
from walkback.store.store import MutableStore

GRID = Grid(
    block_tokens=16, checkpoint_tokens=64, merge_tokens=8, turn_checkpoints_max=4, junctions=True
)
# A system prompt, then turns, none of which ends on a block; the grid's stops are 64 and 128.
TURN_ENDS = (21, 50, 91, 118)
PROMPT = token_ids(130)


def other(at: int, n: int = len(PROMPT)) -> list[int]:
    """PROMPT up to a position, and other token ids from there on."""
    return [*PROMPT[:at], *((each + 1) % 512 for each in PROMPT[at:n])]


def opened(root: Path, grid: Grid = GRID) -> Cache:
    settings = StoreSettings(budget_bytes=256 * MIB, free_floor_bytes=0, staging_bytes=256 * MIB)
    return Cache(MutableStore.open(root, settings, make_files=HookedFiles), grid, salt="")


@pytest.fixture
def cache(tmp_path: Path) -> Generator[Cache]:
    cache = opened(tmp_path / "cache")
    with cache:
        yield cache
        files_of(cache.store).hook = None
        cache.flush()
        cache.store.settle_deletions()
        cache.flush()
        assert cache.violations() == []


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {name: build(name) for name in ("lfm2", "llama", "rwkv7")}


@pytest.fixture
def bound(cache: Cache, models: dict[str, nn.Module]) -> BoundModel:
    return cache.bind(models["lfm2"])


def run(
    bound: BoundModel, prompt: Sequence[int], turn_ends: Iterable[int] = TURN_ENDS
) -> tuple[Restoration, list[int]]:
    """Generate greedily, and wait until all of it is stored or refused."""
    restorations: list[Restoration] = []
    generated = bound.generate_step(
        prompt, max_tokens=3, turn_ends=turn_ends, on_restore=restorations.append
    )
    tokens = [int(token) for token, _ in generated]
    assert restorations[0].recording.wait() == []
    return restorations[0], tokens


def plain(model: Any, prompt: Sequence[int]) -> list[int]:
    """What mlx-lm alone generates."""
    generate: Any = mlx_generate_step
    generated = generate(mx.array(list(prompt)), model, prefill_step_size=64, max_tokens=3)
    return [int(token) for token, _ in generated]


def restored(bound: BoundModel, prompt: Sequence[int]) -> Restoration:
    """A restore whose request ends there."""
    restoration = bound.restore(prompt)
    restoration.recording.finish()
    return restoration


def ends(cache: Cache, kind: Kind) -> list[int]:
    return sorted(entry.end for entry in cache.store.entries(kind))


def prefilled(bound: BoundModel, restoration: Restoration, token_ids: list[int]) -> None:
    """Feed token ids, as decoding does: one by one."""
    model: Any = bound.model
    for each in token_ids:
        model(mx.array([[each]]), cache=restoration.cache)
        mx.eval([leaf.state for leaf in restoration.cache])


# Where a prompt resumes.


@pytest.mark.parametrize("name", ["lfm2", "rwkv7", "llama"])
def test_a_prompt_is_resumed_at_the_end_of_every_turn(
    name: str, cache: Cache, models: dict[str, nn.Module]
) -> None:
    bound = cache.bind(models[name])
    run(bound, PROMPT)
    stops = sorted({*TURN_ENDS, 64, 128})
    # Without point state a prefix is cut after any block, too.
    cuts = sorted({*stops, *(range(16, 129, 16) if name == "llama" else ())})

    endpoints = {n: restored(bound, PROMPT[:n]).endpoint for n in range(1, len(PROMPT) + 1)}

    assert endpoints == {
        n: max((cut for cut in cuts if cut < n), default=0) for n in range(1, len(PROMPT) + 1)
    }


@pytest.mark.parametrize("at", [22, 49, 51, 63, 65, 92, 117, 119, 127, 129])
@pytest.mark.parametrize("name", ["lfm2", "rwkv7"])
def test_an_edit_is_resumed_at_the_last_stop_before_it_with_plain_tokens(
    name: str, at: int, cache: Cache, models: dict[str, nn.Module]
) -> None:
    bound = cache.bind(models[name])
    run(bound, PROMPT)

    found, tokens = run(bound, other(at), [each for each in TURN_ENDS if each < at])

    assert found.endpoint == max(each for each in (*TURN_ENDS, 64, 128) if each <= at)
    assert tokens == plain(models[name], other(at))


def test_every_turn_end_is_there_after_a_restart(
    tmp_path: Path, models: dict[str, nn.Module]
) -> None:
    with opened(tmp_path / "cache") as cache:
        run(cache.bind(models["lfm2"]), PROMPT)

    with opened(tmp_path / "cache") as cache:
        bound = cache.bind(models["lfm2"])
        found = [restored(bound, PROMPT[: end + 1]).endpoint for end in TURN_ENDS]

    assert found == list(TURN_ENDS)


def test_what_another_turn_resumed_from_a_tail_gives_plain_tokens_and_whole_blocks(
    cache: Cache, models: dict[str, nn.Module]
) -> None:
    """The block around an endpoint is made of rows that were restored and of rows that were not."""
    bound = cache.bind(models["lfm2"])
    run(bound, PROMPT[:100], TURN_ENDS[:3])

    found, tokens = run(bound, PROMPT)
    again, tokens_again = run(bound, PROMPT)

    assert (found.endpoint, again.endpoint) == (91, 128)
    assert tokens == tokens_again == plain(models["lfm2"], PROMPT)
    assert ends(cache, Kind.BLOCK) == sorted([*range(16, 129, 16), *TURN_ENDS])


@pytest.mark.parametrize("name", ["lfm2", "rwkv7", "llama"])
def test_a_next_turn_resumes_at_the_end_of_the_answer(
    name: str, cache: Cache, models: dict[str, nn.Module]
) -> None:
    bound = cache.bind(models[name])
    answer = token_ids(7, seed=5)
    first = bound.restore(PROMPT[:100])
    prefilled(bound, first, [*PROMPT[:100], *answer])
    first.recording.extend(answer)
    assert first.recording.stop(107, first.cache) is None
    first.recording.finish()
    assert first.recording.wait() == []
    following = [*PROMPT[:100], *answer, *token_ids(9, seed=6)]

    found, tokens = run(bound, following, [107])

    assert found.endpoint == 107
    # Decoding is no plan of a prompt.
    assert found.mixed_plan
    assert tokens == plain(models[name], following)


def test_an_answer_may_be_stored_in_steps(cache: Cache, bound: BoundModel) -> None:
    request = bound.restore(PROMPT[:20])
    prefilled(bound, request, PROMPT[:20])
    for end in (40, 60):
        prefilled(bound, request, PROMPT[end - 20 : end])
        request.recording.extend(PROMPT[end - 20 : end])
        assert request.recording.stop(end, request.cache) is None
    request.recording.finish()
    assert request.recording.wait() == []

    assert restored(bound, PROMPT[:50]).endpoint == 40
    assert restored(bound, PROMPT[:61]).endpoint == 60
    assert ends(cache, Kind.BLOCK) == [16, 32, 40, 48, 60]


def test_a_prompt_shorter_than_a_block_is_resumed(cache: Cache, bound: BoundModel) -> None:
    run(bound, PROMPT[:14], [10])

    assert restored(bound, PROMPT[:12]).endpoint == 10
    assert restored(bound, [*PROMPT[:9], 1, 2, 3]).reason is MissReason.TOO_SHORT


def test_a_tail_is_readable_while_it_is_being_written(cache: Cache, bound: BoundModel) -> None:
    gate = Gate("sync", "staging/")
    files_of(cache.store).hook = gate
    list(bound.generate_step(PROMPT[:60], max_tokens=1, turn_ends=TURN_ENDS))
    gate.await_thread()

    found = restored(bound, PROMPT[:60])

    gate.open()
    assert found.endpoint == 50


# What is stored, and what it costs.


def test_a_tail_and_the_full_block_over_the_same_tokens_stand_side_by_side(
    cache: Cache, bound: BoundModel
) -> None:
    run(bound, PROMPT)

    assert ends(cache, Kind.BLOCK) == sorted([*range(16, 129, 16), *TURN_ENDS])
    assert ends(cache, Kind.SIDECAR) == sorted([*TURN_ENDS, 64, 128])
    tails = [entry for entry in cache.store.entries(Kind.BLOCK) if entry.end % 16]
    assert {entry.child_count for entry in tails} == {0}


def test_a_layout_without_state_stores_tails_too_and_no_sidecar(
    cache: Cache, models: dict[str, nn.Module]
) -> None:
    run(cache.bind(models["llama"]), PROMPT)

    assert ends(cache, Kind.BLOCK) == sorted([*range(16, 129, 16), *TURN_ENDS])
    assert ends(cache, Kind.SIDECAR) == []


def test_a_prompt_keeps_the_state_of_its_first_turn_and_of_the_last_ones(
    cache: Cache, bound: BoundModel
) -> None:
    run(bound, PROMPT, range(9, 118, 9))

    # No 64, which is close behind 63.
    assert ends(cache, Kind.SIDECAR) == [9, 99, 108, 117, 128]


def test_a_repeated_prompt_with_turns_writes_no_payload_byte(
    cache: Cache, bound: BoundModel
) -> None:
    run(bound, PROMPT)
    written = cache.statistics().payload_bytes_written

    run(bound, PROMPT)
    run(bound, PROMPT[:100], TURN_ENDS)
    cache.flush()

    assert cache.statistics().payload_bytes_written == written > 0


def test_the_least_recently_used_tail_is_among_the_first_victims(
    cache: Cache, bound: BoundModel
) -> None:
    run(bound, PROMPT)
    restored(bound, PROMPT[:119])

    assert first_victims(cache) == [(Kind.SIDECAR, 21), (Kind.BLOCK, 21)]


def first_victims(cache: Cache) -> list[tuple[Kind, int]]:
    """What goes for a byte, by kind and end."""
    cache.flush()
    state = core_of(cache.store).state
    victims = choose_victims(
        state, need_bytes=1, reason=EvictReason.BUDGET, is_protected=lambda _: False
    )
    return [(each.kind, state.blocks[each.key].end) for each in victims]


def answered(bound: BoundModel, prompt: list[int], answer: list[int], ends: Sequence[int]) -> int:
    """Decode an answer of known token ids and store its end, which is returned."""
    request = bound.restore(prompt, turn_ends=ends)
    position = request.endpoint
    for stop in (*request.stops, len(prompt)):
        prefilled(bound, request, prompt[position:stop])
        if stop < len(prompt):
            assert request.recording.stop(stop, request.cache) is None
        position = stop
    prefilled(bound, request, answer)
    request.recording.extend(answer)
    end = len(prompt) + len(answer)
    assert request.recording.stop(end, request.cache) is None
    request.recording.finish()
    assert request.recording.wait() == []
    return end


ANSWERED = [*PROMPT[:56], *token_ids(5, seed=5)]


@pytest.mark.parametrize("name", ["lfm2", "rwkv7", "llama"])
def test_the_end_of_an_answer_goes_first_once_a_later_turn_has_passed_it(
    name: str, cache: Cache, models: dict[str, nn.Module]
) -> None:
    bound = cache.bind(models[name])
    run(bound, other(0), [9])
    end = answered(bound, PROMPT[:56], ANSWERED[56:], TURN_ENDS)
    before = first_victims(cache)

    found, _ = run(bound, [*ANSWERED, *token_ids(20, seed=6)], [*TURN_ENDS[:2], 63, 75])
    after = first_victims(cache)

    assert (found.endpoint, end) == (61, 61)
    assert before[-1] == (Kind.BLOCK, 9)
    assert after == [*([] if name == "llama" else [(Kind.SIDECAR, 61)]), (Kind.BLOCK, 61)]


def test_the_end_of_an_answer_stays_while_its_prompt_leaves_nothing_behind_it(
    cache: Cache, bound: BoundModel
) -> None:
    """Asked again, or regenerated, such a prompt resumes there and nowhere later."""
    run(bound, other(0), [9])
    answered(bound, PROMPT[:20], PROMPT[20:26], ())

    second = answered(bound, PROMPT[:30], PROMPT[30:37], ())

    assert second == 37
    assert first_victims(cache) == [(Kind.SIDECAR, 9), (Kind.BLOCK, 9)]
    assert restored(bound, PROMPT[:30]).endpoint == 26


def test_a_turn_that_a_prompt_resumes_from_is_not_passed(cache: Cache, bound: BoundModel) -> None:
    run(bound, other(0), [9])
    run(bound, PROMPT[:60])

    found, _ = run(bound, PROMPT)

    assert found.endpoint == 50
    assert first_victims(cache) == [(Kind.SIDECAR, 9), (Kind.BLOCK, 9)]


# Junctions.


def test_a_junction_is_kept_once_two_prompts_have_parted_there(
    cache: Cache, bound: BoundModel
) -> None:
    run(bound, PROMPT, ())

    second, _ = run(bound, other(115), ())
    third, tokens = run(bound, other(114), ())

    assert (second.endpoint, third.endpoint) == (64, 112)
    assert tokens == plain(bound.model, other(114))
    assert 112 in ends(cache, Kind.SIDECAR)


def test_a_prompt_that_ends_where_another_goes_on_has_no_junction(
    cache: Cache, bound: BoundModel
) -> None:
    run(bound, PROMPT, ())

    run(bound, PROMPT[:112], ())

    assert ends(cache, Kind.SIDECAR) == [64, 128]


# Plans.


def test_the_same_turns_are_no_mixed_plan_and_others_are(cache: Cache, bound: BoundModel) -> None:
    run(bound, PROMPT)

    same = bound.restore(PROMPT, turn_ends=TURN_ENDS)
    later = bound.restore(other(120), turn_ends=TURN_ENDS)
    without = bound.restore(PROMPT, turn_ends=TURN_ENDS[:2])

    for each in (same, later, without):
        each.recording.finish()
    assert not same.mixed_plan
    assert (later.endpoint, later.mixed_plan) == (118, False)
    assert without.mixed_plan


def test_a_damaged_tail_walks_back_to_the_stop_before_it(cache: Cache, bound: BoundModel) -> None:
    run(bound, PROMPT)
    cache.flush()
    (entry,) = [each for each in cache.store.entries(Kind.BLOCK) if each.end == 118]
    assert entry.file is not None
    path = cache.store.files.root / entry.file.path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    first, second = restored(bound, PROMPT[:119]), restored(bound, PROMPT[:119])

    assert (first.endpoint, first.walkbacks) == (91, 1)
    assert (second.endpoint, second.walkbacks) == (91, 0)
    run(bound, PROMPT[:119])
    assert restored(bound, PROMPT[:119]).endpoint == 118


def test_tails_are_found_again_by_a_rebuilt_journal(
    tmp_path: Path, models: dict[str, nn.Module]
) -> None:
    with opened(tmp_path / "cache") as cache:
        run(cache.bind(models["lfm2"]), PROMPT)
    shutil.rmtree(tmp_path / "cache" / "journal")
    shutil.rmtree(tmp_path / "cache" / "backup", ignore_errors=True)

    with opened(tmp_path / "cache") as cache:
        bound = cache.bind(models["lfm2"])
        found = [restored(bound, PROMPT[: end + 1]).endpoint for end in TURN_ENDS]
        assert cache.violations() == []

    assert found == list(TURN_ENDS)


def test_without_junctions_a_plan_depends_on_its_prompt_alone(
    tmp_path: Path, models: dict[str, nn.Module]
) -> None:
    grid = Grid(block_tokens=16, checkpoint_tokens=64)

    with opened(tmp_path / "plain", grid) as cache:
        bound = cache.bind(models["lfm2"])
        run(bound, PROMPT, ())
        run(bound, other(115), ())

        assert {entry.end for entry in cache.store.entries(Kind.SIDECAR)} == {64, 128}
