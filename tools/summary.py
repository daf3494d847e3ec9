"""A cache in figures: its folded state, and its history added up."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable

from ..journal.backup import FOLDER as BACKUP
from ..journal.entries import Entry
from ..journal.environment import FOLDER
from ..journal.events import (
    Abandoned,
    DeletionRefused,
    Evicted,
    Lost,
    Missed,
    NotStored,
    Quarantined,
    Record,
    Restored,
)
from ..journal.files import Files
from ..journal.state import State
from ..journal.words import Kind
from ..store.audit import Audit, Gap
from ..store.reconcile import names_in
from ..store.recovery import BUDGET
from ..store.statistics import Holdings, holdings_of


@dataclasses.dataclass(slots=True, kw_only=True)
class Recency:
    """The sequences of the least and the most recent use, with their times if they are kept."""

    oldest: int
    newest: int
    oldest_ns: int | None = None
    newest_ns: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What one namespace holds, and what it was made of. Bytes are allocated bytes."""

    namespace: bytes
    fields: dict[str, str]
    block_count: int
    block_bytes: int
    block_tokens: int
    sidecar_count: int
    sidecar_bytes: int
    checkpoint_tokens_max: int
    recency: Recency | None


@dataclasses.dataclass(slots=True, kw_only=True)
class Restores:
    """All restores of the history that is kept. Walk-backs count those that ended as misses too."""

    count: int = 0
    endpoint_tokens_min: int = 0
    endpoint_tokens_median: int = 0
    endpoint_tokens_max: int = 0
    endpoint_tokens_total: int = 0
    prompt_tokens_total: int = 0
    walkbacks: int = 0
    mixed_plans: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """Where the journal's parts begin and end, and what they weigh."""

    first_sequence: int
    lmdb_first_sequence: int
    last_sequence: int
    head_sequence: int | None
    watermark: int
    record_count: int
    nbytes: int
    backup_count: int
    backup_bytes: int


@dataclasses.dataclass(slots=True, kw_only=True)
class Summary:
    """Everything that ``walkback stats`` prints."""

    store_id: bytes
    opened_ns: int | None
    is_closed: bool
    budget_bytes: int | None
    charged_bytes: int
    holdings: Holdings
    recency: Recency | None
    namespaces: list[Namespace]
    journal: Journal
    restores: Restores = dataclasses.field(default_factory=Restores)
    events: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    # How often, by reason; a NotStored stands for as many refusals as it says.
    not_stored: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    missed: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    deletion_refused: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    evicted: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    abandoned: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    quarantined: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    lost: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    gaps: list[Gap] = dataclasses.field(default_factory=list[Gap])


def summary_of(audit: Audit, state: State) -> Summary:
    """The figures of a cache. Reads its whole history once."""
    journal = _journal_of(audit, state)
    opening = state.opening
    summary = Summary(
        store_id=audit.identity.store_id,
        opened_ns=None if opening is None else opening.wall_ns,
        is_closed=state.epoch not in state.unswept,
        budget_bytes=state.settings.get(BUDGET),
        charged_bytes=state.used_bytes + journal.nbytes + journal.backup_bytes,
        holdings=holdings_of(state),
        recency=_recency_of([*state.blocks.values(), *state.sidecars.values()]),
        namespaces=_namespaces_of(state),
        journal=journal,
    )
    _add_history(summary, audit.records())
    return summary


def _add_history(summary: Summary, records: Iterable[Record | Gap]) -> None:
    recencies = [summary.recency, *(each.recency for each in summary.namespaces)]
    wanted = {
        sequence
        for recency in recencies
        if recency is not None
        for sequence in (recency.oldest, recency.newest)
    }
    times: dict[int, int] = {}
    events: Counter[str] = Counter()
    by_reason: dict[str, Counter[str]] = {}
    endpoints: list[int] = []
    for record in records:
        if isinstance(record, Gap):
            summary.gaps.append(record)
            continue
        if record.sequence in wanted:
            times[record.sequence] = record.wall_ns
        events[type(record.event).__name__] += 1
        _add_request(summary.restores, endpoints, record)
        counted = _reason_of(record)
        if counted is not None:
            table, reason, count = counted
            by_reason.setdefault(table, Counter())[reason] += count
    if endpoints:
        summary.restores.endpoint_tokens_min = min(endpoints)
        summary.restores.endpoint_tokens_median = statistics.median_low(endpoints)
        summary.restores.endpoint_tokens_max = max(endpoints)
    for recency in recencies:
        if recency is not None:
            recency.oldest_ns = times.get(recency.oldest)
            recency.newest_ns = times.get(recency.newest)
    summary.events = dict(events.most_common())
    for table, counts in by_reason.items():
        setattr(summary, table, dict(counts.most_common()))


