"""The LMDB environment in ``journal/``: how it is made, opened, committed to and grown.

Default sync only. ``sync=False`` with explicit syncs loses pages that a durable meta page names,
and ``writemap`` dies of SIGBUS on a full disk. No lock file: LMDB's semaphores on macOS deadlock
after a kill, and the cache has a lock of its own. So there is one owner, and no read transaction
is open while a write transaction is.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Generator, Mapping
from typing import TypeAlias, TypeVar

import lmdb

from .errors import (
    CacheLockedError,
    CacheOfflineError,
    CommitUnknownError,
    FormatError,
    JournalDamagedError,
)
from .files import Files

Transaction: TypeAlias = "lmdb.Transaction[bytes]"
Result = TypeVar("Result")

FOLDER = "journal"
NEW_FOLDER = "journal.new"

# Address space only: the file grows as it needs to. 50,000 events and 500,000 entries are 300 MB.
_MAP_BYTES = 1 << 30

_DATABASES = 3

# LMDB reports a short write on a full disk as EIO. A commit needs a few hundred KiB.
_FULL_DISK_BYTES = 1 << 20

_DAMAGE = (
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.NotFoundError,
    lmdb.IncompatibleError,
)


def create_environment(files: Files, meta: Mapping[bytes, bytes]) -> None:
    """Durably make ``journal/`` with these records in ``meta``, or leave no ``journal/`` at all.

    LMDB's own creation is not crash-safe: a torn first write gives a file that never opens again.
    """
    remove_folder(files, NEW_FOLDER)
    files.make_directory(NEW_FOLDER)
    path = str(files.root / NEW_FOLDER)
    with (
        _translated(files, NEW_FOLDER),
        lmdb.open(
            path, map_size=_MAP_BYTES, mode=0o600, max_dbs=_DATABASES, lock=False, lib_version=0
        ) as env,
    ):
        transaction = env.begin(write=True)
        env.open_db(b"events", txn=transaction)
        env.open_db(b"snapshot", txn=transaction)
        database = env.open_db(b"meta", txn=transaction)
        for name, value in meta.items():
            transaction.put(name, value, db=database)
        files.commit(transaction)
    put_in_place(files)


def put_in_place(files: Files) -> None:
    """Make ``journal.new/data.mdb`` durable and give its folder the name ``journal``."""
    descriptor = files.open_for_update(f"{NEW_FOLDER}/data.mdb")
    try:
        files.sync(descriptor)
    finally:
        files.close_file(descriptor)
    files.sync_directory(NEW_FOLDER)
    files.rename(NEW_FOLDER, FOLDER)
    files.sync_directory("")


def remove_folder(files: Files, name: str) -> None:
    """Remove a folder of files, if it is there. Not synced."""
    if files.status(name) is None:
        return
    for each in files.names(name):
        files.unlink(f"{name}/{each}")
    files.remove_directory(name)


class MutableEnvironment:
    """An open environment. Owned by one thread, which makes every call; not thread-safe.

    After ``CommitUnknownError`` nothing but ``reopen`` and ``close`` works.
    """

    def __init__(self, files: Files, folder: str, env: lmdb.Environment) -> None:
        self.is_unsettled = False
        self._files = files
        self._folder = folder
        self._file = f"{folder}/data.mdb"
        self._attach(env)

    @classmethod
    def open(cls, files: Files, folder: str = FOLDER) -> "MutableEnvironment":
        """Open for writing. Damage is a JournalDamagedError, a full or read-only disk OSError."""
        return cls(files, folder, _open(files, folder, read_only=False))

    @classmethod
    def open_to_read(cls, files: Files, folder: str = FOLDER) -> "MutableEnvironment":
        """As ``open``, but nothing in the folder is changed."""
        return cls(files, folder, _open(files, folder, read_only=True))

    @contextlib.contextmanager
    def read(self) -> Generator[Transaction]:
        """A read transaction, not to be held across a write."""
        self._require_settled()
        with _translated(self._files, self._folder), self._env.begin() as transaction:
            yield transaction

    def write(self, body: Callable[[Transaction], Result]) -> Result:
        """Commit what ``body`` puts; durable on return. ``body`` is repeated if the map was full.

        If ``body`` raises, nothing happened. ``CommitUnknownError`` means that the commit itself
        failed, and that the transaction may or may not stand.
        """
        self._require_settled()
        while True:
            with _translated(self._files, self._folder):
                transaction = self._env.begin(write=True)
            try:
                with _translated(self._files, self._folder):
                    result = body(transaction)
                self._require_in_place()
                self._commit(transaction)
                return result
            except lmdb.MapFullError:
                transaction.abort()
                self._map_bytes *= 2
                self._env.set_mapsize(self._map_bytes)
            except BaseException:
                transaction.abort()
                raise

    def copy_to(self, descriptor: int) -> None:
        """Write a compacted copy of the environment to a descriptor, not synced."""
        self._require_settled()
        with _translated(self._files, self._folder):
            self._env.copyfd(descriptor, compact=True)

    def reopen(self) -> None:
        """Close and open again: what is there now is what was committed, durably.

        After a failed write of a meta page LMDB puts the older one back, unsynced: the disk may
        still hold the one that failed.
        """
        self._env.close()
        self.is_unsettled = True
        self._attach(_open(self._files, self._folder, read_only=False))
        with _translated(self._files, self._folder):
            self._env.sync(True)
        self.is_unsettled = False

    def close(self) -> None:
        """Closing twice is harmless."""
        self._env.close()

    def _attach(self, env: lmdb.Environment) -> None:
        self._env = env
        try:
            status = self._files.status(self._file)
            assert status is not None
            self._identity = (status.device, status.inode)
            self._map_bytes = env.info()["map_size"]
            with _translated(self._files, self._folder):
                # Not in a read transaction of ours: its handles would end with it.
                self.events = env.open_db(b"events", create=False)
                self.snapshot = env.open_db(b"snapshot", create=False)
                self.meta = env.open_db(b"meta", create=False)
        except BaseException:
            env.close()
            raise

    def _commit(self, transaction: Transaction) -> None:
        try:
            with _translated(self._files, self._folder):
                self._files.commit(transaction)
        except lmdb.MapFullError:
            # Clean: LMDB finds room for its list of free pages before it writes anything.
            raise
        except Exception as error:
            self.is_unsettled = True
            raise CommitUnknownError(
                f"a commit to {self._files.root / self._folder} failed, and may or may not stand: "
                f"{error}"
            ) from error
        except BaseException:
            self.is_unsettled = True
            raise

    def _require_settled(self) -> None:
        if self.is_unsettled:
            raise CommitUnknownError(
                f"the last commit to {self._files.root / self._folder} has not been settled"
            )

    def _require_in_place(self) -> None:
        # LMDB commits without complaint into a file that was unlinked or moved away.
        status = self._files.status(self._file) if self._files.is_in_place() else None
        if status is None or (status.device, status.inode) != self._identity or not status.links:
            raise CacheOfflineError(
                f"{self._files.root / self._file} is gone or was replaced while it was open"
            )


def _open(files: Files, folder: str, *, read_only: bool) -> lmdb.Environment:
    name = f"{folder}/data.mdb"
    status = files.status(name)
    if status is None or not status.is_file or not status.nbytes:
        raise JournalDamagedError(f"{files.root / name} is missing, empty or not a regular file")
    with _translated(files, folder):
        env = lmdb.open(
            str(files.root / folder),
            map_size=_MAP_BYTES,
            readonly=read_only,
            create=False,
            mode=0o600,
            max_dbs=_DATABASES,
            lock=False,
        )
    if env.lib_version()[0] != 0:
        env.close()
        raise FormatError(
            f"{files.root / name} is in the format of LMDB {env.lib_version()}, "
            "which this walkback does not read. Upgrade walkback, or use another directory."
        )
    return env


@contextlib.contextmanager
def _translated(files: Files, folder: str) -> Generator[None]:
    """Turn an LMDB error into ours or into an ``OSError``; a full map passes."""
    try:
        yield
    except lmdb.MapFullError:
        raise
    except lmdb.Error as error:
        path = files.root / folder
        if isinstance(error, _DAMAGE):
            raise JournalDamagedError(f"{path} does not open as a journal: {error}") from error
        if "already open in this process" in str(error):
            raise CacheLockedError(path, os.getpid(), is_this_process=True) from error
        # A panic follows a failed write of a meta page. What is left are errors of the caller's.
        code = errno.EIO if isinstance(error, lmdb.PanicError) else error.code
        if code <= 0:
            raise
        if code == errno.EIO and files.free_bytes() < _FULL_DISK_BYTES:
            code = errno.ENOSPC
        raise OSError(code, f"the journal cannot be used: {error}", str(path)) from error
