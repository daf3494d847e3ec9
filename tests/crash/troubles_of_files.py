"""What happens to the files of a cache: its directory, its payloads, its folders, its names."""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from walkback.journal.words import Kind

from .course import FOLDERS, Course, PutRight, Trouble
from .lives import open_store
from .restoring import restored
from .specimen import boundary_of, entries_of, payload_in
from .world import EntryId, World, key, put, require_sound, settle

EPOCH_FOLDERS = ("blocks/00000001", "sidecars/00000001", "blocks/00000002", "sidecars/00000002")
ENTRIES = tuple((kind, key(name)) for name in ("a1", "a2", "b2", "c1") for kind in Kind)
SHAPES = ("a link", "a dangling link", "a folder", "a pipe", "nothing")


def make_shape(path: Path, shape: str, target: Path) -> None:
    """Let a thing of this shape stand at ``path``."""
    match shape:
        case "a link":
            path.symlink_to(target)
        case "a dangling link":
            path.symlink_to(target.with_name("not there"))
        case "a folder":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case "a file":
            path.write_bytes(b"a stranger's")
        case _:
            pass


def remove_strangers(course: Course) -> None:
    """Remove whatever stands in a payload's place and is no file, or a stranger's."""
    for pattern in ("blocks/*/*", "sidecars/*/*", "staging/*", "quarantine/*"):
        for path in course.root.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif not path.is_file() or path.is_symlink() or path.stat().st_size < 100:
                path.unlink()


# The directory.


def rename_away(course: Course) -> PutRight:
    """The directory goes away, and comes back with what was promised of it."""
    elsewhere = course.root.with_name("elsewhere")
    promised = dict(course.promised)
    is_closed = course.store is None
    course.root.rename(elsewhere)

    def put_right() -> None:
        if course.root.is_symlink():
            course.root.unlink()
        elif course.root.exists():
            course.root.rename(course.root.with_name("in its place"))
            if is_closed:
                # What was stored meanwhile is in another cache.
                course.promised = promised
        elsewhere.rename(course.root)

    return put_right


def empty_in_place(course: Course) -> PutRight:
    put_right = rename_away(course)
    course.root.mkdir()
    return put_right


def link_in_place(course: Course) -> PutRight:
    put_right = rename_away(course)
    course.root.symlink_to(course.root.with_name("elsewhere"))
    return put_right


def remove_all(course: Course) -> PutRight:
    is_open = course.store is not None
    shutil.rmtree(course.root)
    course.may_lose(list(course.promised))

    def put_right() -> None:
        assert not (is_open and course.root.exists()), "a removed cache was made again"

    return put_right


def another_cache_in_place(course: Course) -> PutRight:
    """Another writer has the path, and the lock of what stands there."""
    put_right = rename_away(course)
    entries = entries_of("z1", 1)
    other = open_store(course.root)
    assert put(other, boundary_of("z1", entries), entries).refusal is None

    def end_both() -> None:
        require_sound(other, course.root, [World(entries)])
        other.close()
        put_right()

    return end_both


def of_the_directory() -> Iterator[Trouble]:
    yield Trouble("the directory is renamed", rename_away, is_offline=True)
    yield Trouble("the directory is removed", remove_all, is_offline=True)
    yield Trouble("an empty directory in its place", empty_in_place, is_offline=True)
    yield Trouble("a link to it in its place", link_in_place, is_offline=True)
    yield Trouble("another cache in its place", another_cache_in_place, is_offline=True)


# Payloads.


def payload_of(course: Course, entry: EntryId) -> Path | None:
    """The newest file in place that holds an entry."""
    folder = course.root / entry[0].folder
    found = [each for each in folder.glob("*/*") if payload_in(each.read_bytes())[0] == entry]
    return max(found, default=None)


