"""Where prefill stops, and what a plan is called."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walkback.journal.errors import SettingsError
from walkback.restore.images import ImageSpan
from walkback.restore.plan import (
    GRID_TOKENS,
    Grid,
    Plan,
    plan_after,
    plan_after_decoding,
    plan_digests,
    plan_start,
)

BLOCKS = st.integers(1, 64)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    block_tokens = draw(BLOCKS)
    return Grid(block_tokens=block_tokens, checkpoint_tokens=block_tokens * draw(st.integers(1, 8)))


@settings(deadline=None)
@given(grid=grids(), strides=st.integers(0, 5), offset=st.integers(-2, 2))
def test_stops_are_the_multiples_of_the_stride_below_the_last_token(
    grid: Grid, strides: int, offset: int
) -> None:
    n = max(0, strides * grid.checkpoint_tokens + offset)

    stops = list(grid.stops(n))

    assert stops == [each for each in range(1, n) if each % grid.checkpoint_tokens == 0]


@pytest.mark.parametrize(
    ("prompt_tokens", "last"),
    [
        (2047, None),
        (2048, None),
        (2049, 2048),
        (4095, 2048),
        (4096, 2048),
        (4097, 4096),
        (173_008, 172_032),
        (262_112, 260_096),
    ],
)
def test_the_last_stop_leaves_at_least_one_token_to_compute(
    prompt_tokens: int, last: int | None
) -> None:
    """A prompt of exactly k strides reused nothing at all elsewhere."""
    stops = Grid().stops(prompt_tokens)

    assert (stops[-1] if stops else None) == last
    assert (stops[-1] if stops else 0) == (prompt_tokens - 1) // 2048 * 2048


@settings(deadline=None)
@given(grid=grids(), n=st.integers(0, 500))
def test_the_stops_of_a_prompt_begin_with_those_of_any_shorter_one(grid: Grid, n: int) -> None:
    longer = list(grid.stops(n))

    assert all(list(grid.stops(each)) == longer[: len(grid.stops(each))] for each in (n // 2, n))


@settings(deadline=None)
@given(grid=grids(), position=st.integers(1, 500))
def test_the_token_before_a_position_was_captured_at_its_stop(grid: Grid, position: int) -> None:
    stop = grid.stop_of(position)

    assert stop % grid.checkpoint_tokens == 0
    assert stop - grid.checkpoint_tokens < position <= stop


@pytest.mark.parametrize(
    ("block_tokens", "checkpoint_tokens"), [(0, 256), (256, 0), (-1, 256), (256, 255), (256, 384)]
)
def test_a_grid_that_does_not_fit_together_is_refused(
    block_tokens: int, checkpoint_tokens: int
) -> None:
    with pytest.raises(SettingsError):
        Grid(block_tokens=block_tokens, checkpoint_tokens=checkpoint_tokens)


@pytest.mark.parametrize(
    ("checkpoint_tokens", "is_safe"), [(2048, True), (256, True), (512, True), (128, False)]
)
def test_only_strides_of_whole_kernel_groups_are_safe_for_every_model(
    checkpoint_tokens: int, is_safe: bool
) -> None:
    grid = Grid(block_tokens=64, checkpoint_tokens=checkpoint_tokens)

    assert grid.is_chunk_safe is is_safe
    assert GRID_TOKENS == 256


# Digests.


def test_a_plan_is_named_by_its_stops_up_to_each_of_them() -> None:
    grid = Grid(block_tokens=4, checkpoint_tokens=8)

    found = list(plan_digests(grid, 24))

    assert [stop for stop, _ in found] == [8, 16, 24]
    assert found[0][1] == plan_after(plan_start(grid), 8)
    assert found[1][1] == plan_after(found[0][1], 16)
    assert len({digest for _, digest in found}) == 3


@settings(deadline=None)
@given(grid=grids(), position=st.integers(0, 500))
def test_a_position_between_stops_adds_nothing_to_a_plan(grid: Grid, position: int) -> None:
    stop = position // grid.checkpoint_tokens * grid.checkpoint_tokens

    assert list(plan_digests(grid, position)) == list(plan_digests(grid, stop))


def test_plans_that_stop_elsewhere_have_other_digests() -> None:
    fine, coarse = (Grid(block_tokens=4, checkpoint_tokens=each) for each in (8, 16))
    both = {stop for stop, _ in plan_digests(fine, 64)} & {
        stop for stop, _ in plan_digests(coarse, 64)
    }

    assert len(both) == 4
    assert all(dict(plan_digests(fine, 64))[s] != dict(plan_digests(coarse, 64))[s] for s in both)
    assert plan_start(fine) != plan_start(coarse)


def test_a_stop_off_the_grid_makes_another_plan_from_there_on() -> None:
    grid = Grid(block_tokens=4, checkpoint_tokens=8)
    start = plan_start(grid)

    assert plan_after(plan_after(start, 4), 8) != plan_after(start, 8)


def test_a_plan_does_not_depend_on_how_kv_is_cut() -> None:
    one, other = (Grid(block_tokens=each, checkpoint_tokens=16) for each in (4, 16))

    assert list(plan_digests(one, 64)) == list(plan_digests(other, 64))


# Stops off the grid.


TURN_ENDS = st.lists(st.integers(-5, 400), max_size=12)


@settings(deadline=None)
@given(grid=grids(), n=st.integers(0, 400), turn_ends=TURN_ENDS)
def test_stops_are_apart_and_each_is_of_the_grid_or_the_end_of_a_turn(
    grid: Grid, n: int, turn_ends: list[int]
) -> None:
    stops = Plan(grid, n, turn_ends).stops

    assert all(grid.is_on_grid(stop) or stop in turn_ends for stop in stops)
    assert all(0 < stop < n for stop in stops)
    pairs = zip((0, *stops), stops, strict=False)
    assert all(after - before >= grid.distance for before, after in pairs)


@settings(deadline=None)
@given(grid=grids(), n=st.integers(0, 400), turn_ends=TURN_ENDS)
def test_what_is_no_stop_is_close_behind_one(grid: Grid, n: int, turn_ends: list[int]) -> None:
    stops = Plan(grid, n, turn_ends).stops

    for each in (*grid.stops(n), *turn_ends):
        if 0 < each < n:
            before = max((stop for stop in stops if stop <= each), default=0)
            assert each in stops or each - before < grid.distance


@settings(deadline=None)
@given(grid=grids(), n=st.integers(0, 400), turn_ends=TURN_ENDS, more=TURN_ENDS)
def test_a_longer_prompt_with_the_same_beginning_has_the_same_stops_and_digests_there(
    grid: Grid, n: int, turn_ends: list[int], more: list[int]
) -> None:
    shorter = Plan(grid, n, turn_ends)
    longer = Plan(grid, 2 * n, [*[e for e in turn_ends if e < n], *[n + abs(e) for e in more]])

    assert longer.stops[: len(shorter.stops)] == shorter.stops
    assert all(longer.digest_of(each) == shorter.digest_of(each) for each in shorter.stops)


def test_of_stops_that_are_close_the_earlier_wins() -> None:
    grid = Grid(block_tokens=256, checkpoint_tokens=2048)

    assert Plan(grid, 5000, [2030]).stops == (2030, 4096)
    assert Plan(grid, 5000, [2100]).stops == (2048, 4096)
    assert Plan(grid, 5000, [1984, 2112]).stops == (1984, 2048, 2112, 4096)
    assert Plan(grid, 5000, [63, 64, 127, 128]).stops == (64, 128, 2048, 4096)


def test_a_turning_point_is_a_stop_however_close_the_one_before_it() -> None:
    grid = Grid(block_tokens=256, checkpoint_tokens=2048)
    ends = [2030, 2100, 2112, 4000, 4090]

    turning = Plan(grid, 5000, ends, turning_point=2048)

    assert Plan(grid, 5000, ends).stops == (2030, 2100, 4000, 4090)
    assert turning.stops == (2030, 2048, 2112, 4000, 4090)
    assert turning.digest_of(2030) == Plan(grid, 5000, ends).digest_of(2030)
    assert Plan(grid, 2048, ends, turning_point=2048).stops == (2030,)


def test_a_stride_smaller_than_the_distance_of_stops_keeps_all_its_stops() -> None:
    assert Plan(Grid(block_tokens=16, checkpoint_tokens=32), 100).stops == (32, 64, 96)


@pytest.mark.parametrize(
    ("junction", "stops"),
    [(3000, (2048, 3000, 4096)), (2100, (2048, 4096)), (4050, (2048, 4096)), (60, (2048, 4096))],
)
def test_a_junction_makes_way_for_the_stops_of_the_prompt(
    junction: int, stops: tuple[int, ...]
) -> None:
    grid = Grid(junctions=True)

    assert Plan(grid, 5000, junction=junction).stops == stops
    assert Plan(Grid(), 5000, junction=junction).stops == (2048, 4096)


@pytest.mark.parametrize(
    ("most", "kept"),
    [
        (0, []),
        (1, [100]),
        (2, [100, 800]),
        (3, [100, 700, 800]),
        (8, [100, 200, 300, 400, 500, 600, 700, 800]),
    ],
)
def test_the_state_of_the_first_turn_and_of_the_last_ones_is_kept(
    most: int, kept: list[int]
) -> None:
    grid = Grid(block_tokens=64, checkpoint_tokens=4096, turn_checkpoints_max=most)
    plan = Plan(grid, 5000, range(100, 801, 100))

    assert [stop for stop in plan.stops if plan.keeps_state_at(stop)] == [*kept, 4096]
    assert plan.stops == (*range(100, 801, 100), 4096)


def test_a_block_is_of_the_plan_up_to_the_stop_that_captures_it() -> None:
    grid = Grid(block_tokens=4, checkpoint_tokens=8, merge_tokens=2)
    plan = Plan(grid, 20, [5])
    start = plan_start(grid)
    to_turn = plan_after(start, 5)

    assert plan.stops == (5, 8, 16)
    assert plan.digest_of(4) == plan.digest_of(5) == to_turn
    assert plan.digest_of(8) == plan_after(to_turn, 8)
    # As a longer prompt would go on.
    assert plan.digest_of(20) == Plan(grid, 30, [5]).digest_of(20)
    assert Plan(grid, 4).digest_of(3) == plan_after(start, 8)


def test_decoded_tokens_are_of_no_prompts_plan() -> None:
    start = plan_start(Grid())

    assert plan_after_decoding(start, 100, 300) != plan_after(start, 300)
    assert plan_after_decoding(start, 100, 300) != plan_after_decoding(start, 99, 300)


@pytest.mark.parametrize(
    "wrong", [{"merge_tokens": 0}, {"turn_checkpoints_max": -1}, {"merge_tokens": 1.5}]
)
def test_turn_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Grid(**wrong)


def test_a_turning_point_inside_an_image_is_no_stop() -> None:
    image = ImageSpan(start=2000, end=2100, digest=bytes(32))

    plan = Plan(Grid(), 5000, [2150], images=[image], turning_point=2048)

    assert plan.stops == (2150, 4096)
