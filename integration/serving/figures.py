"""The figures of an open cache for programs: one moment of it, and that as a plain dict."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...store.statistics import Statistics
from ..cache import Cache
from ..depths import Depths


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTier:
    """What a tier in RAM in front of the cache holds; ``limit_bytes`` is None without a limit."""

    sequences: int
    used_bytes: int
    limit_bytes: int | None
    # Prompts that it served, deeper than the disk could.
    hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One moment of a cache and of the tier in front of it, if there is one."""

    statistics: Statistics
    depths: Depths
    memory: MemoryTier | None
    # Prompts since something was stored of which nothing was; None if nobody counts them.
    unstored_prompts: int | None


UnstoredPrompts = Callable[[], int]
MemoryFigures = Callable[[], MemoryTier | None]


def figures_of(
    cache: Cache, memory: MemoryFigures | None = None, unstored: UnstoredPrompts | None = None
) -> Figures:
    """The figures now, at no cost that grows with the cache.

    Any thread may ask; a closed cache has its last ones.
    """
    return Figures(
        statistics=cache.statistics(),
        depths=cache.depths(),
        memory=None if memory is None else memory(),
        unstored_prompts=None if unstored is None else unstored(),
    )


def dict_of(figures: Figures) -> dict[str, Any]:
    """The figures as JSON has them; names are those of ``Statistics``, ``Depths``, ``MemoryTier``.

    The reasons of misses and refusals that did not happen are left out. Beside the buckets of the
    commits stand the seconds that half of them, and 99 of 100, took at most.
    """
    latency = figures.statistics.commit_latency
    return {
        **dataclasses.asdict(figures.statistics),
        "commit_seconds_p50": latency.quantile(0.5),
        "commit_seconds_p99": latency.quantile(0.99),
        "depths": dataclasses.asdict(figures.depths),
        "memory": None if figures.memory is None else dataclasses.asdict(figures.memory),
        "unstored_prompts": figures.unstored_prompts,
    }
