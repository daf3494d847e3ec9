"""Ways to break the order of writing, deleting and recovering, each with who has to notice.

The checks: ``died`` and ``lost power`` survey the story's crashes in one model until one fails;
``told`` is the story without any crash, ``rolled back`` a journal that lost its last words.
"""

import contextlib
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from crash_story import MakeFiles, Survey, tell
from crashes import RecordingFiles
from test_reconcile import payloads_survive_a_journal_that_was_rolled_back

from walkback.journal import environment
from walkback.journal.events import Committed, Deleted, Event, Evicted, Opened, Record, Swept
from walkback.journal.files import Files
from walkback.journal.head import Head
from walkback.journal.log import MutableLog
from walkback.journal.log_reader import LogReader
from walkback.journal.words import FileName, Kind
from walkback.store import ordering, recovery, sweep
from walkback.store.boundary import Claim, Writing
from walkback.store.core import MutableCore
from walkback.store.deletion import MutableJanitor

Check = Callable[[Path, MakeFiles], None]


def _nothing(patch: pytest.MonkeyPatch) -> None:
    pass


class Mutant(NamedTuple):
    """What is broken, by a patch or by its files, and the check that has to fail."""

    name: str
    check: Check
    patch: Callable[[pytest.MonkeyPatch], None] = _nothing
    files: MakeFiles = RecordingFiles


# Checks.


def told(scratch: Path, make_files: MakeFiles) -> None:
    tell(scratch / "story", make_files)


def died(scratch: Path, make_files: MakeFiles) -> None:
    _survey(scratch, make_files, is_new_boot=False)


def lost_power(scratch: Path, make_files: MakeFiles) -> None:
    _survey(scratch, make_files, is_new_boot=True)


def rolled_back(scratch: Path, make_files: MakeFiles) -> None:
    payloads_survive_a_journal_that_was_rolled_back(scratch)


def _survey(scratch: Path, make_files: MakeFiles, *, is_new_boot: bool) -> None:
    try:
        moments = tell(scratch / "story", make_files)
    except AssertionError as error:
        raise RuntimeError(f"noticed without any crash: {error}") from error
    survey = Survey(random_count=0)
    # In no order: what is wrong at all is mostly wrong after many steps.
    for moment in random.Random(1).sample(moments, len(moments)):
        for image, is_power_loss in survey.images(moment):
            if is_power_loss is is_new_boot:
                survey.look(image, moment, scratch, is_new_boot=is_new_boot)


# The writing.


class PayloadsNotSynced(RecordingFiles):
    def sync(self, descriptor: int) -> None:
        if self.path_of(descriptor).startswith("staging/"):
            self.interrupt(descriptor)
        else:
            super().sync(descriptor)


class DirectoriesNotSynced(RecordingFiles):
    def sync_directory(self, name: str) -> None:
        if not name.startswith(("blocks", "sidecars")):
            super().sync_directory(name)


class DeletionsNotSynced(RecordingFiles):
    """Syncs no directory of payloads whose last change was an unlink."""

    _last: str = ""

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._last = "rename"

    def unlink(self, name: str) -> None:
        super().unlink(name)
        self._last = "unlink"

    def sync_directory(self, name: str) -> None:
        if self._last != "unlink" or not name.startswith(("blocks/", "sidecars/")):
            super().sync_directory(name)


def committed_before_renamed(patch: pytest.MonkeyPatch) -> None:
    real = ordering.apply_records

    def no_publish(core: MutableCore, claims: list[Claim]) -> list[Claim]:
        return claims

    def apply_records(core: MutableCore, records: Iterable[Record]) -> None:
        records = list(records)
        for record in records:
            event = record.event
            if isinstance(event, Committed) and event.file is not None:
                core.files.rename(event.file.staging_path, event.file.path)
                core.files.sync_directory("staging")
                core.files.sync_directory(event.file.path.rpartition("/")[0])
        real(core, records)

    patch.setattr(ordering, "_publish", no_publish)
    patch.setattr(ordering, "apply_records", apply_records)


def names_reused(patch: pytest.MonkeyPatch) -> None:
    """A file is named after its key, so a replacement overwrites what it replaces."""
    real = vars(ordering)["_stage_writing"]
    current: list[Writing] = []

    def stage_writing(core: MutableCore, claim: Claim, writing: Writing) -> None:
        current[:] = [writing]
        real(core, claim, writing)

    def name(kind: Kind, epoch: int, counter: int) -> FileName:
        # Block and sidecar of one key are staged side by side.
        return FileName(kind, 1, 2 * int.from_bytes(current[0].part.key[:2], "big") + kind)

    patch.setattr(ordering, "_stage_writing", stage_writing)
    patch.setattr(ordering, "FileName", name)


def head_before_commit(patch: pytest.MonkeyPatch) -> None:
    real = vars(MutableLog)["_put_events"]

    def put_events(log: MutableLog, transaction: Any, events: Sequence[Event], at: Any) -> Any:
        proposal = real(log, transaction, events, at)
        position = proposal.position
        vars(log)["_head"].write(
            Head(sequence=position.sequence, link=position.link, epoch=position.epoch)
        )
        return proposal

    patch.setattr(MutableLog, "_put_events", put_events)


