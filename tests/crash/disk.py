"""A model of the disk, and the disks that it allows after a crash.

Two models of a crash, after any step:

- the process died: everything that was written is there;
- the power was lost: only synced bytes and synced directory entries are sure. Any subset of the
  rest may be there: the two halves of a move between directories apart, a size without its data,
  a write torn at 512 bytes.

LMDB is trusted: its commit is one step, atomic, and durable on return. What stands in its file
before the first commit is not.
"""

import functools
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

SECTOR_BYTES = 512

# With no more combinations of what may be lost than this, all are built; else some.
COMBINATIONS_MAX = 1 << 9
# Of a place that was written many times since it was synced, such as a slot of HEAD, the disk may
# hold any version; these many of the newest are told apart, with the oldest.
_NEWEST_VERSIONS = 2

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
    def identity(self) -> str:
        """The same for the same names and bytes."""
        files = [(path, _digest_of(content)) for path, _, content in self.files]
        return blake3(repr((self.folders, files)).encode()).hexdigest(16)

    def write_to(self, root: Path) -> None:
        """Make ``root`` this image."""
        # Through a descriptor and without objects for paths: this is done for every state.
        root.mkdir()
        folder_of_all = os.open(root, os.O_RDONLY)
        try:
            for folder in self.folders:
                os.mkdir(folder, dir_fd=folder_of_all)
            first: dict[int, str] = {}
            for path, inode, content in self.files:
                if inode in first:
                    (root / path).hardlink_to(root / first[inode])
                    continue
                first[inode] = path
                file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder_of_all)
                os.write(file, content)
                os.close(file)
        finally:
            os.close(folder_of_all)


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
        files: dict[int, int] = {}
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            if path.is_dir():
                disk.make_directory(name)
                continue
            # What a crash left under two names is one file.
            number = path.stat().st_ino
            if number in files:
                disk.link(files[number], name)
            else:
                files[number] = disk.create(name)
                disk.contents[files[number]] = path.read_bytes()
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

    def link(self, inode: int, path: str) -> None:
        self._enter(path, inode)

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

    def lost_power(
        self,
        randomness: random.Random,
        *,
        random_count: int,
        combinations_max: int = COMBINATIONS_MAX,
    ) -> Iterator[Image]:
        """Disks after the power was lost: every combination of what may be lost, if they are not
        too many; else none of it, all, each alone, all but each, and some random ones. Then, with
        all else there, sizes without their data and torn writes."""
        choices = _choices(self.pending)
        yield self._image("none", [])
        combinations = 1
        for versions in choices:
            combinations *= 1 + len(versions)
        if combinations <= combinations_max:
            for some in itertools.product(*([None, *versions] for versions in choices)):
                yield self._kept("some", some)
        else:
            newest = [versions[-1] for versions in choices]
            yield self._kept("all", newest)
            for index, change in enumerate(newest):
                without = [*newest[:index], None, *newest[index + 1 :]]
                alone = [None] * index + [change] + [None] * (len(newest) - index - 1)
                yield self._kept(f"only {_said(change)}", alone)
                yield self._kept(f"all but {_said(change)}", without)
            for _ in range(random_count):
                some = [randomness.choice([None, *versions]) for versions in choices]
                yield self._kept("random", some)
        for index, change in enumerate(self.pending):
            if isinstance(change, Bytes) and change.content:
                before, after = self.pending[:index], self.pending[index + 1 :]
                size = Bytes(change.file, change.offset + len(change.content), b"")
                yield self._image(f"size of {_said(change)}", [*before, size, *after])
                torn = _torn(change, randomness)
                yield self._image(f"torn {_said(change)}", [*before, *torn])

    def draw(self, randomness: random.Random) -> Image:
        """One disk after the power was lost: none, all or some of what is pending, or a tear."""
        luck = randomness.random()
        if luck < 0.1:
            return self._image("none", [])
        if luck < 0.25:
            return self._image("all", self.pending)
        written = [each for each in self.pending if isinstance(each, Bytes) and each.content]
        if luck > 0.75 and written:
            change = randomness.choice(written)
            before = self.pending[: next(i for i, c in enumerate(self.pending) if c is change)]
            return self._image(f"torn {_said(change)}", [*before, *_torn(change, randomness)])
        some = [randomness.choice([None, *each]) for each in _choices(self.pending)]
        return self._kept("some", some)

    def _kept(self, label: str, some: Sequence[Change | None]) -> Image:
        kept = {id(change) for change in some}
        return self._image(label, [each for each in self.pending if id(each) in kept])

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


@functools.lru_cache(maxsize=4096)
def _digest_of(content: bytes) -> bytes:
    return blake3(content).digest(16)


def _choices(pending: Sequence[Change]) -> list[list[Change]]:
    """What may be lost on its own, with the versions that may be there instead."""
    places: dict[object, list[Change]] = {}
    for change in pending:
        place: object = id(change)
        if isinstance(change, Bytes) and change.content:
            place = (change.file, change.offset, len(change.content))
        places.setdefault(place, []).append(change)
    return [versions[:1] + versions[1:][-_NEWEST_VERSIONS:] for versions in places.values()]


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
