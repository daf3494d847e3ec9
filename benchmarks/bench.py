"""What walkback costs, each figure beside what does the same job with less.

    make bench ARGS="--dir /a/directory/on/the/disk/to/measure"

Everything that is compared runs interleaved in random order. A ratio is the median over rounds of
this arm's seconds by those of the arm it is against, with its quartiles. Machines drift: compare
ratios, never seconds of two runs. ``serving`` counts tokens and ``memory`` bytes, once each, as
Markdown tables.
"""

import itertools
import json
import os
import platform
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from measure import TOTAL, Row, Spread
from memory import markdown as markdown_of_memory
from memory import measure_memory
from opening import measure_commit, measure_lookup, measure_opening
from payloads import QWEN3_6_27B, SMALL
from restoring import IS_COLD_MEASURED, measure_restore
from rich.console import Console
from rich.table import Table
from serving import markdown, measure_serving
from storing import measure_capture, measure_store

ENTRIES = 10_000
# These count, and are no comparison of seconds like the others.
SERVING = "serving"
MEMORY = "memory"


def bench(
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds that count, after one that does not.")
    ] = 9,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to put files; some 2 GB, removed at the end."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Small payloads, one round: a smoke run.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this measurement; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows as JSON lines.")] = False,
) -> None:
    """Measure storing, restoring, opening and capturing against what does less."""
    progress = Console(stderr=True)
    load_before = os.getloadavg()[0]
    rows: list[Row] = []
    measures = _measures(rounds=1 if quick else rounds, quick=quick)
    known = [*measures, SERVING, MEMORY]
    chosen = known if only is None else only
    if unknown := set(chosen) - set(known):
        raise typer.BadParameter(f"{min(unknown)} is none of {', '.join(known)}")
    for name in chosen:
        progress.print(name)
        if name in (SERVING, MEMORY):
            _count(name, directory, quick=quick, as_json=as_json)
            continue
        with tempfile.TemporaryDirectory(prefix="walkback-bench-", dir=directory) as scratch:
            added = measures[name](Path(scratch))
        rows += added
        if as_json:
            for row in added:
                print(json.dumps(row.fields()), flush=True)
        else:
            _print(added)
    ratios = {f"{row.topic}: {row.what}": row.ratio.median for row in rows if row.ratio}
    summary = {
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "machine": f"{platform.platform()}, {os.cpu_count()} processors",
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "cold_is_measured": IS_COLD_MEASURED,
    }
    if as_json:
        print(json.dumps({"summary": summary}), flush=True)
    else:
        print(
            f"{summary['machine']}; load {load_before:.2f} before, {os.getloadavg()[0]:.2f} after"
        )
        if not IS_COLD_MEASURED:
            print("cold restores are not measured here: nothing drops a file from the page cache")


def _measures(*, rounds: int, quick: bool) -> dict[str, Callable[[Path], list[Row]]]:
    shapes = SMALL if quick else QWEN3_6_27B
    entries = 300 if quick else ENTRIES
    order = random.Random()
    return {
        "store": lambda path: measure_store(path, shapes, rounds=rounds, order=order),
        "capture": lambda path: measure_capture(path, shapes, rounds=rounds, order=order),
        "restore": lambda path: [
            row
            for with_kv in (False, True)
            for row in measure_restore(path, shapes, with_kv=with_kv, rounds=rounds, order=order)
        ],
        "open": lambda path: measure_opening(path, entries=entries, rounds=rounds, order=order),
        "lookup": lambda path: measure_lookup(path, rounds=rounds, order=order),
        "commit": lambda path: measure_commit(path, rounds=rounds, order=order),
    }


def _count(name: str, directory: Path | None, *, quick: bool, as_json: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="walkback-bench-", dir=directory) as scratch:
        if name == SERVING:
            rows = measure_serving(Path(scratch), quick=quick)
            table = markdown(rows)
        else:
            rows = measure_memory(Path(scratch), quick=quick)
            table = markdown_of_memory(rows)
    if as_json:
        for row in rows:
            print(json.dumps(row.fields()), flush=True)
    else:
        print(f"\n{table}\n")


def _print(rows: list[Row]) -> None:
    for topic, each in itertools.groupby(rows, key=lambda row: row.topic):
        table = Table("", "ms", "quartiles", "ratio or share", "quartiles", "against")
        for column in table.columns[1:-1]:
            column.justify = "right"
        for row in each:
            name = row.what if row.part == TOTAL else f"  of which {row.part}"
            figures = row.ratio or row.share
            table.add_row(
                name,
                *_shown(row.seconds, 1e3),
                *(("", "") if figures is None else _shown(figures, 1)),
                row.against or "",
            )
        Console(width=None if os.isatty(1) else 140).print(f"\n[bold]{topic}", table)


def _shown(spread: Spread, factor: float) -> tuple[str, str]:
    low, median, high = (_digits(factor * x) for x in (spread.low, spread.median, spread.high))
    return median, f"{low} to {high}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    typer.run(bench)