def journal_made_in_place(patch: pytest.MonkeyPatch) -> None:
    def no_rename(files: Files) -> None:
        files.sync_directory("journal")
        files.sync_directory("")

    patch.setattr(environment, "NEW_FOLDER", "journal")
    patch.setattr(environment, "put_in_place", no_rename)


# The deleting.


def unlinked_before_evicted(patch: pytest.MonkeyPatch) -> None:
    real = MutableCore.ride

    def ride(core: MutableCore, event: Event) -> None:
        real(core, event)
        if isinstance(event, Evicted):
            entry = core.state.entry(event.kind, event.key)
            if entry is not None and entry.file is not None:
                core.files.unlink(entry.file.path)

    patch.setattr(MutableCore, "ride", ride)


def deleted_before_unlinked(patch: pytest.MonkeyPatch) -> None:
    real_delete, real_apply = vars(MutableJanitor)["_delete"], ordering.apply_records

    def delete(janitor: MutableJanitor, file: FileName, *rest: Any) -> Event:
        files = vars(janitor)["_core"].files
        if isinstance(files, RecordingFiles) and file.path in files.refused:
            return real_delete(janitor, file, *rest)
        return Deleted(file=file, already_gone=False)

    def apply_records(core: MutableCore, records: Iterable[Record]) -> None:
        records = list(records)
        real_apply(core, records)
        for record in records:
            if isinstance(record.event, Deleted):
                with contextlib.suppress(FileNotFoundError):
                    core.files.unlink(record.event.file.path)

    patch.setattr(MutableJanitor, "_delete", delete)
    patch.setattr(ordering, "apply_records", apply_records)


# The epochs and the sweep.


def orphans_kept(patch: pytest.MonkeyPatch) -> None:
    def unlink_all(files: Files, epoch: int, names: list[str]) -> Swept:
        return Swept(epoch=epoch, file_count=len(names), nbytes=0)

    patch.setattr(sweep, "_unlink_all", unlink_all)


def opened_after_the_files(patch: pytest.MonkeyPatch) -> None:
    """``Opened`` rides with the epoch's first other commit."""
    real = MutableLog.append
    held: list[Event] = []

    def append(log: MutableLog, events: Sequence[Event], **where: Any) -> list[Record]:
        if any(isinstance(event, Opened) for event in events):
            held[:] = events
            return [
                Record(
                    sequence=log.sequence + 1 + index,
                    wall_ns=where["wall_ns"],
                    epoch=where["epoch"],
                    event=event,
                )
                for index, event in enumerate(events)
            ]
        count = len(held)
        records = real(log, [*held, *events], **where)
        held.clear()
        return records[count:]

    patch.setattr(MutableLog, "append", append)


def epoch_reused(patch: pytest.MonkeyPatch) -> None:
    """An opening goes on in the epoch before, and so begins its counter again."""
    real = vars(recovery)["_make_epoch_folders"]

    def make_epoch_folders(files: Files, state: Any, head_epoch: int) -> tuple[int, list[int]]:
        return (state.epoch, []) if state.epoch else real(files, state, head_epoch)

    patch.setattr(recovery, "_make_epoch_folders", make_epoch_folders)


def staged_without_abandoned(patch: pytest.MonkeyPatch) -> None:
    real = sweep.append

    def append(core: MutableCore, events: list[Event]) -> None:
        real(core, [each for each in events if type(each).__name__ != "Abandoned"])

    patch.setattr(sweep, "append", append)


def older_quarantines_not_finished(patch: pytest.MonkeyPatch) -> None:
    def finish_none(core: MutableCore) -> list[Event]:
        return []

    patch.setattr(sweep, "_finish_quarantines", finish_none)


def rolled_back_journal_trusted(patch: pytest.MonkeyPatch) -> None:
    """What the journal does not name is swept, although HEAD knows that it named more."""

    def is_behind(log: LogReader, head: Head) -> bool:
        return False

    patch.setattr(LogReader, "is_behind", is_behind)


MUTANTS = (
    Mutant("payloads not synced", lost_power, files=PayloadsNotSynced),
    Mutant("directories not synced", lost_power, files=DirectoriesNotSynced),
    Mutant("deletions not synced", lost_power, files=DeletionsNotSynced),
    Mutant("committed before renamed", died, committed_before_renamed),
    Mutant("file names reused", told, names_reused),
    Mutant("HEAD before the commit", died, head_before_commit),
    Mutant("journal made in place", died, journal_made_in_place),
    Mutant("unlinked before Evicted", died, unlinked_before_evicted),
    Mutant("Deleted before the unlink", died, deleted_before_unlinked),
    Mutant("orphans kept", died, orphans_kept),
    Mutant("Opened after the files", died, opened_after_the_files),
    Mutant("epoch reused", told, epoch_reused),
    Mutant("Staged without Abandoned", died, staged_without_abandoned),
    Mutant("older quarantines not finished", died, older_quarantines_not_finished),
    Mutant("rolled-back journal trusted", rolled_back, rolled_back_journal_trusted),
)
