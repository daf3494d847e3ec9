"""The figures of an open cache as Prometheus has them: metric families, and their text.

Nothing is counted here and nothing is registered anywhere, so a scrape cannot disagree with the
cache. Counters begin at 0 with each opening, as Prometheus expects of a process. Each help text
says what to do about a bad figure.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...journal.words import MissReason, NotStoredReason
from ...store.core import Mode
from ...store.histogram import Histogram
from ...store.statistics import Statistics
from ..cache import Cache
from .figures import Figures, MemoryFigures, MemoryTier, figures_of


def text_of(figures: Figures) -> bytes:
    """The figures in Prometheus' text format, version 0.0.4 or later."""
    return generate_latest(_Once(figures))


class CacheCollector(Collector):
    """A collector for a registry of the caller's own: one snapshot for each collection."""

    def __init__(self, cache: Cache, memory: MemoryFigures | None = None) -> None:
        self._cache = cache
        self._memory = memory

    def collect(self) -> Iterable[Metric]:
        return families(figures_of(self._cache, self._memory))


class _Once(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        return families(self._figures)


def families(figures: Figures) -> Iterator[Metric]:
    """Every metric family, in the order of a request: looked up, stored, held."""
    yield from _lookups(figures)
    yield from _stores(figures.statistics)
    yield from _holdings(figures.statistics)
    if figures.unstored_prompts is not None:
        yield GaugeMetricFamily(
            "walkback_unstored_prompts",
            "Prompts since something was stored of which nothing was, though it could have been. "
            "If it grows, see walkback_refusals_total and the log.",
            figures.unstored_prompts,
        )
    if figures.memory is not None:
        yield from _memory(figures.memory)


def _lookups(figures: Figures) -> Iterator[Metric]:
    now, depths = figures.statistics, figures.depths
    yield CounterMetricFamily(
        "walkback_restores",
        "Prompts resumed from disk. If low beside walkback_misses_total, see the misses' reasons.",
        now.restores,
    )
    yield _by_label(
        CounterMetricFamily,
        "walkback_misses",
        "Prompts with nothing to resume from. damaged, read_error: run walkback check. "
        "no_checkpoint: lower checkpoint_tokens. other_namespace: the model, its adapter or the "
        "salt changed. in_memory is no loss: RAM served as deep.",
        "reason",
        {str(reason): now.misses.get(reason, 0) for reason in MissReason},
    )
    yield _histogram(
        "walkback_endpoint_tokens",
        "How many tokens a restore resumed with. If short of your system prompt, pass turn ends or "
        "raise the budget.",
        Histogram(bounds=depths.bounds, counts=depths.counts, total=depths.restored_tokens),
    )
    yield CounterMetricFamily(
        "walkback_uncached_tokens",
        "Tokens of resumed prompts that were left to compute. If most of a prompt, pass turn ends "
        "or lower checkpoint_tokens.",
        depths.uncached_tokens,
    )
    yield CounterMetricFamily(
        "walkback_walkbacks",
        "Candidates given up for an older one. Should be 0: else the disk loses or damages files; "
        "run walkback check.",
        now.walkbacks,
    )
    yield CounterMetricFamily(
        "walkback_sidecars_read", "Point states read from disk by restores.", now.sidecars_read
    )


def _stores(now: Statistics) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "walkback_boundaries_stored",
        "Boundaries made durable. If it stands still under load, see walkback_refusals_total.",
        now.boundaries_stored,
    )
    yield _by_label(
        CounterMetricFamily,
        "walkback_refusals",
        "Boundaries that were not stored. budget, floor: give the cache more disk. disk_full, "
        "write_failed, journal, writing_stopped: look at the disk, then reopen. non_finite, "
        "position, layout: the scheduler captured a wrong cache. "
        "walkback log DIR --event NotStored has the details.",
        "reason",
        {str(reason): now.not_stored.get(reason, 0) for reason in NotStoredReason},
    )
    yield CounterMetricFamily(
        "walkback_payload_written_bytes",
        "Bytes of payloads written. If more than your SSD should wear, raise checkpoint_tokens.",
        now.payload_bytes_written,
    )
    yield GaugeMetricFamily(
        "walkback_staging_bytes", "Memory that waits for the disk now.", now.staging_bytes
    )
    yield GaugeMetricFamily(
        "walkback_staging_high_water_bytes",
        "The most memory that has waited for the disk. If near the limit, captures come to wait.",
        now.staging_bytes_high_water,
    )
    yield GaugeMetricFamily(
        "walkback_staging_limit_bytes",
        "Memory that may wait for the disk.",
        now.staging_limit_bytes,
    )
    yield CounterMetricFamily(
        "walkback_backpressure_seconds",
        "Time that captures waited for memory. If it grows, generation waits for the disk: raise "
        "staging_bytes, or use a faster disk.",
        now.backpressure_seconds,
    )
    yield CounterMetricFamily(
        "walkback_inline_writes",
        "Boundaries that a capturing thread wrote itself, as the limit was reached. As above.",
        now.inline_writes,
    )
    yield CounterMetricFamily(
        "walkback_stage_seconds", "Time spent hashing, writing and syncing.", now.stage_seconds
    )
    yield _histogram(
        "walkback_commit_seconds",
        "Durable transactions of the journal. If half of them take more than some 50 ms, the disk "
        "is slow to sync: something else may be writing to it.",
        now.commit_latency,
    )


