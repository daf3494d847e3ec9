"""Opening a cache: who it is, whether its journal can be trusted, and what a crash left behind.

Each step may be the last: a crash inside it repeats it. Nothing here opens a payload, unless the
journal was rolled back or lost. After a clean close no directory is listed.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..journal.environment import FOLDER
from ..journal.errors import (
    DiskFullError,
    RootRefusedError,
    WalkbackError,
)
from ..journal.events import Closed, Event, Opened, Rebuilt, SettingSet
from ..journal.files import Files
from ..journal.head import MutableHead
from ..journal.state import State
from ..journal.words import Kind
from .core import Clock, MutableCore
from .found_journal import FoundJournal, find_journal
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
    read_owner,
    sync_root,
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
                sync_root(files.root)
                identity = make_identity(files)
            elif files.status(FOLDER) is None:
                # Who made it may not have lived to make its name durable; nothing else is made
                # before that is.
                files.sync_directory("")
            make_folders(files)
        except OSError as error:
            if error.errno not in NOT_WRITABLE:
                raise
            raise RootRefusedError(f"{files.root} cannot be written: {error.strerror}") from error
        head = MutableHead(files)
        journal = find_journal(files, identity, head, previous, owner)
        try:
            core = _begin_epoch(journal, files, identity, head, owner, settings, clock, versions)
            sweep(core)
            write_owner(files, owner)
        except BaseException:
            journal.log.abandon()
            raise
    except BaseException as error:
        if head is not None:
            head.close()
        files.close()
        if isinstance(error, OSError) and (named := _named(error, files.root)) is not None:
            raise named from error
        raise
    return OpenedCache(core=core, head=head, identity=identity)


def _named(error: OSError, root: Path) -> WalkbackError | None:
    """What an opening says instead, if an error of the system needs an explanation."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"{root} cannot be opened, for that needs a few kilobytes and the disk is full: free "
            "some space"
        )
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        return RootRefusedError(
            f"{error.filename or root} is a link or a file where the cache had a folder: put the "
            "folder back, or start with an empty directory"
        )
    return None


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


def _begin_epoch(
    journal: FoundJournal,
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
