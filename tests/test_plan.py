"""Where prefill stops, and what a plan is called."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walkback.journal.errors import SettingsError
from walkback.restore.plan import GRID_TOKENS, Grid, plan_after, plan_digests, plan_start

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
@given(grid=grids(), position=st.integers(0, 500))
def test_the_next_stop_is_the_first_beyond_a_position(grid: Grid, position: int) -> None:
    found = grid.next_stop(position)

    assert found > position
    assert found % grid.checkpoint_tokens == 0
    assert found - position <= grid.checkpoint_tokens


@settings(deadline=None)
@given(grid=grids(), position=st.integers(1, 500))
def test_the_token_before_a_position_was_captured_at_its_stop(grid: Grid, position: int) -> None:
    stop = grid.stop_of(position)

    assert stop % grid.checkpoint_tokens == 0
    assert stop - grid.checkpoint_tokens < position <= stop


@settings(deadline=None)
@given(grid=grids(), first=st.integers(0, 4), strides=st.integers(1, 4))
def test_ranges_are_full_blocks_that_cover_a_stretch_once(
    grid: Grid, first: int, strides: int
) -> None:
    start = first * grid.block_tokens
    stop = start + strides * grid.checkpoint_tokens

    ranges = grid.ranges(start, stop)

    assert [each for low, high in ranges for each in range(low, high)] == list(range(start, stop))
    assert {high - low for low, high in ranges} == {grid.block_tokens}


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
