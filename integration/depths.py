"""How deep restores reach: a histogram, in tokens, since a cache was opened."""

import threading
from bisect import bisect_left
from dataclasses import dataclass

# From one block to the longest prompt that walkback is designed for.
DEPTH_BOUNDS = tuple(1 << power for power in range(8, 21))


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """One moment of the histogram.

    ``counts`` has one number more than ``bounds``: restores of at most so many tokens and of more
    than the bound before; the last counts those beyond all bounds.
    """

    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    restored_tokens: int
    # Of the prompts that were restored, what was left to compute.
    uncached_tokens: int


class MutableDepths:
    """Counts restores by their endpoint. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(DEPTH_BOUNDS) + 1)
        self._restored_tokens = 0
        self._uncached_tokens = 0

    def note(self, *, endpoint: int, uncached: int) -> None:
        """Count one restore."""
        with self._lock:
            self._counts[bisect_left(DEPTH_BOUNDS, endpoint)] += 1
            self._restored_tokens += endpoint
            self._uncached_tokens += uncached

    def now(self) -> Depths:
        with self._lock:
            return Depths(
                bounds=DEPTH_BOUNDS,
                counts=tuple(self._counts),
                restored_tokens=self._restored_tokens,
                uncached_tokens=self._uncached_tokens,
            )
