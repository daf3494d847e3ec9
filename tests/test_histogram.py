"""Histograms: every value is counted once, and a quantile lies in the bucket of the true one."""

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from walkback.store.histogram import Histogram, MutableHistogram

BOUNDS = (1.0, 2.0, 5.0, 10.0)
VALUES = st.lists(st.floats(0, 20, allow_subnormal=False), min_size=1, max_size=50)


def histogram_of(values: list[float]) -> Histogram:
    histogram = MutableHistogram(BOUNDS)
    for value in values:
        histogram.note(value)
    return histogram.now()


@given(VALUES)
def test_each_value_is_counted_at_its_bound(values: list[float]) -> None:
    found = histogram_of(values)

    edges = [float("-inf"), *BOUNDS, float("inf")]
    assert list(found.counts) == [
        sum(edges[at] < value <= edges[at + 1] for value in values) for at in range(len(edges) - 1)
    ]
    assert found.total == sum(values)


@given(VALUES, st.integers(1, 100))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], percent: int) -> None:
    true = sorted(values)[-(-percent * len(values) // 100) - 1]

    found = histogram_of(values).quantile(percent / 100)

    at = bisect_left(BOUNDS, true)
    assert (0.0, *BOUNDS)[at] <= found <= (*BOUNDS, BOUNDS[-1])[at]


def test_quantiles_are_spread_evenly_between_bounds() -> None:
    found = histogram_of([3.0] * 10)

    assert (found.quantile(0.1), found.quantile(0.5), found.quantile(1.0)) == (2.3, 3.5, 5.0)


def test_of_nothing_every_quantile_is_0() -> None:
    assert histogram_of([]).quantile(0.5) == 0
