"""Crashes for tests: a model of the disk, files that keep it up to date, and the disks it allows.

Two models of a crash, after any step:

- the process died: everything that was written is there;
- the power was lost: only synced bytes and synced directory entries are sure. Any subset of the
  rest may be there: the two halves of a move between directories apart, a size without its data,
  a write torn at 512 bytes.

LMDB is trusted: its commit is one step, atomic, and durable on return. What stands in its file
before the first commit is not.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from walkback.journal.files import Files, Transaction, rounded_to_blocks

SECTOR_BYTES = 512

# A change is lost or kept on its own while it is this new; later only together with all other old
# ones: HEAD and OWNER are not synced for long, and each of their writes would be an image a step.
_NEW_CHANGES = 10

_ROOT = 0


@dataclass(frozen=True, slots=True)
class Entries:
    """Names of one directory that change together; None if the name goes."""

    folder: int
    names: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one file. Without bytes it is the size alone: zeros up to ``offset``."""

    file: int
    offset: int
    content: bytes


Change = Entries | Bytes


@dataclass(frozen=True, slots=True)
class Image:
    """What stands on a disk after a crash: folders, and files with their inodes."""

    label: str
    folders: tuple[str, ...]
    files: tuple[tuple[str, int, bytes], ...]

    @property
    def identity(self) -> int:
        return hash((self.folders, tuple((path, content) for path, _, content in self.files)))

    def write_to(self, root: Path) -> None:
        """Make ``root`` this image."""
        root.mkdir()
        for folder in self.folders:
            (root / folder).mkdir()
        first: dict[int, str] = {}
        for path, inode, content in self.files:
            if inode in first:
                (root / path).hardlink_to(root / first[inode])
            else:
                (root / path).write_bytes(content)
                first[inode] = path


@dataclass(slots=True)
class Disk:
    """What is durable, and in order what is not yet."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {_ROOT: {}})
    contents: dict[int, bytes] = field(default_factory=dict[int, bytes])
    pending: list[Change] = field(default_factory=list[Change])
    # The directories as the running system sees them.
    seen: dict[int, dict[str, int]] = field(default_factory=lambda: {_ROOT: {}})
    inode_count: int = 1

    @classmethod
    def of(cls, root: Path) -> "Disk":
        """A directory as it is, all of it durable."""
        disk = cls()
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            if path.is_dir():
                disk.make_directory(name)
            else:
                disk.contents[disk.create(name)] = path.read_bytes()
        disk.folders = {inode: dict(names) for inode, names in disk.seen.items()}
        disk.pending = []
        return disk

    def copy(self) -> "Disk":
        return replace(
            self,
            folders={inode: dict(names) for inode, names in self.folders.items()},
            contents=dict(self.contents),
            pending=list(self.pending),
            seen={inode: dict(names) for inode, names in self.seen.items()},
        )

    # Steps.

    def find(self, path: str) -> int | None:
        inode: int | None = _ROOT
        for part in path.split("/") if path else ():
            inode = None if inode is None else self.seen.get(inode, {}).get(part)
        return inode

    def make_directory(self, path: str) -> None:
        inode = self._new_inode()
        self.folders[inode], self.seen[inode] = {}, {}
        self._enter(path, inode)

    def create(self, path: str) -> int:
        inode = self._new_inode()
        self.contents[inode] = b""
        self._enter(path, inode)
        return inode

    def remove(self, path: str) -> None:
        self._enter(path, None)

    def rename(self, old: str, new: str) -> None:
        inode = self.find(old)
        assert inode is not None
        if old.rpartition("/")[0] == new.rpartition("/")[0]:
            self._change(old, ((new.rpartition("/")[2], inode), (old.rpartition("/")[2], None)))
        else:
            self._enter(new, inode)
            self._enter(old, None)

    def write(self, inode: int, offset: int, content: bytes) -> None:
        self.pending.append(Bytes(inode, offset, content))

    def sync(self, inode: int) -> None:
        for change in self.pending:
            if isinstance(change, Bytes) and change.file == inode:
                self.contents[inode] = _written(self.contents[inode], change)
        self.pending = [
            each for each in self.pending if not (isinstance(each, Bytes) and each.file == inode)
        ]

    def sync_directory(self, path: str) -> None:
        inode = self.find(path)
        assert inode is not None
        self.folders[inode] = dict(self.seen[inode])
        self.pending = [
            each
            for each in self.pending
            if not (isinstance(each, Entries) and each.folder == inode)
        ]

    def content(self, inode: int) -> bytes:
        """A file's bytes as the running system sees them."""
        content = self.contents[inode]
        for change in self.pending:
            if isinstance(change, Bytes) and change.file == inode:
                content = _written(content, change)
        return content

    # Crashes.

    def died(self) -> Image:
        """The disk after the process died."""
        return self._image("died", self.pending)

    def lost_power(self, randomness: random.Random, *, random_count: int) -> Iterator[Image]:
        """Disks after the power was lost: none of what is pending, all of it, each alone, all but
        each, sizes without data, torn writes, and some random ones."""
        pending = self.pending
        yield self._image("none", [])
        if not pending:
            return
        yield self._image("all", pending)
        old, new = pending[:-_NEW_CHANGES], pending[-_NEW_CHANGES:]
        if old:
            yield self._image("only old", old)
            yield self._image("all but old", new)
        for index, change in enumerate(new):
            others = [*old, *new[:index], *new[index + 1 :]]
            if len(pending) > 1:
                yield self._image(f"only {_said(change)}", [change])
                yield self._image(f"all but {_said(change)}", others)
            if isinstance(change, Bytes) and change.content:
                size = Bytes(change.file, change.offset + len(change.content), b"")
                yield self._image(f"size of {_said(change)}", [*others, size])
                torn = _torn(change, randomness)
                yield self._image(f"torn {_said(change)}", [*old, *new[:index], *torn])
        for _ in range(random_count if len(pending) > 2 else 0):
            some = [each for each in pending if randomness.random() < 0.5]
            yield self._image("random", some)

    def _image(self, label: str, kept: Sequence[Change]) -> Image:
        folders = {inode: dict(names) for inode, names in self.folders.items()}
        contents = dict(self.contents)
        for change in kept:
            if isinstance(change, Bytes):
                contents[change.file] = _written(contents[change.file], change)
            else:
                for name, inode in change.names:
                    if inode is None:
                        folders[change.folder].pop(name, None)
                    else:
                        folders[change.folder][name] = inode
        paths: list[str] = []
        files: list[tuple[str, int, bytes]] = []
        waiting = [("", _ROOT)]
        while waiting:
            path, inode = waiting.pop()
            for name, below in sorted(folders[inode].items()):
                if below in folders:
                    paths.append(f"{path}{name}")
                    waiting.append((f"{path}{name}/", below))
                else:
                    files.append((f"{path}{name}", below, contents[below]))
        return Image(label, tuple(sorted(paths)), tuple(sorted(files)))

    def _new_inode(self) -> int:
        self.inode_count += 1
        return self.inode_count

    def _enter(self, path: str, inode: int | None) -> None:
        self._change(path, ((path.rpartition("/")[2], inode),))

    def _change(self, path: str, names: tuple[tuple[str, int | None], ...]) -> None:
        folder = self.find(path.rpartition("/")[0])
        assert folder is not None
        for name, inode in names:
            if inode is None:
                self.seen[folder].pop(name)
            else:
                self.seen[folder][name] = inode
        self.pending.append(Entries(folder, names))


