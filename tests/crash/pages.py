"""A model of the disk at the level of pages and directory entries, kept up to date by a trace.

Of everything that was not synced it remembers the versions, in their order. What a power loss may
make of them stands in ``losses.py``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from .disk import Entries, Image
from .interposer import Kind
from .trace import Call

PAGE_BYTES = 4096
ROOT = 0


class Page:
    """The bytes of a page, and what stands for them."""

    __slots__ = ("content", "digest")

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.digest = blake3(content).digest(16)

    def written(self, start: int, content: bytes) -> "Page":
        end = start + len(content)
        return Page(self.content[:start] + content + self.content[end:])


ZEROS = Page(bytes(PAGE_BYTES))


class PageVersion(NamedTuple):
    """What a page became at a step."""

    step: int
    page: Page


class SizeVersion(NamedTuple):
    """What a file's size became at a step."""

    step: int
    nbytes: int


class EntryChange(NamedTuple):
    """What became of names in a directory at a step."""

    step: int
    entries: Entries


@dataclass(frozen=True)
class File:
    """What is durable of a file, and the versions that its pages and its size have had since.

    ``clean`` are pages that the system takes for clean although they are not durable.
    """

    pages: Mapping[int, Page] = field(default_factory=dict[int, Page])
    nbytes: int = 0
    versions: Mapping[int, tuple[PageVersion, ...]] = field(
        default_factory=dict[int, tuple[PageVersion, ...]]
    )
    sizes: tuple[SizeVersion, ...] = ()
    clean: frozenset[int] = frozenset()

    @property
    def nbytes_seen(self) -> int:
        """The size as the running system sees it."""
        return self.sizes[-1].nbytes if self.sizes else self.nbytes

    def page_seen(self, number: int) -> Page:
        versions = self.versions.get(number)
        return versions[-1].page if versions else self.pages.get(number, ZEROS)

    def written(self, step: int, offset: int, content: bytes) -> "File":
        parts = list(_parts(offset, content))
        file = self._with_versions(
            {
                number: PageVersion(step, self.page_seen(number).written(start, part))
                for number, start, part in parts
            }
        )
        end = offset + len(content)
        if end > self.nbytes_seen:
            file = replace(file, sizes=(*self.sizes, SizeVersion(step, end)))
        return file

    def written_durably(self, offset: int, content: bytes) -> "File":
        """Its own bytes are on the disk, whichever version the rest of their pages has."""
        pages, versions = dict(self.pages), dict(self.versions)
        for number, start, part in _parts(offset, content):
            pages[number] = pages.get(number, ZEROS).written(start, part)
            if number in versions:
                versions[number] = tuple(
                    PageVersion(step, page.written(start, part)) for step, page in versions[number]
                )
        end = offset + len(content)
        return replace(
            self,
            pages=pages,
            versions=versions,
            nbytes=max(self.nbytes, end),
            sizes=tuple(SizeVersion(step, max(nbytes, end)) for step, nbytes in self.sizes),
        )

    def resized(self, step: int, nbytes: int) -> "File":
        cut: dict[int, PageVersion] = {}
        for number in {*self.pages, *self.versions}:
            start = max(0, nbytes - number * PAGE_BYTES)
            if start < PAGE_BYTES:
                page = self.page_seen(number).written(start, bytes(PAGE_BYTES - start))
                cut[number] = PageVersion(step, page)
        return replace(self._with_versions(cut), sizes=(*self.sizes, SizeVersion(step, nbytes)))

    def synced(self) -> "File":
        """Durable as it is, but for the pages that are taken for clean."""
        dirty = self.versions.keys() - self.clean
        return replace(
            self,
            pages={**self.pages, **{number: self.page_seen(number) for number in dirty}},
            nbytes=self.nbytes_seen,
            versions={number: self.versions[number] for number in self.clean},
            sizes=(),
        )

    def failed_to_sync(self, pages: Iterator[int] | None = None) -> "File":
        """All pages are taken for clean, or these."""
        return replace(self, clean=self.clean.union(self.versions if pages is None else pages))

    @cached_property
    def durable(self) -> "Content":
        return Content.of(self.pages, self.nbytes)

    def _with_versions(self, new: Mapping[int, PageVersion]) -> "File":
        """Pages that were written to are dirty, even if they are what they were."""
        versions = dict(self.versions)
        for number, version in new.items():
            if version.page.digest != self.page_seen(number).digest:
                versions[number] = (*versions.get(number, ()), version)
        return replace(self, versions=versions, clean=self.clean - new.keys())


