"""Ways to break how a cache writes, deletes, opens and counts. ``mutants.py`` lists them."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from walkback.journal import environment
from walkback.journal.errors import CommitUnknownError
from walkback.journal.events import Committed, Deleted, Event, Evicted, Opened, Record, Swept
from walkback.journal.files import Files
from walkback.journal.head import Head
from walkback.journal.log import MutableLog
from walkback.journal.log_reader import LogReader
from walkback.journal.state import State
from walkback.journal.words import FileName, Kind
from walkback.store import ordering, outcomes, recovery, sweep
from walkback.store import store as opening
from walkback.store.boundary import Claim, NotStored, Writing
from walkback.store.core import MutableCore
from walkback.store.deletion import MutableJanitor

from .recording import ActingFiles, RecordingFiles


def _skip(
    patch: pytest.MonkeyPatch, method: str, is_skipped: Callable[[ActingFiles, Any], bool]
) -> None:
    """Have the files of all histories leave out some calls of a method."""

    def skipping(real: Callable[[ActingFiles, Any], None]) -> Callable[[ActingFiles, Any], None]:
        def call(files: ActingFiles, argument: Any) -> None:
            if not is_skipped(files, argument):
                real(files, argument)

        return call

    for kind in (ActingFiles, RecordingFiles):
        patch.setattr(kind, method, skipping(getattr(kind, method)))


# The writing.


def payloads_not_synced(patch: pytest.MonkeyPatch) -> None:
    def sync(files: ActingFiles, descriptor: int) -> bool:
        if not files.path_of(descriptor).startswith("staging/"):
            return False
        files.interrupt(descriptor)
        return True

    _skip(patch, "sync", sync)


def directories_not_synced(patch: pytest.MonkeyPatch) -> None:
    _skip(patch, "sync_directory", lambda files, name: name.startswith(("blocks", "sidecars")))


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


def pair_in_two_transactions(patch: pytest.MonkeyPatch) -> None:
    real = MutableLog.append

    def append(log: MutableLog, events: Sequence[Event], **where: Any) -> list[Record]:
        for index, event in enumerate(events):
            if isinstance(event, Committed) and event.kind is Kind.SIDECAR and index:
                records = real(log, events[:index], **where)
                return [*records, *real(log, events[index:], **where)]
        return real(log, events, **where)

    patch.setattr(MutableLog, "append", append)


# The deleting.


def deletions_not_synced(patch: pytest.MonkeyPatch) -> None:
    def sync(janitor: MutableJanitor, *args: Any) -> None:
        pass

    patch.setattr(MutableJanitor, "_sync", sync)


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


def only_last_epoch_swept(patch: pytest.MonkeyPatch) -> None:
    real = sweep.sweep

    def sweep_last(core: MutableCore) -> None:
        earlier = sorted(core.state.unswept - {core.state.epoch})[:-1]
        core.unreadable_epochs |= frozenset(earlier)
        real(core)

    patch.setattr(recovery, "sweep", sweep_last)


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


# The ledger and the replay.


def ledger_in_logical_bytes(patch: pytest.MonkeyPatch) -> None:
    real = ordering.stage

    def stage(*args: Any) -> Any:
        staged = real(*args)
        return replace(staged, charge_bytes=staged.nbytes)

    patch.setattr(ordering, "stage", stage)


def replay_decides_again(patch: pytest.MonkeyPatch) -> None:
    """An opening evicts what another policy would choose now, instead of what was chosen."""
    real_load, real_apply = LogReader.load, State.apply
    is_replaying = False

    def load(log: LogReader) -> State:
        nonlocal is_replaying
        is_replaying = True
        try:
            return real_load(log)
        finally:
            is_replaying = False

    def apply(state: State, record: Record) -> None:
        event = record.event
        if is_replaying and isinstance(event, Evicted) and event.kind is Kind.BLOCK:
            *_, warmest = state.coldest_leaves()
            again = replace(event, key=warmest.key, generation=warmest.generation)
            record = replace(record, event=again)
        real_apply(state, record)

    patch.setattr(LogReader, "load", load)
    patch.setattr(State, "apply", apply)


# Memory, room, locks and doubt.


def memory_released_twice(patch: pytest.MonkeyPatch) -> None:
    real = outcomes.release_memory

    def release_memory(core: MutableCore, claim: Claim) -> None:
        nbytes = claim.staging_bytes
        real(core, claim)
        if claim.refusal is not None:
            core.staging_bytes -= nbytes

    patch.setattr(outcomes, "release_memory", release_memory)


def room_never_released(patch: pytest.MonkeyPatch) -> None:
    real = outcomes.settle_claim

    def settle_claim(core: MutableCore, claim: Claim, refusal: NotStored | None) -> None:
        nbytes = claim.reserved_bytes if refusal is not None else 0
        real(core, claim, refusal)
        core.overlay.reserved_bytes += nbytes

    for module in (outcomes, ordering):
        patch.setattr(module, "settle_claim", settle_claim)


def failed_commit_taken_for_none(patch: pytest.MonkeyPatch) -> None:
    """The files of a commit that stands after all are unlinked at once."""
    real = ordering.settled

    def settled(core: MutableCore, error: CommitUnknownError) -> None:
        real(core, error)

    patch.setattr(ordering, "settled", settled)


def lock_kept_by_a_failed_opening(patch: pytest.MonkeyPatch) -> None:
    real = opening.open_cache

    def open_cache(*where: Any, make_files: Callable[[Path], Files], **others: Any) -> Any:
        kept: list[int] = []

        def keeping(root: Path) -> Files:
            files = make_files(root)
            # One lock, held through two descriptors.
            kept.append(os.dup(files.descriptor))
            return files

        opened = real(*where, make_files=keeping, **others)
        for descriptor in kept:
            os.close(descriptor)
        return opened

    patch.setattr(opening, "open_cache", open_cache)


# What LMDB and the system are believed to have done.


def lmdb_not_synced(patch: pytest.MonkeyPatch) -> None:
    _open_lmdb_with(patch, sync=False)


def lmdb_meta_not_synced(patch: pytest.MonkeyPatch) -> None:
    _open_lmdb_with(patch, metasync=False)


def _open_lmdb_with(patch: pytest.MonkeyPatch, **settings: bool) -> None:
    real: Any = lmdb.open

    def open_it(*args: Any, **others: Any) -> Any:
        return real(*args, **{**others, **settings})

    patch.setattr(lmdb, "open", open_it)


def root_not_synced(patch: pytest.MonkeyPatch) -> None:
    def sync_root(root: Path) -> None:
        pass

    patch.setattr(recovery, "sync_root", sync_root)


def failed_sync_repeated(patch: pytest.MonkeyPatch) -> None:
    """A sync that says yes the second time is believed."""
    real = Files.sync

    def sync(files: Files, descriptor: int) -> None:
        try:
            real(files, descriptor)
        except OSError:
            real(files, descriptor)

    patch.setattr(Files, "sync", sync)


def failed_commit_believed_undone(patch: pytest.MonkeyPatch) -> None:
    """What LMDB put back in memory is taken for what is on the disk."""
    inside = vars(environment.MutableEnvironment)

    def reopen(env: environment.MutableEnvironment) -> None:
        env.close()
        env.is_unsettled = True
        where = vars(env)["_files"], vars(env)["_folder"]
        inside["_attach"](env, vars(environment)["_open"](*where, read_only=False))
        env.is_unsettled = False

    patch.setattr(environment.MutableEnvironment, "reopen", reopen)
