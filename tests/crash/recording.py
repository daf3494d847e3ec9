"""Files that do what a history asks for, and files that keep a model of the disk up to date."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from walkback.journal.files import Files, FileStatus, Transaction, rounded_to_blocks

from .disk import Disk

_PAYLOADS = ("blocks", "sidecars", "staging", "quarantine")


class ActingFiles(Files):
    """Does what a history asks of its disk, and is the same in every run.

    ``refused`` are paths that cannot be unlinked. ``before_sync`` is called once, before a payload
    is synced. ``room_bytes`` is how much the volume holds, None if it has no end.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.refused: set[str] = set()
        self.before_sync: Callable[[], None] | None = None
        self.room_bytes: int | None = None
        self._paths: dict[int, str] = {}

    def path_of(self, descriptor: int) -> str:
        """The name under which a file was created or opened to be written."""
        return self._paths.get(descriptor, "")

    def interrupt(self, descriptor: int) -> None:
        """Call ``before_sync``, which may take steps itself, if the file is a payload."""
        interrupt = self.before_sync
        if interrupt is not None and self.path_of(descriptor).startswith("staging/"):
            self.before_sync = None
            interrupt()

    def used_bytes(self) -> int:
        """What the payloads take on the volume."""
        return sum(
            rounded_to_blocks((Path(path) / name).stat().st_size)
            for folder in _PAYLOADS
            for path, _, names in os.walk(self.root / folder)
            for name in names
        )

    def free_bytes(self) -> int:
        room_bytes = self.room_bytes
        return super().free_bytes() if room_bytes is None else room_bytes - self.used_bytes()

    def status(self, name: str) -> FileStatus | None:
        status = super().status(name)
        return None if status is None else _timeless(status)

    def status_of(self, descriptor: int) -> FileStatus:
        return _timeless(super().status_of(descriptor))

    def create(self, name: str) -> int:
        descriptor = super().create(name)
        self._paths[descriptor] = name
        return descriptor

    def open_for_update(self, name: str) -> int:
        descriptor = super().open_for_update(name)
        self._paths[descriptor] = name
        return descriptor

    def close_file(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        super().close_file(descriptor)

    def sync(self, descriptor: int) -> None:
        self.interrupt(descriptor)
        super().sync(descriptor)

    def unlink(self, name: str) -> None:
        if name in self.refused:
            raise PermissionError(1, "Operation not permitted")
        super().unlink(name)

    def scribble(self, name: str, offset: int) -> None:
        """Flip a byte of a file behind the store's back, durably."""
        content = bytearray((self.root / name).read_bytes())
        content[offset] ^= 1
        (self.root / name).write_bytes(content)


def _timeless(status: FileStatus) -> FileStatus:
    """What names a file in the journal must not differ from run to run."""
    return replace(status, inode=0, mtime_ns=0, ctime_ns=0)


class RecordingFiles(ActingFiles):
    """Keeps ``disk`` as the disk is, one step after the other, whatever thread takes it.

    ``after_step`` is called with the lock held, so nothing moves while it looks.
    """

    def __init__(
        self,
        root: Path,
        disk: Disk | None = None,
        after_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        super().__init__(root)
        self.disk = disk if disk is not None else Disk()
        self._after_step = after_step
        self._lock = threading.RLock()
        self._inodes: dict[int, int] = {}

    def make_directory(self, name: str) -> None:
        with self._lock:
            super().make_directory(name)
            self.disk.make_directory(name)
            self._after_step(f"make {name}")

    def remove_directory(self, name: str) -> None:
        with self._lock:
            super().remove_directory(name)
            self.disk.remove(name)
            self._after_step(f"remove {name}")

    def sync_directory(self, name: str) -> None:
        with self._lock:
            super().sync_directory(name)
            self.disk.sync_directory(name)
            self._after_step(f"sync directory {name}")

    def create(self, name: str) -> int:
        with self._lock:
            descriptor = super().create(name)
            self._inodes[descriptor] = self.disk.create(name)
            self._after_step(f"create {name}")
            return descriptor

    def open_for_update(self, name: str) -> int:
        with self._lock:
            descriptor = super().open_for_update(name)
            inode = self.disk.find(name)
            assert inode is not None
            self._inodes[descriptor] = inode
            return descriptor

    def close_file(self, descriptor: int) -> None:
        with self._lock:
            self._inodes.pop(descriptor, None)
            super().close_file(descriptor)

    def write(self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        with self._lock:
            super().write(descriptor, buffers, offset)
            self.disk.write(self._inodes[descriptor], offset, b"".join(buffers))
            self._after_step(f"write {self.path_of(descriptor)}")

    def sync(self, descriptor: int) -> None:
        self.interrupt(descriptor)
        with self._lock:
            self._see_what_lmdb_wrote(descriptor)
            super().sync(descriptor)
            self.disk.sync(self._inodes[descriptor])
            self._after_step(f"sync {self.path_of(descriptor)}")

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            super().rename(old, new)
            self.disk.rename(old, new)
            self._after_step(f"rename {old} {new}")

    def unlink(self, name: str) -> None:
        with self._lock:
            super().unlink(name)
            self.disk.remove(name)
            self._after_step(f"unlink {name}")

    def commit(self, transaction: Transaction) -> None:
        with self._lock:
            self._see_a_new_journal()
            super().commit(transaction)
            for folder in ("journal.new", "journal"):
                inode = self.disk.find(f"{folder}/data.mdb")
                path = self.root / folder / "data.mdb"
                if inode is not None and path.exists():
                    self.disk.contents[inode] = path.read_bytes()
            self._after_step("commit")

    def scribble(self, name: str, offset: int) -> None:
        with self._lock:
            inode = self.disk.find(name)
            assert inode is not None
            super().scribble(name, offset)
            self.disk.sync(inode)
            self.disk.contents[inode] = (self.root / name).read_bytes()
            self._after_step(f"scribble on {name}")

    def _see_a_new_journal(self) -> None:
        """LMDB makes its file when it is opened: a torn one may be there before the commit."""
        for folder in ("journal.new", "journal"):
            name = f"{folder}/data.mdb"
            if self.disk.find(name) is None and (self.root / name).exists():
                inode = self.disk.create(name)
                self._after_step(f"create {name}")
                pages = (self.root / name).read_bytes() or bytes(8192)
                self.disk.write(inode, 0, pages)
                self._after_step(f"write {name}")
                # The commit makes the whole file durable, not its name.
                self.disk.sync(inode)

    def _see_what_lmdb_wrote(self, descriptor: int) -> None:
        """A copy of the journal is written by LMDB, not through ``write``."""
        inode = self._inodes[descriptor]
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        if content != self.disk.content(inode):
            self.disk.write(inode, 0, content)
            self._after_step(f"write {self.path_of(descriptor)}")