@dataclass(frozen=True)
class Content:
    """The bytes of a file: its size, and those of its pages that are not zeros."""

    nbytes: int
    pages: tuple[tuple[int, Page], ...]

    @classmethod
    def of(cls, pages: Mapping[int, Page], nbytes: int) -> "Content":
        """What is behind the size is not there."""
        kept: list[tuple[int, Page]] = []
        for number in sorted(pages):
            page, start = pages[number], nbytes - number * PAGE_BYTES
            if start <= 0:
                break
            if start < PAGE_BYTES:
                page = page.written(start, bytes(PAGE_BYTES - start))
            if page.digest != ZEROS.digest:
                kept.append((number, page))
        return cls(nbytes, tuple(kept))

    @cached_property
    def digest(self) -> bytes:
        hasher = blake3(b"%d" % self.nbytes)
        for number, page in self.pages:
            hasher.update(b"%d:" % number + page.digest)
        return hasher.digest(16)

    def __bytes__(self) -> bytes:
        content = bytearray(-(-self.nbytes // PAGE_BYTES) * PAGE_BYTES)
        for number, page in self.pages:
            content[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] = page.content
        return bytes(content[: self.nbytes])


@dataclass(frozen=True, slots=True)
class PagedImage:
    """What stands on a disk after a crash, its bytes not yet put together."""

    label: str
    folders: tuple[str, ...]
    files: tuple[tuple[str, int, Content], ...]

    @property
    def identity(self) -> str:
        """The same for the same names and bytes."""
        hasher = blake3(repr(self.folders).encode())
        for path, _, content in self.files:
            hasher.update(path.encode() + b"\0" + content.digest)
        return hasher.hexdigest(16)

    def whole(self) -> Image:
        files = tuple((path, inode, bytes(content)) for path, inode, content in self.files)
        return Image(self.label, self.folders, files)


@dataclass(slots=True)
class PageDisk:
    """What is durable, and in order what is not yet.

    After a sync that failed Linux takes the pages for clean. They may never reach the disk,
    whatever is synced later, unless they are written to again and then synced. What failed to be
    synced of a directory stays as it was, for a later sync: a file system that could not write its
    directories lets none succeed.
    """

    files: dict[int, File] = field(default_factory=dict[int, File])
    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    pending: list[EntryChange] = field(default_factory=list[EntryChange])
    # The directories as the running system sees them.
    seen: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    # The kernel's inode numbers, which it uses again; and ours, which are the same in every run.
    bound: dict[int, int] = field(default_factory=dict[int, int])
    count: int = 0
    step: int = 0

    @classmethod
    def of(cls, root: Path) -> "PageDisk":
        """A directory as it is, all of it durable."""
        disk = cls()
        for path in sorted(root.rglob("*")):
            inode, name = path.lstat().st_ino, str(path.relative_to(root))
            if path.is_dir():
                disk._make(name, inode, is_folder=True)
            elif inode in disk.bound:
                disk._enter(name, disk.bound[inode])
            else:
                disk._make(name, inode, is_folder=False)
                file = File().written(0, 0, path.read_bytes()).synced()
                disk.files[disk.bound[inode]] = file
        disk.folders = {number: dict(names) for number, names in disk.seen.items()}
        disk.pending = []
        return disk

    def copy(self) -> "PageDisk":
        return replace(
            self,
            files=dict(self.files),
            folders={number: dict(names) for number, names in self.folders.items()},
            pending=list(self.pending),
            seen={number: dict(names) for number, names in self.seen.items()},
            bound=dict(self.bound),
        )

    def apply(self, call: Call) -> None:
        """Make the disk what it is after this call."""
        self.step += 1
        match call.kind:
            case Kind.CREATE | Kind.MAKE_DIRECTORY:
                self._make(call.path, call.inode, is_folder=call.kind is Kind.MAKE_DIRECTORY)
            case Kind.UNLINK | Kind.REMOVE_DIRECTORY:
                self._enter(call.path, None)
            case Kind.LINK:
                self._enter(call.other_path, self._found(call.path))
            case Kind.RENAME:
                self._rename(call.path, call.other_path)
            case Kind.SYNC_DIRECTORY if call.error:
                pass
            case Kind.SYNC_DIRECTORY:
                self._sync_directory(self._number_of(call))
            case _:
                number = self._number_of(call)
                self.files[number] = _after(self.files[number], self.step, call)

    def running(self) -> PagedImage:
        """The disk as the running system sees it."""
        contents = {
            number: Content.of(
                {each: file.page_seen(each) for each in {*file.pages, *file.versions}},
                file.nbytes_seen,
            )
            for number, file in self.files.items()
        }
        return image_of("running", self.seen, contents)

    def find(self, path: str) -> int | None:
        number: int | None = ROOT
        for part in path.split("/") if path else ():
            number = None if number is None else self.seen.get(number, {}).get(part)
        return number

    def _found(self, path: str) -> int:
        number = self.find(path)
        assert number is not None, f"'{path}' was made by a call that was not seen"
        return number

    def _number_of(self, call: Call) -> int:
        if call.inode not in self.bound:
            self.bound[call.inode] = self._found(call.path)
        return self.bound[call.inode]

    def _make(self, path: str, inode: int, *, is_folder: bool) -> None:
        self.count += 1
        self.bound[inode] = self.count
        if is_folder:
            self.folders[self.count], self.seen[self.count] = {}, {}
        else:
            self.files[self.count] = File()
        self._enter(path, self.count)

    def _rename(self, old: str, new: str) -> None:
        number = self._found(old)
        if old.rpartition("/")[0] == new.rpartition("/")[0]:
            self._change(old, ((new.rpartition("/")[2], number), (old.rpartition("/")[2], None)))
        else:
            self._enter(new, number)
            self._enter(old, None)

    def _enter(self, path: str, number: int | None) -> None:
        self._change(path, ((path.rpartition("/")[2], number),))

    def _change(self, path: str, names: tuple[tuple[str, int | None], ...]) -> None:
        folder = self._found(path.rpartition("/")[0])
        put_names(self.seen[folder], names)
        self.pending.append(EntryChange(self.step, Entries(folder, names)))

    def _sync_directory(self, folder: int) -> None:
        self.folders[folder] = dict(self.seen[folder])
        self.pending = [each for each in self.pending if each.entries.folder != folder]


def image_of(
    label: str, folders: Mapping[int, Mapping[str, int]], contents: Mapping[int, Content]
) -> PagedImage:
    """What can be reached from the root."""
    paths: list[str] = []
    files: list[tuple[str, int, Content]] = []
    waiting = [("", ROOT)]
    while waiting:
        path, folder = waiting.pop()
        for name, number in folders[folder].items():
            if number in folders:
                paths.append(f"{path}{name}")
                waiting.append((f"{path}{name}/", number))
            else:
                files.append((f"{path}{name}", number, contents[number]))
    return PagedImage(label, tuple(sorted(paths)), tuple(sorted(files, key=lambda each: each[0])))


def put_names(folder: dict[str, int], names: tuple[tuple[str, int | None], ...]) -> None:
    """Change the names of a directory; None takes one away."""
    for name, number in names:
        if number is None:
            folder.pop(name, None)
        else:
            folder[name] = number


def _after(file: File, step: int, call: Call) -> File:
    match call.kind:
        case Kind.WRITE if call.is_durable and not call.error:
            return file.written_durably(call.offset, call.content)
        case Kind.WRITE if call.error:
            # It is in memory, and was not written back.
            written = file.written(step, call.offset, call.content)
            return written.failed_to_sync(each for each, *_ in _parts(call.offset, call.content))
        case Kind.WRITE:
            return file.written(step, call.offset, call.content)
        case Kind.TRUNCATE:
            return file.resized(step, call.offset)
        case Kind.ALLOCATE:
            return file.resized(step, max(call.offset, file.nbytes_seen))
        case _:
            assert call.kind in (Kind.SYNC, Kind.SYNC_DATA), call
            return file.failed_to_sync() if call.error else file.synced()


def _parts(offset: int, content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """A write in pieces of one page: the page, where in it the piece begins, and the piece."""
    position = 0
    while position < len(content):
        number, start = divmod(offset + position, PAGE_BYTES)
        part = content[position : position + PAGE_BYTES - start]
        yield number, start, part
        position += len(part)
