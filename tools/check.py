"""``walkback check``: is everything as the journal says?"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..store.audit import Audit
from ..store.findings import Finding, findings, notes, payload_findings
from .output import (
    CLEAN,
    FINDINGS,
    AsJson,
    Directory,
    counted,
    print_json,
    print_line,
    run,
)


def check(
    directory: Directory,
    payloads: Annotated[
        bool, typer.Option("--payloads", help="Read and verify every byte of every payload too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify a cache without changing it: journal, state, files.

    Prints each finding with what to do about it, and notes that are no fault. Exits 0 if the cache
    is clean, 1 with findings, 2 if it could not look, as while a server has the cache open.
    """
    run(lambda: _check(directory, payloads=payloads, as_json=as_json))


def _check(directory: Path, *, payloads: bool, as_json: bool) -> int:
    with Audit.open_verified(directory) as audit:
        count = 0
        for finding in _all_findings(audit, payloads=payloads):
            count += 1
            _print_finding(finding, as_json=as_json)
        for note in notes(audit):
            if as_json:
                print_json({"type": "note", "text": note})
            else:
                print_line(f"note: {note}")
    if as_json:
        print_json({"type": "summary", "findings": count})
    else:
        print_line(counted(count, "finding") if count else "clean")
    return FINDINGS if count else CLEAN


def _all_findings(audit: Audit, *, payloads: bool) -> Iterator[Finding]:
    yield from findings(audit)
    if payloads:
        yield from payload_findings(audit)


def _print_finding(finding: Finding, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "type": "finding",
                "area": finding.area,
                "text": finding.text,
                "remedy": finding.remedy,
            }
        )
    else:
        print_line(f"{finding.area}: {finding.text}")
        print_line(f"    {finding.remedy}")