def _holdings(now: Statistics) -> Iterator[Metric]:
    held = now.holdings
    yield _by_label(
        GaugeMetricFamily,
        "walkback_charged_bytes",
        "Disk that counts against the budget; the kinds add up to all of it. doomed that does not "
        "shrink: files could not be deleted. quarantined: see walkback_quarantines_total.",
        "kind",
        {
            "block": held.block_bytes,
            "sidecar": held.sidecar_bytes,
            "doomed": held.doomed_bytes,
            "quarantined": held.quarantined_bytes,
            "segment": held.segment_bytes,
            "journal": now.journal_bytes,
            "reserved": now.reserved_bytes,
        },
    )
    yield GaugeMetricFamily("walkback_budget_bytes", "What may be charged.", now.budget_bytes)
    yield _by_label(
        GaugeMetricFamily,
        "walkback_entries",
        "What the cache holds, in numbers. hole: blocks that were lost, what is below them is out "
        "of reach until they are stored again.",
        "kind",
        {
            "block": held.block_count,
            "sidecar": held.sidecar_count,
            "doomed": held.doomed_count,
            "quarantined": held.quarantined_count,
            "segment": held.segment_count,
            "hole": held.hole_count,
            "pin": held.pin_count,
            "namespace": held.namespace_count,
        },
    )
    for name, event, help_text in _EVENTS:
        yield CounterMetricFamily(name, help_text, now.events.get(event, 0))
    yield _by_label(
        GaugeMetricFamily,
        "walkback_mode",
        "1 for what the cache does now. reading: storing stopped after failures, reopen it. "
        "offline: its directory is gone, mount it and reopen.",
        "mode",
        {mode.value: int(now.mode == mode.value) for mode in Mode},
    )


_EVENTS = (
    (
        "walkback_evictions",
        "Evicted",
        "Entries dropped to make room. If more than are stored anew, raise the budget.",
    ),
    (
        "walkback_quarantines",
        "Quarantined",
        "Entries that did not verify. Should be 0: run walkback check --payloads, and suspect the "
        "disk.",
    ),
    (
        "walkback_losses",
        "Lost",
        "Entries whose file was gone. Should be 0: something else deletes in the directory.",
    ),
    (
        "walkback_deletion_refusals",
        "DeletionRefused",
        "Files that could not or must not be deleted. Should be 0: see walkback log DIR --event "
        "DeletionRefused.",
    ),
)


def _memory(memory: MemoryTier) -> Iterator[Metric]:
    yield GaugeMetricFamily("walkback_memory_sequences", "Caches held in RAM.", memory.sequences)
    yield GaugeMetricFamily(
        "walkback_memory_used_bytes", "RAM that those caches take.", memory.used_bytes
    )
    if memory.limit_bytes is not None:
        yield GaugeMetricFamily(
            "walkback_memory_limit_bytes", "RAM that they may take.", memory.limit_bytes
        )
    yield CounterMetricFamily(
        "walkback_memory_hits",
        "Prompts resumed from RAM, which are no restores. If low, and the limit is reached, raise "
        "it.",
        memory.hits,
    )


def _histogram(name: str, help_text: str, found: Histogram) -> Metric:
    bounds = [*map(str, found.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(found.counts), strict=True))
    return HistogramMetricFamily(name, help_text, buckets, found.total)


def _by_label(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help_text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """A family with a sample for every value that the label can have, those of 0 too."""
    metric = family(name, help_text, labels=[label])
    for value, number in values.items():
        metric.add_metric([value], number)
    return metric
