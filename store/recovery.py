"""Opening a cache: who it is, whether its journal can be trusted, and what a crash left behind.

Each step may be the last: a crash inside it repeats it. Nothing here opens a payload, unless the
journal was rolled back or lost. After a clean close no directory is listed.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..journal.backup import restore_backup
from ..journal.environment import FOLDER, remove_folder
from ..journal.errors import DiskFullError, JournalDamagedError, RootRefusedError, WalkbackError
from ..journal.events import Closed, Event, Opened, Rebuilt, SettingSet
from ..journal.files import Files
from ..journal.head import MutableHead
from ..journal.log import MutableLog
from ..journal.state import State
from ..journal.verify import verify_in_child
from ..journal.words import Kind
from .core import Clock, MutableCore
from .ordering import measure_journal
from .reconcile import NUMBER, reconcile
from .root import (
    NOT_WRITABLE,
    Owner,
    StoreIdentity,
    load_identity,
    lock_root,
    make_folders,
    make_identity,
    needs_verification,
    read_owner,
    this_process,
    write_owner,
)
from .settings import GIB, StoreSettings
from .sweep import append, sweep

BUDGET = "budget_bytes"

_NO_LINK = bytes(16)


@dataclass(slots=True)
class OpenedCache:
    """What opening yields; the store owns all of it from then on."""

    core: MutableCore
    head: MutableHead
    identity: StoreIdentity


@dataclass(slots=True)
class _Journal:
    log: MutableLog
    state: State
    # Why the journal may not know all payloads, or None if it does.
    cause: str | None


def open_cache(
    path: Path,
    settings: StoreSettings,
    *,
    clock: Clock,
    versions: str,
    make_files: Callable[[Path], Files] = Files,
) -> OpenedCache:
    """Lock, verify, replay, begin an epoch, and sweep what unclean epochs left.

    Raises what ``lock_root`` raises, and FormatError for a newer journal. ``OSError`` passes.
    """
    files = lock_root(path, is_new_allowed=True, make_files=make_files)
    head: MutableHead | None = None
    try:
        identity = load_identity(files)
        previous = read_owner(files)
        owner = this_process()
        try:
            # Until the journal is known to be good no boot vouches for it: a death while it is
            # being read must not look like one that needs no verification.
            write_owner(files, Owner(pid=owner.pid, boot_id=""))
            if identity is None:
                identity = make_identity(files)
            make_folders(files)
        except OSError as error:
            if error.errno not in NOT_WRITABLE:
                raise
            raise RootRefusedError(f"{files.root} cannot be written: {error.strerror}") from error
        head = MutableHead(files)
        journal = _open_journal(files, identity, head, previous, owner)
        try:
            write_owner(files, owner)
            core = _begin_epoch(journal, files, identity, head, owner, settings, clock, versions)
            sweep(core)
        except BaseException:
            journal.log.abandon()
            raise
    except BaseException as error:
        if head is not None:
            head.close()
        files.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"{files.root} cannot be opened, for that needs a few kilobytes and the disk is "
                "full: free some space"
            ) from error
        raise
    return OpenedCache(core=core, head=head, identity=identity)


def close_cache(opened: OpenedCache, *, is_clean: bool) -> None:
    """End the epoch. Without ``is_clean`` the next opening sweeps it as after a crash."""
    core = opened.core
    try:
        if is_clean and not core.log.is_unsettled and _record_close(core):
            core.log.close_clean()
        else:
            core.log.abandon()
    finally:
        opened.head.close()
        core.files.close()


def _record_close(core: MutableCore) -> bool:
    """Commit ``Closed``; False if the disk does not take it, which is then as after a crash."""
    try:
        names = [f"{FOLDER}/{name}" for name in core.files.names(FOLDER)]
        found = [(name, core.files.status(name)) for name in names]
        files = tuple(
            (name, status.nbytes, status.inode, status.mtime_ns)
            for name, status in found
            if status is not None
        )
        append(core, [Closed(files=files)])
    except (OSError, WalkbackError):
        return False
    return True


def _open_journal(
    files: Files,
    identity: StoreIdentity,
    head: MutableHead,
    previous: Owner | None,
    owner: Owner,
) -> _Journal:
    """The log and its fold: as it is, or from a backup, or new."""
    cause: str | None = None
    if files.status(FOLDER) is None:
        # A new cache has no HEAD and no payloads; anything else has lost its journal.
        if head.value is not None or any(files.names(kind.folder) for kind in Kind):
            cause = "the journal was missing"
            restore_backup(files)
    elif needs_verification(files, head.value, previous=previous, owner=owner):
        cause = verify_in_child(files.root)
        if cause is not None:
            _replace_journal(files)
    if files.status(FOLDER) is None:
        MutableLog.create(files, identity.store_id)
    try:
        log, state = _load(files, identity, head)
    except JournalDamagedError as error:
        cause = str(error)
        _replace_journal(files)
        if files.status(FOLDER) is None:
            MutableLog.create(files, identity.store_id)
        log, state = _load(files, identity, head)
    if cause is None and head.value is not None and log.is_behind(head.value):
        cause = f"the journal ends at event {log.sequence}, and HEAD saw {head.value.sequence}"
    return _Journal(log, state, cause)


def _replace_journal(files: Files) -> None:
    """Put the newest good backup in the journal's place; without one, put the journal aside."""
    if restore_backup(files) is None:
        remove_folder(files, "journal.bad")
        files.rename(FOLDER, "journal.bad")
        files.sync_directory("")


