"""A histogram with fixed bounds, as Prometheus counts one."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """One moment of it.

    ``counts`` has one number more than ``bounds``: values of at most a bound and of more than the
    one before; the last counts those beyond all bounds. ``total`` is the sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def quantile(self, share: float) -> float:
        """The value that a share of all are at most, evenly spread between bounds; 0 of none.

        Beyond all bounds it is the last bound.
        """
        wanted = share * sum(self.counts)
        lower, below = 0.0, 0
        for bound, reached in zip(self.bounds, accumulate(self.counts), strict=False):
            if reached >= wanted and reached > below:
                return lower + (bound - lower) * max(wanted - below, 0) / (reached - below)
            lower, below = bound, reached
        return self.bounds[-1] if sum(self.counts) else 0.0


class MutableHistogram:
    """Counts values. Not locked: its owner's lock guards it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def note(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def now(self) -> Histogram:
        return Histogram(bounds=self._bounds, counts=tuple(self._counts), total=self._total)