def _written(content: bytes, change: Bytes) -> bytes:
    start, end = change.offset, change.offset + len(change.content)
    return content[:start].ljust(start, b"\0") + change.content + content[end:]


def _torn(change: Bytes, randomness: random.Random) -> list[Change]:
    """A write without a run of its sectors, which may be any of them, or all."""
    end = change.offset + len(change.content)
    sectors = range(change.offset // SECTOR_BYTES, -(-end // SECTOR_BYTES))
    first = randomness.choice(sectors)
    last = randomness.choice(sectors[first - sectors.start :])
    before = max(0, first * SECTOR_BYTES - change.offset)
    after = (last + 1) * SECTOR_BYTES - change.offset
    kept: list[Change] = [Bytes(change.file, change.offset, change.content[:before])]
    if after < len(change.content):
        kept.append(Bytes(change.file, change.offset + after, change.content[after:]))
    return kept


def _said(change: Change) -> str:
    if isinstance(change, Bytes):
        return f"{len(change.content)} bytes of #{change.file}"
    return ", ".join(f"{'+' if inode else '-'}{name}" for name, inode in change.names)


class RecordingFiles(Files):
    """Keeps ``disk`` as the disk is, one step after the other, whatever thread takes it.

    ``after_step`` is called with the lock held, so nothing moves while it looks. ``refused`` are
    paths that cannot be unlinked. ``before_sync`` is called once, before a payload is synced.
    ``room_bytes`` is how much the volume holds, None if it has no end.
    """

    def __init__(
        self,
        root: Path,
        disk: Disk | None = None,
        after_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        super().__init__(root)
        self.disk = disk if disk is not None else Disk()
        self.refused: set[str] = set()
        self.before_sync: Callable[[], None] | None = None
        self.room_bytes: int | None = None
        self._after_step = after_step
        self._lock = threading.RLock()
        self._inodes: dict[int, int] = {}
        self._paths: dict[int, str] = {}

    def interrupt(self, descriptor: int) -> None:
        """Call ``before_sync``, which may take steps itself, if the file is a payload."""
        interrupt = self.before_sync
        if interrupt is not None and self.path_of(descriptor).startswith("staging/"):
            self.before_sync = None
            interrupt()

    def free_bytes(self) -> int:
        with self._lock:
            room_bytes = self.room_bytes
            return super().free_bytes() if room_bytes is None else room_bytes - self.used_bytes()

    def used_bytes(self) -> int:
        """What the files take on the volume, the journal's and the few small ones apart."""
        return sum(
            rounded_to_blocks(len(content))
            for path, _, content in self.disk.died().files
            if path.startswith(("blocks/", "sidecars/", "staging/", "quarantine/"))
        )

    def path_of(self, descriptor: int) -> str:
        """The name under which a file was created or opened."""
        return self._paths.get(descriptor, "")

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
            self._paths[descriptor] = name
            self._after_step(f"create {name}")
            return descriptor

    def open_for_update(self, name: str) -> int:
        with self._lock:
            descriptor = super().open_for_update(name)
            inode = self.disk.find(name)
            assert inode is not None
            self._inodes[descriptor], self._paths[descriptor] = inode, name
            return descriptor

    def close_file(self, descriptor: int) -> None:
        with self._lock:
            self._inodes.pop(descriptor, None)
            self._paths.pop(descriptor, None)
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
            if name in self.refused:
                raise PermissionError(1, "Operation not permitted")
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
        """Flip a byte of a file behind the store's back, durably."""
        inode = self.disk.find(name)
        assert inode is not None
        content = bytearray(self.disk.content(inode))
        content[offset] ^= 1
        self.disk.sync(inode)
        self.disk.contents[inode] = bytes(content)
        (self.root / name).write_bytes(content)
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
