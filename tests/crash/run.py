"""Every layer at length, then every mutant with the layer that killed it: ``python -m crash``.

``--json`` prints a line of JSON for each layer (``layer``, ``states``, ``failures`` and more) and
each mutant (``mutant``, ``killed_by``) instead. The exit status is 1 if a state failed or a mutant
lived.
"""

import argparse
import json
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from .layer import Effort, MutableReport, in_a_line
from .layers import LAYERS
from .mutants import MUTANTS, mutant_of, switched_on

_FAILURES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One layer, all its parts together."""

    layer: str
    histories: int
    states: int
    seconds: float
    failures: list[str]
    tallies: Counter[str]
    skipped: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: the layer that killed it, after how many states, and what it saw."""

    mutant: str
    killed_by: str | None
    states: int
    seen: str


def run_part(layer: str, effort: Effort) -> MutableReport:
    """Run a share of a layer in this process, and its mutant."""
    # What a cache says of its troubles is expected here.
    logging.getLogger("walkback").addHandler(logging.NullHandler())
    with switched_on(effort.mutant):
        return LAYERS[layer].report(effort)


def judge(name: str) -> Verdict:
    """Switch a mutant on, and have the layer that is meant to kill it try."""
    mutant = mutant_of(name)
    layer = mutant.layer
    effort = Effort(until_failure=True, mutant=name, seed=mutant.seed, kind=mutant.kind)
    try:
        report = run_part(layer, effort)
    except Exception as error:  # noqa: BLE001 - a mutant that breaks the layer is not killed by it
        return Verdict(name, None, 0, f"{layer}: {in_a_line(error)}")
    if report.skipped:
        return Verdict(name, None, 0, f"skipped: {report.skipped}")
    if not report.failures:
        return Verdict(name, None, len(report.states), "lives")
    return Verdict(name, layer, len(report.states), report.failures[0].partition("\n")[0])


def effort_of(name: str, effort: Effort) -> Effort:
    """The share of one layer, when ``effort.share`` is that of all of them at length."""
    share = 1.0 if effort.only else effort.share * LAYERS[name].full_share
    return replace(effort, share=share)


def rows(pool: Executor, names: list[str], effort: Effort) -> Iterator[Row]:
    """The layers one after the other, each divided over the processes."""
    running: list[tuple[str, list[Future[MutableReport]]]] = [
        (
            name,
            [
                pool.submit(run_part, name, replace(effort_of(name, effort), part=part))
                for part in range(effort.parts)
            ],
        )
        for name in names
    ]
    for name, futures in running:
        reports = [future.result() for future in futures]
        yield Row(
            layer=name,
            histories=len(set[bytes]().union(*(report.histories for report in reports))),
            states=len(set[bytes]().union(*(report.states for report in reports))),
            seconds=max(report.seconds for report in reports),
            failures=[failure for report in reports for failure in report.failures],
            tallies=sum((report.tallies for report in reports), Counter[str]()),
            skipped=reports[0].skipped,
        )


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make crash ARGS=…", description=__doc__)
    parser.add_argument("--layer", action="append", choices=LAYERS, help="only this layer")
    parser.add_argument("--seed", type=int, default=1, help="the luck of all that is drawn")
    parser.add_argument("--share", type=float, default=1.0, help="of all of it, which is 1")
    parser.add_argument("--only", default="", help="one state, by the beginning of its name")
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("--mutant", choices=names, default="", help="with this breakage")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-mutants", action="store_true", help="layers only")
    parser.add_argument("--json", action="store_true", help="lines for programs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    wanted = options.layer or list(LAYERS)
    effort = Effort(
        seed=options.seed,
        share=options.share,
        only=options.only,
        mutant=options.mutant,
        parts=1 if options.only else options.processes,
    )
    say = _say_json if options.json else _say
    started = time.monotonic()
    states = failures = lived = 0
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, spawn) as pool:
        for row in rows(pool, wanted, effort):
            say(row)
            states += row.states
            failures += len(row.failures)
        if not (options.no_mutants or options.only or options.mutant):
            mutants = [each.name for each in MUTANTS if each.layer in wanted]
            for verdict in pool.map(judge, mutants):
                say(verdict)
                lived += verdict.killed_by is None and not verdict.seen.startswith("skipped")
    if not options.json:
        minutes = (time.monotonic() - started) / 60
        print(f"\n{states:,} states in {minutes:.1f} minutes")
        print(f"{failures} failures, {lived} mutants alive")
    return 1 if failures or lived else 0


def _say(what: Row | Verdict) -> None:
    if isinstance(what, Verdict):
        end = f"killed by {what.killed_by}" if what.killed_by else "NOT KILLED"
        print(f"{what.mutant:42} {end:24} {what.states:>6,} states  {what.seen[:120]}", flush=True)
        return
    shares = ", ".join(f"{count:,} {kind}" for kind, count in sorted(what.tallies.items()))
    print(
        f"{what.layer:14} {what.histories:>7,} histories {what.states:>8,} states "
        f"{what.seconds:>7.0f} s {len(what.failures):>4} failures  {what.skipped or shares}",
        flush=True,
    )
    for failure in what.failures[:_FAILURES_SHOWN]:
        print(f"  {failure}", flush=True)


def _say_json(what: Row | Verdict) -> None:
    if isinstance(what, Verdict):
        line: dict[str, Any] = {
            "mutant": what.mutant,
            "killed_by": what.killed_by,
            "states": what.states,
            "seen": what.seen,
        }
    else:
        line = {
            "layer": what.layer,
            "histories": what.histories,
            "states": what.states,
            "seconds": round(what.seconds, 1),
            "failures": len(what.failures),
            "tallies": dict(what.tallies),
            "skipped": what.skipped,
            "failed": what.failures[:_FAILURES_SHOWN],
        }
    print(json.dumps(line), flush=True)
