"""What can go wrong, grouped by who can mend it. A miss is a value, never one of these.

``OSError`` passes through the store unchanged: it says more than a wrapper would. Damage found in a
payload is a ``PayloadDamagedError`` inside the reader and a walk-back to everyone else.
"""

from pathlib import Path


class WalkbackError(Exception):
    """The base of every error that walkback raises on its own account."""


# The caller can mend these: another directory, another setting, another moment.


class CacheLockedError(WalkbackError):
    """Another process has the cache open. ``pid`` is the holder's, or None if it could not say."""

    def __init__(self, path: Path, pid: int | None, *, is_this_process: bool = False) -> None:
        if is_this_process:
            what = "is open in this process already. Use that one, or close it first."
        else:
            holder = f"process {pid}" if pid is not None else "another process"
            what = (
                f"is open in {holder}; one process at a time can hold a cache. "
                "Stop that process, or give this one a directory of its own."
            )
        super().__init__(f"{path} {what}")
        self.path = path
        self.pid = pid


class RootRefusedError(WalkbackError):
    """The directory cannot be a cache: no parent, other things in it, or its STORE is gone."""


class SettingsError(WalkbackError):
    """A setting makes no sense, alone or beside another."""


class UnsupportedLayoutError(WalkbackError):
    """The model's cache has a kind of leaf that walkback does not store yet."""


class FormatError(WalkbackError):
    """Written by a newer walkback, or by something else: upgrade, or use another directory."""


class CacheClosedError(WalkbackError):
    """The cache was closed, or belongs to the process that forked this one."""


# The disk or another program did these.


class DiskFullError(WalkbackError):
    """The cache cannot be opened for want of disk space."""


class NotRecordedError(WalkbackError):
    """The journal did not take an event, so what was asked for did not happen."""


class JournalDamagedError(WalkbackError):
    """The journal does not verify: a broken link, a hole, a record that does not decode."""


class ForeignJournalError(JournalDamagedError):
    """The journal is of another cache than STORE: one of the two stands in the wrong directory."""


class PayloadDamagedError(WalkbackError):
    """A payload file does not verify. The message says what differs."""


class CommitUnknownError(WalkbackError):
    """A commit failed so that it may or may not stand; only reopening the journal can tell."""


class CacheOfflineError(WalkbackError):
    """The directory is gone or was replaced while open. The cache misses until it is reopened."""
