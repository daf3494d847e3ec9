"""Every file operation of a cache, below one directory, through that directory's descriptor.

This is the only seam to the disk. A test that wants to stop after a step, lose what was not synced
or fail the n-th call hands in a subclass; nothing else in the package asks the operating system for
a file.

Names are relative, ``/``-separated, and differ in more than case, so that they mean the same on a
file system that folds it. No component is ever followed if it is a link.

On Apple an ``fsync`` reaches the drive's cache only; LMDB's commit then flushes the whole drive
before it writes the page that references our files. So plain ``fsync`` is enough here, as long as
the journal and the payloads stand on one device, which is checked for each folder that is opened.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# Linux takes 1,024 buffers a call (IOV_MAX), and so does macOS.
_BUFFERS_PER_CALL = 1024


class Transaction(Protocol):
    """What ``Files.commit`` needs of an LMDB transaction."""

    def commit(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStatus:
    """What ``stat`` says of a name, links not followed."""

    nbytes: int
    allocated_bytes: int
    device: int
    inode: int
    links: int
    owner: int
    is_file: bool
    is_directory: bool
    mtime_ns: int
    ctime_ns: int

    @property
    def charge_bytes(self) -> int:
        """What the ledger charges: the larger of the allocated bytes and the size, in 4 KiB."""
        return max(self.allocated_bytes, rounded_to_blocks(self.nbytes))


def rounded_to_blocks(nbytes: int) -> int:
    """``nbytes`` rounded up to the 4 KiB in which file systems hand out space."""
    return -(-nbytes // 4096) * 4096


class Files:
    """The files below ``root``, which must exist and be a directory, not a link to one.

    Thread-safe: it holds one descriptor and no other state.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._device = os.fstat(self.descriptor).st_dev
        self._inode = os.fstat(self.descriptor).st_ino

    def close(self) -> None:
        """Let go of the root and of any ``flock`` on it. Closing twice is harmless."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # Folders.

    def make_directory(self, name: str) -> None:
        """Make one directory (0700); ``FileExistsError`` if the name is taken."""
        with self._parent(name) as (folder, leaf):
            os.mkdir(leaf, 0o700, dir_fd=folder)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory."""
        with self._parent(name) as (folder, leaf):
            os.rmdir(leaf, dir_fd=folder)

    def sync_directory(self, name: str) -> None:
        """Make the entries of a directory durable; ``""`` is the root."""
        with self._folder(name) as folder:
            os.fsync(folder)

    def names(self, name: str = "") -> list[str]:
        """The sorted names in a directory; ``""`` is the root."""
        with self._folder(name) as folder:
            return sorted(os.listdir(folder))

    # Files.

    def create(self, name: str) -> int:
        """Create a new file (0600) and return a descriptor for writing it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._parent(name) as (folder, leaf):
            return os.open(leaf, flags, 0o600, dir_fd=folder)

    def open(self, name: str) -> int:
        """Return a descriptor for reading. A file that is not a regular one is an ``OSError``."""
        return self._open(name, os.O_RDONLY | os.O_NONBLOCK)

    def open_for_update(self, name: str) -> int:
        """Return a descriptor for reading and writing in place. Never used for a payload."""
        return self._open(name, os.O_RDWR | os.O_NONBLOCK)

    def close_file(self, descriptor: int) -> None:
        """Close what ``create`` or ``open`` returned."""
        os.close(descriptor)

    def write(self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Write all of ``buffers``, one after the other, from ``offset``."""
        pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
        first = 0
        while first < len(pending):
            written = os.pwritev(descriptor, pending[first : first + _BUFFERS_PER_CALL], offset)
            offset += written
            while first < len(pending) and written >= len(pending[first]):
                written -= len(pending[first])
                first += 1
            if written:
                pending[first] = pending[first][written:]

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill ``buffers`` from ``offset``; return the bytes read, fewer only at the file's end."""
        pending = [buffer for buffer in buffers if len(buffer)]
        total = first = 0
        while first < len(pending):
            count = os.preadv(
                descriptor, pending[first : first + _BUFFERS_PER_CALL], offset + total
            )
            if count == 0:
                break
            total += count
            while first < len(pending) and count >= len(pending[first]):
                count -= len(pending[first])
                first += 1
            if count:
                pending[first] = pending[first][count:]
        return total

    def sync(self, descriptor: int) -> None:
        """Make a file's bytes and size durable. After an error the file's pages are unknown."""
        os.fsync(descriptor)

    def rename(self, old: str, new: str) -> None:
        """Give a file or directory another name; durable once both directories are synced."""
        with self._parent(old) as (source, source_leaf), self._parent(new) as (target, target_leaf):
            os.rename(source_leaf, target_leaf, src_dir_fd=source, dst_dir_fd=target)

    def unlink(self, name: str) -> None:
        """Remove a name; durable once its directory is synced."""
        with self._parent(name) as (folder, leaf):
            os.unlink(leaf, dir_fd=folder)

    def status(self, name: str) -> FileStatus | None:
        """What stands under a name, links not followed; None if nothing does."""
        try:
            with self._parent(name) as (folder, leaf):
                return _status(os.stat(leaf, dir_fd=folder, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def status_of(self, descriptor: int) -> FileStatus:
        """What stands behind an open descriptor."""
        return _status(os.fstat(descriptor))

    # The journal and the volume.

    def commit(self, transaction: Transaction) -> None:
        """Commit an LMDB transaction: the one durable step whose file operations are not ours."""
        transaction.commit()

    def free_bytes(self) -> int:
        """The bytes that the volume has left for this user."""
        volume = os.fstatvfs(self.descriptor)
        return volume.f_bavail * volume.f_frsize

    def try_lock(self) -> bool:
        """Take the one lock of the cache, an ``flock`` on the root itself; False if it is taken.

        It is let go when the descriptor is closed, and by the kernel when the process dies.
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_in_place(self) -> bool:
        """Whether the root's path still leads to the directory that was opened."""
        try:
            now = os.stat(self.root, follow_symlinks=False)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (self._device, self._inode)

    # Walking down without following a link.

    def _open(self, name: str, flags: int) -> int:
        with self._parent(name) as (folder, leaf):
            descriptor = os.open(leaf, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(self.root / name))
        return descriptor

    @contextlib.contextmanager
    def _folder(self, name: str) -> Generator[int]:
        folder = os.dup(self.descriptor)
        try:
            for part in name.split("/") if name else ():
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                try:
                    below = os.open(part, flags, dir_fd=folder)
                except OSError as error:
                    error.filename = str(self.root / name)
                    raise
                os.close(folder)
                folder = below
            if os.fstat(folder).st_dev != self._device:
                raise OSError(
                    errno.EXDEV, "on another volume than the cache", str(self.root / name)
                )
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _parent(self, name: str) -> Generator[tuple[int, str]]:
        if any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
            raise OSError(errno.EINVAL, "not a name below the root", name)
        parent, _, leaf = name.rpartition("/")
        with self._folder(parent) as folder:
            yield folder, leaf


def _status(result: os.stat_result) -> FileStatus:
    return FileStatus(
        nbytes=result.st_size,
        allocated_bytes=result.st_blocks * 512,
        device=result.st_dev,
        inode=result.st_ino,
        links=result.st_nlink,
        owner=result.st_uid,
        is_file=stat.S_ISREG(result.st_mode),
        is_directory=stat.S_ISDIR(result.st_mode),
        mtime_ns=result.st_mtime_ns,
        ctime_ns=result.st_ctime_ns,
    )