def _load(files: Files, identity: StoreIdentity, head: MutableHead) -> tuple[MutableLog, State]:
    log = MutableLog.open(files, store_id=identity.store_id, head=head)
    try:
        return log, log.load()
    except BaseException:
        log.abandon()
        raise


def _begin_epoch(
    journal: _Journal,
    files: Files,
    identity: StoreIdentity,
    head: MutableHead,
    owner: Owner,
    settings: StoreSettings,
    clock: Clock,
    versions: str,
) -> MutableCore:
    """Make the epoch's folders, then commit ``Opened``; only then may payloads be made."""
    state, old_head = journal.state, head.value
    epoch, newer = _make_epoch_folders(files, state, old_head.epoch if old_head else 0)
    cause = journal.cause
    if cause is None and newer:
        cause = f"epoch {max(newer)} left payloads that the journal does not know of"
    opened = Opened(epoch=epoch, pid=owner.pid, boot_id=owner.boot_id, versions=versions)
    events: list[Event] = [opened]
    unreadable: frozenset[int] = frozenset()
    if cause is not None:
        # In one transaction with Opened: once HEAD follows, nothing would tell of the roll-back.
        findings = reconcile(files, state, identity.store_id)
        events.append(
            Rebuilt(
                old_sequence=old_head.sequence if old_head else 0,
                old_head=old_head.link if old_head else _NO_LINK,
                cause=cause[:500],
                epochs=tuple(each for each in findings.epochs if each != epoch),
            )
        )
        events.extend(findings.events)
        unreadable = findings.unreadable
    budget_bytes = _budget(files, state, settings)
    if state.settings.get(BUDGET) != budget_bytes:
        events.append(SettingSet(name=BUDGET, value=budget_bytes))
    core = MutableCore(
        files=files,
        log=journal.log,
        state=state,
        settings=settings,
        store_id=identity.store_id,
        budget_bytes=budget_bytes,
        clock=clock,
    )
    core.unreadable_epochs = unreadable
    core.is_rebuilt = cause is not None
    records = core.log.append(events, epoch=epoch, wall_ns=clock.wall_ns())
    for record in records:
        state.apply(record)
        core.counts.events[type(record.event).__name__] += 1
    measure_journal(core)
    return core


def _make_epoch_folders(files: Files, state: State, head_epoch: int) -> tuple[int, list[int]]:
    """The new epoch, and newer ones than the journal's that hold payloads.

    The directories are listed only if a folder with the next number is already there.
    """
    epoch = 1 + max(state.epoch, head_epoch)
    newer: list[int] = []
    try:
        _make_folders_of(files, epoch)
    except FileExistsError:
        names = [
            (kind, int(name, 16))
            for kind in Kind
            for name in files.names(kind.folder)
            if NUMBER.fullmatch(name)
        ]
        newer = [
            number
            for kind, number in names
            if number > state.epoch and files.names(f"{kind.folder}/{number:08x}")
        ]
        epoch = 1 + max(epoch, *(number for _, number in names))
        _make_folders_of(files, epoch)
    return epoch, newer


def _make_folders_of(files: Files, epoch: int) -> None:
    for kind in Kind:
        files.make_directory(f"{kind.folder}/{epoch:08x}")
    for kind in Kind:
        files.sync_directory(kind.folder)


def _budget(files: Files, state: State, settings: StoreSettings) -> int:
    """The configured budget, else the recorded one, else a quarter of what is free now."""
    if settings.budget_bytes is not None:
        return settings.budget_bytes
    recorded = state.settings.get(BUDGET)
    return recorded if recorded is not None else max(files.free_bytes() // 4, GIB // 4)
