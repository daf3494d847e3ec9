"""What happens to the machine around a cache: its clocks, its disk, its processes, its letters."""

import errno
import fcntl
import os
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from cache_maker import Failing, HookedFiles

from walkback.journal.errors import CacheClosedError, CacheLockedError
from walkback.store.boundary import NotStored
from walkback.store.core import Mode

from .course import FOLDERS, Course, PutRight, Trouble
from .lives import open_store
from .processes import Forked, ending_of, fork, leave
from .restoring import restored
from .specimen import boundary_of, entries_of

Result = TypeVar("Result")

_CHANGING = ("make", "create", "write", "rename", "unlink", "sync", "sync directory", "commit")
_LOOKING = ("open", "status", "list")
_DAY_SECONDS = 86400.0


def _nothing() -> None:
    pass


# The clock and the disk.


def set_clock(course: Course, *, wall_days: int, monotonic_days: int) -> PutRight:
    course.wall_seconds += wall_days * _DAY_SECONDS
    course.monotonic_seconds += monotonic_days * _DAY_SECONDS
    if course.store is not None:
        course.store.flush()
    return _nothing


def refuse(course: Course, *, code: int, steps: tuple[str, ...], folder: str) -> PutRight:
    """The disk refuses these steps below a folder."""
    failing = [Failing(step, code, path=folder) for step in steps]

    def hook(step: str, name: str) -> None:
        for each in failing:
            each(step, name)

    def put_right() -> None:
        course.hook = None

    course.hook = hook
    return put_right


def of_the_machine() -> Iterator[Trouble]:
    for days in (-10_000, -1, 1, 10_000):
        for wall, monotonic in ((days, 0), (0, days), (days, days)):
            begin = partial(set_clock, wall_days=wall, monotonic_days=monotonic)
            name = f"the clocks step by {wall} and {monotonic} days"
            yield Trouble(name, begin, is_harmless=True)
    for code in (errno.EROFS, errno.EACCES):
        begin = partial(refuse, code=code, steps=_CHANGING, folder="")
        yield Trouble(f"nothing can be written: {errno.errorcode[code]}", begin)
    for folder in FOLDERS:
        begin = partial(refuse, code=errno.EXDEV, steps=(*_CHANGING, *_LOOKING), folder=folder)
        yield Trouble(f"{folder} is on another device", begin)


# Processes.


def open_again(course: Course) -> PutRight:
    """Nobody else gets in, in this process or in another."""
    require_locked(course)
    ending = ending_of(partial(require_locked, course))
    assert ending.problem is None, ending.problem
    return _nothing


def require_locked(course: Course) -> None:
    descriptor = os.open(course.root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        raise AssertionError("the lock is free")
    finally:
        os.close(descriptor)
    try:
        open_store(course.root).close()
    except CacheLockedError as error:
        assert error.pid is not None
    else:
        raise AssertionError("it was opened twice")


def fork_child(course: Course) -> PutRight:
    """A child misses, and neither unlocks nor writes."""
    ending = _quietly(lambda: ending_of(partial(require_silent, course)))
    assert ending.problem is None, ending.problem
    require_locked(course)
    return _nothing


def require_silent(course: Course) -> None:
    """What a forked child may do with its parent's store: nothing."""
    store = course.store
    assert store is not None and store.mode is Mode.CLOSED
    boundary = boundary_of("c2", entries_of("c2", 7))
    assert isinstance(store.claim(boundary, request=1, producer=""), NotStored)
    assert not restored(store, "a1")
    try:
        store.choose(lambda view: (None, ()))
    except CacheClosedError:
        pass
    else:
        raise AssertionError("a child was served")
    store.flush()
    store.close()


def fork_one_that_stays(course: Course) -> PutRight:
    """A child that outlives its parent's store keeps no lock."""
    reader, writer = os.pipe()
    child = _quietly(fork)
    if not isinstance(child, Forked):
        os.close(writer)
        os.read(reader, 1)
        leave(child)

    def put_right() -> None:
        os.close(writer)
        os.close(reader)
        assert child.ending().problem is None

    return put_right


def _quietly(run: Callable[[], Result]) -> Result:
    """Fork although the store's threads run: what the child does is all that it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return run()


def of_processes() -> Iterator[Trouble]:
    for begin in (open_again, fork_child, fork_one_that_stays):
        name = begin.__name__.replace("_", " ")
        yield Trouble(name, begin, is_harmless=True, needs_open=True)


# A file system that folds case.


class FoldingFiles(HookedFiles):
    """Names that differ only in case are one name. The product never asks for two such names."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._asked: dict[str, str] = {}

    @contextmanager
    def _folder(self, name: str) -> Generator[int]:
        path = self.root
        for part in name.split("/") if name else ():
            path /= self._as_it_stands(path, part)
        with super()._folder(str(path.relative_to(self.root)) if name else "") as folder:
            yield folder

    @contextmanager
    def _parent(self, name: str) -> Generator[tuple[int, str]]:
        asked = self._asked.setdefault(name.casefold(), name)
        assert asked == name, f"{asked} and {name} are one name where case is folded"
        with super()._parent(name) as (folder, leaf):
            yield folder, self._as_it_stands(Path(f"/proc/self/fd/{folder}"), leaf)

    def _as_it_stands(self, folder: Path, name: str) -> str:
        names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        same = [each for each in names if each.casefold() == name.casefold()]
        return same[0] if same and name not in names else name


def change_case(course: Course, *, name: str) -> PutRight:
    """A name gets another case, as a copy through another file system may give it."""
    path = course.root / name
    other = path.with_name(name.swapcase())
    path.rename(other)

    def put_right() -> None:
        if other.exists():
            other.rename(path)

    return put_right


def of_case() -> Iterator[Trouble]:
    for name in ("blocks", "sidecars", "staging", "quarantine", "archive", "STORE", "HEAD"):
        yield Trouble(
            f"{name} in another case",
            partial(change_case, name=name),
            is_harmless=True,
            make_files=FoldingFiles,
        )