def _add_request(restores: Restores, endpoints: list[int], record: Record) -> None:
    match record.event:
        case Restored() as event:
            restores.count += 1
            restores.endpoint_tokens_total += event.endpoint_tokens
            restores.prompt_tokens_total += event.prompt_tokens
            restores.walkbacks += event.walkbacks
            restores.mixed_plans += event.mixed_plan
            endpoints.append(event.endpoint_tokens)
        case Missed() as event:
            restores.walkbacks += event.walkbacks
        case _:
            pass


def _reason_of(record: Record) -> tuple[str, str, int] | None:
    """The table of ``Summary`` that counts this event, its reason, and how many it stands for."""
    match record.event:
        case NotStored() as event:
            return "not_stored", event.reason.value, event.repeats
        case Missed() as event:
            return "missed", event.reason.value, 1
        case DeletionRefused() as event:
            return "deletion_refused", event.reason.removeprefix(f"{event.file.path} "), 1
        case Evicted() as event:
            return "evicted", event.reason.value, 1
        case Abandoned() as event:
            return "abandoned", event.reason.value, 1
        case Quarantined() as event:
            return "quarantined", event.reason, 1
        case Lost() as event:
            return "lost", event.reason, 1
        case _:
            return None


def _namespaces_of(state: State) -> list[Namespace]:
    entries: dict[bytes, list[Entry]] = {namespace: [] for namespace in state.namespaces}
    for entry in (*state.blocks.values(), *state.sidecars.values()):
        entries.setdefault(entry.namespace, []).append(entry)
    found: list[Namespace] = []
    for namespace, held in entries.items():
        blocks = [entry for entry in held if entry.kind is Kind.BLOCK]
        sidecars = [entry for entry in held if entry.kind is Kind.SIDECAR]
        found.append(
            Namespace(
                namespace=namespace,
                fields=dict(state.namespaces.get(namespace, ())),
                block_count=len(blocks),
                block_bytes=sum(entry.allocated_bytes for entry in blocks),
                block_tokens=sum(entry.end - entry.start for entry in blocks),
                sidecar_count=len(sidecars),
                sidecar_bytes=sum(entry.allocated_bytes for entry in sidecars),
                checkpoint_tokens_max=max((entry.end for entry in sidecars), default=0),
                recency=_recency_of(held),
            )
        )
    return found


def _recency_of(entries: Iterable[Entry]) -> Recency | None:
    sequences = [entry.last_use for entry in entries]
    if not sequences:
        return None
    return Recency(oldest=min(sequences), newest=max(sequences))


def _journal_of(audit: Audit, state: State) -> Journal:
    log = audit.log
    lmdb_first = 1 if log is None else log.first_sequence
    backup_count, backup_bytes = _weigh(audit.files, BACKUP)
    return Journal(
        first_sequence=min((*state.segments, lmdb_first)),
        lmdb_first_sequence=lmdb_first,
        last_sequence=state.sequence,
        head_sequence=None if audit.head is None else audit.head.sequence,
        watermark=0 if log is None else log.watermark.sequence,
        record_count=0 if log is None else log.watermark.record_count,
        nbytes=_weigh(audit.files, FOLDER)[1],
        backup_count=backup_count,
        backup_bytes=backup_bytes,
    )


def _weigh(files: Files, folder: str) -> tuple[int, int]:
    found = [files.status(f"{folder}/{name}") for name in names_in(files, folder)]
    charges = [status.charge_bytes for status in found if status is not None]
    return len(charges), sum(charges)
