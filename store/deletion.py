"""Deleting doomed files, moving quarantined ones, and what happens when the disk refuses.

A file is removed only if it is what the journal says: a regular file of that size, with one link,
ours, reached through directories that are none of them links. Anything else is refused and never
followed. The order is: tombstone durable, unlink, directory synced once for the batch, ``Deleted``.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import tenacity

from ..journal.events import Deleted, DeletionRefused, Event
from ..journal.files import Files
from ..journal.words import FileName
from .core import Mode, MutableCore

# A directory of one batch is synced once; a bound keeps the wait for the first of them short.
BATCH_FILES = 256

# A transient refusal (a virus scanner, a busy network volume) is gone within a second; after that
# the file is left for later, on a doubling wait, and the journal says so each time.
_AT_ONCE = tenacity.stop_after_attempt(3)
_BETWEEN = tenacity.wait_exponential(multiplier=0.02, max=0.2)
_LATER = tenacity.wait_exponential(multiplier=1.0, max=3600.0)


class RefusedError(Exception):
    """What stands under the name is not what the journal recorded."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    attempts: int
    due: float


class MutableJanitor:
    """A thread that finishes what tombstones and quarantines began. Owner of its retry times."""

    def __init__(self, core: MutableCore) -> None:
        self._core = core
        self._refusals: dict[FileName, _Refusal] = {}
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="walkback-janitor", daemon=True)
        with core.lock:
            now = core.clock.monotonic()
            for doomed in core.state.doomed.values():
                if doomed.refusals:
                    self._refusals[doomed.file] = _Refusal(doomed.refusals, now)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the pass under way and end the thread."""
        with self._core.lock:
            self._is_stopping = True
            self._core.lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def run_once(self) -> int:
        """Delete and move what is due now; how many files that were. Its events ride."""
        core = self._core
        with core.lock:
            if core.mode in (Mode.OFFLINE, Mode.CLOSED):
                return 0
            doomed = self._due_deletions()[:BATCH_FILES]
            moves = sorted(core.overlay.to_move - core.overlay.condemned)[:BATCH_FILES]
        events: list[Event] = []
        folders: set[str] = set()
        for file, nbytes in doomed:
            events.append(self._delete(file, nbytes, folders))
        events += [refusal for file in moves if (refusal := self._move(file, folders))]
        self._sync(folders, events, doomed)
        with core.lock:
            core.overlay.to_move -= set(moves)
            for event in events:
                core.ride(event)
                if isinstance(event, Deleted):
                    core.overlay.deleted.add(event.file)
                    core.overlay.to_move.discard(event.file)
                elif isinstance(event, DeletionRefused) and event.file in core.overlay.condemned:
                    core.overlay.condemned.discard(event.file)
                    core.overlay.stuck.add(event.file)
            core.overlay.is_urgent |= bool(events)
            core.lock.notify_all()
        return len(events) + len(moves)

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - without it nothing is deleted, and nobody told
            self._core.stop_writing(Mode.READING, f"the janitor died: {error!r}")

    def _loop(self) -> None:
        core = self._core
        while True:
            with core.lock:
                while not self._is_stopping and not self._has_work():
                    core.lock.wait(timeout=1.0)
                if self._is_stopping:
                    return
            self.run_once()

    def _has_work(self) -> bool:
        overlay = self._core.overlay
        if self._core.mode in (Mode.OFFLINE, Mode.CLOSED):
            return False
        return bool(overlay.to_move - overlay.condemned or self._due_deletions())

    def _due_deletions(self) -> list[tuple[FileName, int | None]]:
        """Files to delete now, with the size that they must have. Needs the lock."""
        core, now = self._core, self._core.clock.monotonic()
        wanted: list[tuple[FileName, int | None]] = [
            (doomed.file, doomed.nbytes) for doomed in core.state.doomed.values()
        ]
        wanted += [(file, None) for file in core.overlay.condemned | core.overlay.stuck]
        return [
            (file, nbytes)
            for file, nbytes in wanted
            if file not in core.overlay.deleted
            and not core.overlay.leased[file]
            and (file not in self._refusals or self._refusals[file].due <= now)
        ]

    def _delete(self, file: FileName, nbytes: int | None, folders: set[str]) -> Event:
        """Unlink one file and say what became of it."""
        paths = [file.path] if nbytes is not None else [file.quarantine_path, file.path]
        already_gone = True
        try:
            for path in paths:
                already_gone &= not _retrying(_remove, self._core.files, path, nbytes)
                # Also if nothing stood there: whoever removed it may not have synced.
                folders.add(path.rpartition("/")[0])
        except (OSError, RefusedError) as error:
            return self._refuse(file, error)
        self._refusals.pop(file, None)
        return Deleted(file=file, already_gone=already_gone)

    def _refuse(self, file: FileName, error: Exception) -> DeletionRefused:
        attempts = 1 + (self._refusals[file].attempts if file in self._refusals else 0)
        wait = _wait_after(attempts)
        self._refusals[file] = _Refusal(attempts, self._core.clock.monotonic() + wait)
        return DeletionRefused(file=file, reason=str(error)[:200], attempts=attempts)

    def _move(self, file: FileName, folders: set[str]) -> Event | None:
        """Put a quarantined file aside. One that cannot be moved stays in place until reopened."""
        files = self._core.files
        try:
            if files.status(file.path) is not None:
                files.rename(file.path, file.quarantine_path)
                folders |= {"quarantine", file.path.rpartition("/")[0]}
        except OSError as error:
            return self._refuse(file, error)
        return None

    def _sync(
        self,
        folders: set[str],
        events: list[Event],
        doomed: list[tuple[FileName, int | None]],
    ) -> None:
        try:
            for folder in sorted(folders):
                with contextlib.suppress(FileNotFoundError):
                    self._core.files.sync_directory(folder)
        except OSError as error:
            # The names may come back after a power cut, so the files are not deleted yet, and the
            # epoch is not closed before what was moved is durable.
            self._core.unsynced |= folders
            events[:] = [self._refuse(file, error) for file, _ in doomed]


def _remove(files: Files, path: str, nbytes: int | None) -> bool:
    """Unlink a file that is what it should be; False if nothing stands there."""
    status = files.status(path)
    if status is None:
        return False
    if not status.is_file:
        raise RefusedError(f"{path} is not a regular file")
    if status.links != 1:
        raise RefusedError(f"{path} has {status.links} links")
    if status.owner != os.geteuid():
        raise RefusedError(f"{path} belongs to user {status.owner}")
    if nbytes is not None and status.nbytes != nbytes:
        raise RefusedError(f"{path} has {status.nbytes} bytes, not {nbytes}")
    files.unlink(path)
    return True


def _retrying(
    remove: Callable[[Files, str, int | None], bool], files: Files, path: str, nbytes: int | None
) -> bool:
    """``remove``, tried again at once if the system call fails; the last error if it goes on."""
    for attempt in tenacity.Retrying(
        stop=_AT_ONCE,
        wait=_BETWEEN,
        retry=tenacity.retry_if_exception_type(OSError),
        reraise=True,
    ):
        with attempt:
            return remove(files, path, nbytes)
    raise AssertionError("tenacity returns or raises")


def _wait_after(attempts: int) -> float:
    """Seconds until a refused deletion is tried again: 1, 2, 4 … at most an hour."""
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.attempt_number = attempts
    return _LATER(state)
