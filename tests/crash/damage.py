"""Layer ``damage``: files of a cache at rest are damaged, and it is opened and read.

Whatever was done to it: no wrong byte is served, no payload that is whole is lost, what is lost is
named, and a cache that refuses to open says what to do and touches nothing. Each state is judged in
a forked process, which must live. In there the product's own child that verifies the journal is a
forked process too, which may die.
"""

import contextlib
import os
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest

from walkback.journal import backup
from walkback.journal.errors import FormatError, RootRefusedError, WalkbackError
from walkback.journal.files import Files, FileStatus
from walkback.journal.verify import damage_of
from walkback.store import audit, found_journal, recovery
from walkback.store.audit import Audit
from walkback.store.core import Mode
from walkback.store.findings import findings, payload_findings
from walkback.store.root import Owner

from .damages import Changes, Damage, all_damages
from .expectations import expected_of, require_restored, require_world
from .judging import Case, judge_all, mixed
from .layer import Layer, MutableReport
from .lives import UnsyncedFiles, open_store, scratch_directory, steady
from .processes import ending_of, run_apart
from .specimen import JOURNAL, Specimen, specimens, tree_of

# Every how manieth state is audited before it is opened, and is opened once more after it was read.
_AUDIT_EVERY = 8
_REPEAT_EVERY = 4


class JudgedFiles(UnsyncedFiles):
    """The files of an image: only a journal that somebody wrote to has another time than it had."""

    is_journal_touched = False

    def status(self, name: str) -> FileStatus | None:
        status = super().status(name)
        if status is None:
            return None
        mtime_ns = 1 if self.is_journal_touched and name == JOURNAL else 0
        return replace(status, inode=0, mtime_ns=mtime_ns, ctime_ns=0)


class TouchedFiles(JudgedFiles):
    is_journal_touched = True


def verify_in_fork(root: Path, folder: str = "journal") -> str | None:
    """As the product's, without the time that it takes to start another Python."""

    def look() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.closing(Files(root)) as files:
            found.append(damage_of(files, folder))
        if found[0] is not None:
            raise ValueError(found[0])

    found: list[str | None] = []
    ending = ending_of(look)
    said = ending.said.decode()
    if said.startswith(FormatError.__name__):
        raise FormatError(said)
    if ending.code > 0 and not said.startswith(ValueError.__name__):
        raise OSError(f"{root / folder} could not be verified: {said}")
    return ending.problem


@contextlib.contextmanager
def life(specimen: Specimen) -> Generator[None]:
    """A process of the boot that the specimen is opened in, which waits for no flush."""
    real_open: Any = lmdb.open

    def unsynced_open(*args: Any, **settings: Any) -> Any:
        return real_open(*args, **{"sync": False, **settings})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmdb, "open", unsynced_open)
        for module in (found_journal, backup, audit):
            patch.setattr(module, "verify_in_child", verify_in_fork)
        patch.setattr(recovery, "this_process", lambda: Owner(pid=1, boot_id=specimen.boot_id))
        yield


def judge(specimen: Specimen, damage: Damage, root: Path, *, number: int = 0) -> None:
    """Damage it at ``root``, open it, read all of it and heal it; some open it again."""
    specimen.write_to(root)
    changes = damage.change(specimen.files)
    expected = expected_of(specimen, damage, changes)
    files = TouchedFiles if expected.is_journal_hurt else JudgedFiles
    with life(specimen):
        if not damage.is_while_open:
            apply(changes, root)
            if number % _AUDIT_EVERY == 0:
                require_harmless_audit(root, is_bad=bool(expected.bad) or damage.is_refused)
        if damage.is_refused:
            require_refusal(root, files)
            apply({path: specimen.files[path] for path in changes}, root)
        with open_store(root, files) as store:
            if damage.is_while_open:
                apply(changes, root)
            found = require_restored(store, root, specimen, damage, expected)
            # Damage that shows only when the journal is written to is left to the next opening.
            is_over = store.mode is Mode.WRITING
        if number % _REPEAT_EVERY == 0 or not is_over:
            with open_store(root, files) as store:
                require_world(store, root, found)
                events = store.statistics().events
                told = {"Opened", "Compacted", "SegmentSealed"}
                assert not is_over or events.keys() <= told, events


def apply(changes: Changes, root: Path) -> None:
    for path, content in changes.items():
        if content is None:
            (root / path).unlink()
        else:
            (root / path).write_bytes(content)


def require_refusal(root: Path, files: type[Files]) -> None:
    """It does not open, says what to do about it, and changed nothing but who tried last."""
    before = tree_of(root)
    try:
        open_store(root, files).close()
    except RootRefusedError as error:
        assert "put" in str(error).lower(), f"it does not say what to do: {error}"
    else:
        raise AssertionError("it opened, and should not have")
    after = tree_of(root)
    after[1]["OWNER"] = before[1]["OWNER"]
    assert after == before, "a refused opening changed something"


def require_harmless_audit(root: Path, *, is_bad: bool) -> None:
    """An audit changes no byte. It names what is wrong with payloads, or cannot look."""
    before = tree_of(root)
    try:
        with Audit.open(root) as found:
            texts = [each.text for each in (*findings(found), *payload_findings(found))]
    except WalkbackError as error:
        texts = [str(error)]
    assert tree_of(root) == before, "an audit changed something"
    assert texts or not is_bad, "an audit found nothing"


def cases(report: MutableReport, found: list[Specimen]) -> Iterator[Case]:
    """Those states that the report takes."""
    wanted = [
        (kind, specimen, damage)
        for specimen in found
        for kind, damages in all_damages(specimen).items()
        if report.effort.kind in ("", kind)
        for damage in damages
    ]
    if report.effort.until_failure:
        wanted = mixed(wanted, report.effort.seed)
    for kind, specimen, damage in wanted:
        state = report.takes(report.layer, specimen.name, damage.name)
        if state is not None:
            run = partial(judge, specimen, damage, number=state[-1])
            label = f"{specimen.name}, {damage.name}"
            yield Case(state, label, (kind, specimen.name), run)


def survey(report: MutableReport) -> None:
    """All of it, in a process without threads."""
    with steady(), scratch_directory() as scratch:
        found = specimens(scratch / "cache")
        report.told("specimens")
        judge_all(report, cases(report, found), scratch)


def run(report: MutableReport) -> None:
    """Damage what the history left, in every way that the report takes."""
    run_apart(survey, report, os.environ)


LAYER = Layer("damage", run, quick_share=0.008, full_share=0.5)