def change_payload(course: Course, *, entry: EntryId, shape: str) -> PutRight:
    """A payload is changed, or a stranger takes its place, just when a reader has chosen it."""
    path = payload_of(course, entry)
    assert path is not None
    aside = course.outside / "payload"
    todo = [shape]

    def change() -> None:
        match todo.pop() if todo else "done":
            case "done":
                pass
            case "another name":
                aside.hardlink_to(path)
            case "truncated":
                os.truncate(path, 16384)
            case "zeros":
                path.write_bytes(bytes(path.stat().st_size))
            case _:
                path.rename(aside)
                make_shape(path, shape, aside)

    if shape != "another name":
        course.may_lose([entry])
    if course.store is not None:
        name = entry[1].decode().rstrip(".")
        course.require_legal(restored(course.store, name, on_assembly=change))
    change()

    def put_right() -> None:
        if shape == "another name":
            aside.unlink()
        remove_strangers(course)

    return put_right


def of_payloads() -> Iterator[Trouble]:
    for entry in ENTRIES:
        for shape in ("another name", "truncated", "zeros", *SHAPES):
            yield Trouble(
                f"{shape} for the {entry[0].word} {entry[1].decode()}",
                partial(change_payload, entry=entry, shape=shape),
                target=partial(_has_payload, entry=entry),
                is_harmless=shape == "another name",
            )


def _has_payload(course: Course, entry: EntryId) -> bool:
    return payload_of(course, entry) is not None


# Folders.


def replace_folder(course: Course, *, folder: str, shape: str) -> PutRight:
    """A folder goes outside, and something stands in its place."""
    path, aside = course.root / folder, course.outside / "folder"
    if course.store is not None:
        settle(course.store)
    if shape == "nothing":
        files = [each for each in path.rglob("*") if each.is_file() and folder != "journal"]
        payloads = [each for each in files if folder.startswith(("blocks", "sidecars"))]
        course.may_lose([payload_in(each.read_bytes())[0] for each in payloads])
    path.rename(aside)
    make_shape(path, shape, aside)

    def put_right() -> None:
        if shape != "nothing":
            path.unlink()
            aside.rename(path)

    return put_right


def of_folders() -> Iterator[Trouble]:
    for folder in (*FOLDERS, *EPOCH_FOLDERS):
        for shape in ("a link", "a file", "nothing"):
            yield Trouble(
                f"{shape} for {folder}",
                partial(replace_folder, folder=folder, shape=shape),
                target=partial(_has_folder, folder=folder),
            )


def _has_folder(course: Course, folder: str) -> bool:
    return (course.root / folder).is_dir()


def occupy_staging(course: Course, *, shape: str, count: int) -> PutRight:
    """The names that will be staged under are taken."""
    epoch = max(int(each.name, 16) for each in (course.root / "blocks").iterdir())
    epoch += course.store is None
    folders = [course.root / kind.folder / f"{epoch:08x}" for kind in Kind]
    used = [int(each.name, 16) for folder in folders for each in folder.glob("*")]
    for counter in range(max(used, default=0) + 1, max(used, default=0) + 1 + count):
        name = course.root / f"staging/{epoch:08x}-{counter:08x}"
        make_shape(name, shape, course.outside / "precious")
    return partial(remove_strangers, course)


def occupy_quarantine(course: Course, *, shape: str) -> PutRight:
    """The names that files are put aside under are taken."""
    for entry in ENTRIES:
        path = payload_of(course, entry)
        if path is not None:
            name = f"{entry[0].word}-{path.parent.name}-{path.name}"
            make_shape(course.root / "quarantine" / name, shape, course.outside / "precious")
    return partial(remove_strangers, course)


def of_names() -> Iterator[Trouble]:
    for shape in ("a link", "a dangling link", "a folder", "a pipe", "a file"):
        for count in (1, 8):
            yield Trouble(
                f"{shape} under the next {count} names to be staged under",
                partial(occupy_staging, shape=shape, count=count),
                is_harmless=count == 1,
            )
        yield Trouble(
            f"{shape} under the names in quarantine",
            partial(occupy_quarantine, shape=shape),
            is_harmless=True,
        )
