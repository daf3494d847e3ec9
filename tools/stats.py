"""``walkback stats``: what a cache holds, and what its history adds up to."""

import dataclasses
from pathlib import Path

from rich.table import Column, Table

from ..journal.errors import JournalDamagedError
from ..store.audit import Audit
from .output import (
    CLEAN,
    FINDINGS,
    AsJson,
    Directory,
    Tables,
    counted,
    local_time,
    print_json,
    printable,
    run,
    short,
    size,
)
from .summary import Recency, Summary, summary_of


def stats(directory: Directory, as_json: AsJson = False) -> None:
    """Print what a cache holds, and what its history adds up to.

    Counts cover all events that are kept, those in sealed segments too. Exits 0, 1 if events are
    missing that should be there, 2 if it could not look or the journal is damaged.
    """
    run(lambda: _stats(directory, as_json=as_json))


def _stats(directory: Path, *, as_json: bool) -> int:
    with Audit.open(directory) as audit:
        if audit.state is None:
            raise JournalDamagedError(
                f"the journal is damaged: {audit.damage}. walkback check says what to do"
            )
        summary = summary_of(audit, audit.state)
    if as_json:
        print_json({"type": "stats"} | dataclasses.asdict(summary))
    else:
        _print_tables(summary)
    return FINDINGS if any(gap.is_damage for gap in summary.gaps) else CLEAN


def _print_tables(summary: Summary) -> None:
    console = Tables()
    console.print(_holdings(summary))
    for namespace in summary.namespaces:
        table = _pairs(f"Namespace {short(namespace.namespace)}")
        table.add_row("blocks", _amount(namespace.block_count, namespace.block_bytes))
        table.add_row("sidecars", _amount(namespace.sidecar_count, namespace.sidecar_bytes))
        table.add_row("tokens", f"{namespace.block_tokens:,}")
        table.add_row("deepest checkpoint", f"{namespace.checkpoint_tokens_max:,} tokens")
        table.add_row("last use", _range(namespace.recency))
        for name, value in namespace.fields.items():
            table.add_row(printable(name), printable(value))
        console.print(table)
    console.print(_requests(summary))
    console.print(_refusals(summary))
    console.print(_journal(summary))
    events = _pairs("Events")
    for name, count in summary.events.items():
        events.add_row(name, f"{count:,}")
    console.print(events)


def _holdings(summary: Summary) -> Table:
    holdings = summary.holdings
    table = _pairs("Cache")
    budget = "not set" if summary.budget_bytes is None else size(summary.budget_bytes)
    table.add_row("budget", budget)
    table.add_row("charged", size(summary.charged_bytes))
    table.add_row("blocks", _amount(holdings.block_count, holdings.block_bytes))
    table.add_row("sidecars", _amount(holdings.sidecar_count, holdings.sidecar_bytes))
    table.add_row("doomed", _amount(holdings.doomed_count, holdings.doomed_bytes))
    table.add_row("quarantined", _amount(holdings.quarantined_count, holdings.quarantined_bytes))
    table.add_row("holes, pins", f"{holdings.hole_count:,}, {holdings.pin_count:,}")
    table.add_row("last use", _range(summary.recency))
    if summary.opened_ns is not None:
        state = "closed" if summary.is_closed else "not closed"
        table.add_row(
            "last opening", f"epoch {holdings.epoch}, {local_time(summary.opened_ns)}, {state}"
        )
    return table


def _requests(summary: Summary) -> Table:
    restores = summary.restores
    table = _pairs("Restores")
    table.add_row("restores", f"{restores.count:,}")
    table.add_row("misses", f"{sum(summary.missed.values()):,}")
    if restores.count:
        table.add_row(
            "endpoint",
            f"{restores.endpoint_tokens_min:,} to {restores.endpoint_tokens_max:,} tokens, "
            f"median {restores.endpoint_tokens_median:,}",
        )
        table.add_row(
            "restored",
            f"{restores.endpoint_tokens_total:,} of {restores.prompt_tokens_total:,} tokens",
        )
    table.add_row("walk-backs", f"{restores.walkbacks:,}")
    table.add_row("mixed plans", f"{restores.mixed_plans:,}")
    return table


def _refusals(summary: Summary) -> Table:
    table = Table("what", "reason", "count", title="Refusals and losses", title_justify="left")
    table.columns[-1].justify = "right"
    for what, reasons in (
        ("not stored", summary.not_stored),
        ("missed", summary.missed),
        ("deletion refused", summary.deletion_refused),
        ("evicted", summary.evicted),
        ("abandoned", summary.abandoned),
        ("quarantined", summary.quarantined),
        ("lost", summary.lost),
    ):
        for reason, count in reasons.items():
            table.add_row(what, printable(reason), f"{count:,}")
    if not table.row_count:
        table.add_row("none", "", "")
    return table


def _journal(summary: Summary) -> Table:
    journal = summary.journal
    table = _pairs("Journal")
    table.add_row("events", f"{journal.first_sequence:,} to {journal.last_sequence:,}")
    table.add_row("in LMDB from", f"{journal.lmdb_first_sequence:,}")
    table.add_row(
        "snapshot", f"at {journal.watermark:,}, {counted(journal.record_count, 'record')}"
    )
    table.add_row("journal", size(journal.nbytes))
    table.add_row("backups", _amount(journal.backup_count, journal.backup_bytes))
    table.add_row(
        "segments", _amount(summary.holdings.segment_count, summary.holdings.segment_bytes)
    )
    for gap in summary.gaps:
        table.add_row(f"gap from {gap.first:,}", printable(f"to {gap.last}: {gap.reason}"))
    return table


def _pairs(title: str) -> Table:
    columns = Column(), Column(overflow="fold")
    return Table(*columns, title=title, title_justify="left", show_header=False)


def _amount(count: int, nbytes: int) -> str:
    return f"{count:,}, {size(nbytes)}"


def _range(recency: Recency | None) -> str:
    if recency is None:
        return "nothing is held"
    return f"{_moment(recency.oldest, recency.oldest_ns)} to " + _moment(
        recency.newest, recency.newest_ns
    )


def _moment(sequence: int, wall_ns: int | None) -> str:
    """When an event was; only its sequence, if it is not kept any more."""
    return f"event {sequence}" if wall_ns is None else local_time(wall_ns)
