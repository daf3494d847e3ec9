"""Backups of the journal: compacted copies under ``backup/``, the two newest kept.

LMDB has no checksums and its two meta pages are its only roots, so one bad sector can cost the
journal. A copy of 10 MB takes 9 ms. ``store`` reconciles what a backup does not know.
"""

import contextlib

from .archive import make_folder
from .environment import FOLDER as JOURNAL
from .environment import NEW_FOLDER, put_in_place, remove_folder
from .files import Files
from .log_reader import LogReader
from .verify import verify_in_child

FOLDER = "backup"
BAD_FOLDER = "journal.bad"

_KEPT_COUNT = 2
_COPY_BYTES = 1 << 20


def write_backup(log: LogReader, files: Files) -> str:
    """Durably write a backup of the log as it is, remove all but the two newest, return its name.

    Raises ``OSError`` if the disk does not take it; the older backups are then untouched.
    """
    name = f"{FOLDER}/{log.sequence:016x}.mdb"
    new_name = f"{FOLDER}/{log.sequence:016x}.new"
    make_folder(files, FOLDER)
    for each in files.names(FOLDER):
        if each.endswith(".new"):
            files.unlink(f"{FOLDER}/{each}")
    descriptor = files.create(new_name)
    try:
        log.copy_to(descriptor)
        files.sync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            files.unlink(new_name)
        raise
    finally:
        files.close_file(descriptor)
    files.rename(new_name, name)
    files.sync_directory(FOLDER)
    for older in _backups(files)[_KEPT_COUNT:]:
        files.unlink(older)
    return name


def restore_backup(files: Files) -> str | None:
    """Put the newest backup that verifies in the journal's place and return its name, or None.

    The journal must be closed. It is kept as ``journal.bad``, in place of an older one. A crash
    leaves either the bad journal or none in place; done again, this ends the same.
    """
    for name in _backups(files):
        remove_folder(files, NEW_FOLDER)
        files.make_directory(NEW_FOLDER)
        _copy(files, name, f"{NEW_FOLDER}/data.mdb")
        if verify_in_child(files.root, NEW_FOLDER) is not None:
            continue
        if files.status(JOURNAL) is not None:
            remove_folder(files, BAD_FOLDER)
            files.rename(JOURNAL, BAD_FOLDER)
        put_in_place(files)
        return name
    remove_folder(files, NEW_FOLDER)
    return None


def _backups(files: Files) -> list[str]:
    """Newest first: the names are sequences of one width."""
    if files.status(FOLDER) is None:
        return []
    names = [each for each in files.names(FOLDER) if each.endswith(".mdb")]
    return [f"{FOLDER}/{each}" for each in reversed(names)]


def _copy(files: Files, source: str, target: str) -> None:
    reader = files.open(source)
    try:
        writer = files.create(target)
        try:
            buffer = memoryview(bytearray(_COPY_BYTES))
            offset = 0
            while count := files.read(reader, [buffer], offset):
                files.write(writer, [buffer[:count]], offset)
                offset += count
        finally:
            files.close_file(writer)
    finally:
        files.close_file(reader)
