"""Removing what unclean epochs left behind. A crash inside the sweep repeats it."""

import contextlib
import re

from ..journal.events import Abandoned, Deleted, Event, Swept
from ..journal.files import Files
from ..journal.words import AbandonReason, FileName, Kind
from .core import MutableCore
from .reconcile import NUMBER, named_files

ARCHIVE_ASIDE = "archive.bad"

_QUARANTINED = re.compile(r"(block|sidecar)-[0-9a-f]{8}-[0-9a-f]{8}")
_SEGMENT = re.compile(r"[0-9a-f]{16}(\.new)?")


def sweep(core: MutableCore) -> None:
    """Remove what unclean epochs left and no event names; finish their quarantines."""
    state, files = core.state, core.files
    unclean = sorted(state.unswept - {state.epoch} - core.unreadable_epochs)
    if not unclean:
        events = _finish_quarantines(core)
        if events:
            append(core, events)
        return
    named = set(named_files(state))
    events: list[Event] = [
        Abandoned(file=file, reason=AbandonReason.CRASH)
        for file in sorted(state.staged)
        if file.epoch in unclean
    ]
    staged = [name for name in files.names("staging") if NUMBER.fullmatch(name[:8])]
    folders: set[str] = {"staging"}
    for epoch in unclean:
        names = [f"staging/{name}" for name in staged if name.startswith(f"{epoch:08x}-")]
        for kind in Kind:
            folder = f"{kind.folder}/{epoch:08x}"
            if files.status(folder) is None:
                continue
            folders.add(folder)
            for name in files.names(folder):
                is_ours = NUMBER.fullmatch(name) is not None
                if is_ours and FileName(kind, epoch, int(name, 16)) not in named:
                    names.append(f"{folder}/{name}")
        swept = _unlink_all(files, epoch, names)
        if swept is not None:
            events.append(swept)
    for folder in sorted(folders):
        files.sync_directory(folder)
    events += _finish_quarantines(core)
    _remove_forgotten(core)
    append(core, events)
    for epoch in unclean:
        for kind in Kind:
            # An epoch's folder is worth keeping only while it holds something.
            with contextlib.suppress(OSError):
                files.remove_directory(f"{kind.folder}/{epoch:08x}")


def _finish_quarantines(core: MutableCore) -> list[Event]:
    """Have every quarantined file moved that is not: an unclean epoch may have moved older ones'.

    A power loss in the middle of a move leaves the file under both names, or under none.
    """
    events: list[Event] = []
    for file in sorted(core.state.quarantined):
        aside = core.files.status(file.quarantine_path)
        in_place = core.files.status(file.path)
        if aside is not None and in_place is not None:
            # To a rename two names of one file are the same, so it would leave both. Anything else
            # that stands aside is a stranger: the file stays where it is.
            if aside.inode == in_place.inode:
                with contextlib.suppress(OSError):
                    core.files.unlink(file.path)
                    core.files.sync_directory(file.path.rpartition("/")[0])
        elif in_place is not None:
            core.overlay.to_move.add(file)
        elif aside is None:
            events.append(Deleted(file=file, already_gone=True))
    return events


def _remove_forgotten(core: MutableCore) -> None:
    """Unlink what no event names in ``quarantine/`` and ``archive/``; what cannot go stays.

    A deletion whose directory was not synced leaves such a file, or a journal that was rolled back,
    or a compaction that a crash cut short.
    """
    state, files = core.state, core.files
    if core.is_rebuilt:
        _put_archive_aside(core)
    named = {file.quarantine_path for file in (*state.quarantined, *state.doomed)}
    named |= {segment.path for segment in state.segments.values()}
    for folder, ours in (("quarantine", _QUARANTINED), ("archive", _SEGMENT)):
        paths = [f"{folder}/{name}" for name in files.names(folder) if ours.fullmatch(name)]
        forgotten = [path for path in paths if path not in named]
        with contextlib.suppress(OSError):
            for path in forgotten:
                files.unlink(path)
            if forgotten:
                files.sync_directory(folder)


def _put_archive_aside(core: MutableCore) -> None:
    """Keep the segments that a journal which lost its last words does not name: they have them."""
    files = core.files
    named = {segment.path for segment in core.state.segments.values()}
    others = [name for name in files.names("archive") if f"archive/{name}" not in named]
    if not others:
        return
    if files.status(ARCHIVE_ASIDE) is None:
        files.make_directory(ARCHIVE_ASIDE)
    for name in others:
        files.rename(f"archive/{name}", f"{ARCHIVE_ASIDE}/{name}")
    for folder in ("archive", ARCHIVE_ASIDE, ""):
        files.sync_directory(folder)


def _unlink_all(files: Files, epoch: int, names: list[str]) -> Swept | None:
    """Unlink files that no event names. None if one stays: then the epoch stays unswept too."""
    nbytes = 0
    try:
        for name in names:
            status = files.status(name)
            if status is not None:
                nbytes += status.charge_bytes
                files.unlink(name)
    except OSError:
        return None
    return Swept(epoch=epoch, file_count=len(names), nbytes=nbytes)


def append(core: MutableCore, events: list[Event]) -> None:
    """Commit and fold events while no other thread runs."""
    records = core.log.append(events, epoch=core.epoch, wall_ns=core.clock.wall_ns())
    for record in records:
        core.state.apply(record)
        core.counts.events[type(record.event).__name__] += 1
