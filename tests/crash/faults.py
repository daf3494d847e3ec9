"""Faults of a disk: one call that fails, or all of them from one on, until the fault is lifted."""

import contextlib
import errno
import functools
import os
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import lmdb
import pytest

from walkback.journal.files import Transaction

from .interposer import Interposer
from .recording import ActingFiles
from .trace import calls_of

MAP_FULL = "MAP_FULL"

# What the system says, once, of any call.
CODES = ("ENOSPC", "EDQUOT", "EIO", "EACCES", "EROFS", "EMFILE", "EINTR")

_TAKES_ROOM = {"make_directory", "create", "write", "rename", "sync", "sync_directory", "commit"}
_CHANGES = _TAKES_ROOM | {"remove_directory", "unlink", "open_for_update"}
_HOLDS_NO_FILE = {"write", "read", "sync", "status_of", "commit", "free_bytes", "try_lock"}
_CALLS = (
    *("make_directory", "remove_directory", "sync_directory", "names", "create", "open"),
    *("open_for_update", "close_file", "write", "read", "sync", "rename", "unlink", "status"),
    *("status_of", "commit", "free_bytes", "try_lock", "is_in_place"),
)
_ALL = {*_CALLS, "root"}

# What fails, from one call on, on a disk that is full, dead, not ours any more or read-only, and in
# a process that has too many files open.
STICKY = {
    "ENOSPC": _TAKES_ROOM,
    "EDQUOT": _TAKES_ROOM,
    "EIO": _ALL,
    "EACCES": _ALL,
    "EROFS": _CHANGES,
    "EMFILE": _ALL - _HOLDS_NO_FILE - {"close_file"},
}


class Fault(NamedTuple):
    """The n-th call of a kind fails, counted from 1, and from then on all that the code is about.

    The kind ``late commit`` is a commit that stands all the same. ``short`` is a write that does
    half of what it was asked to; after a ``half`` the rest of it fails.
    """

    call: str
    number: int
    code: str
    is_sticky: bool = False

    def __str__(self) -> str:
        often = "from" if self.is_sticky else "at"
        return f"{self.code or 'half'} {often} {self.call} {self.number}"


class Trouble(Protocol):
    """What goes wrong with the disk of one cache."""

    @property
    def has_fired(self) -> bool: ...

    @property
    def lasts(self) -> bool:
        """Whether it is still there when the cache is closed."""
        ...

    def start(self, root: Path) -> None:
        """The cache is in place, and about to be opened."""
        ...

    def make_files(self, root: Path) -> ActingFiles: ...

    def lift(self) -> None:
        """Let nothing fail any more."""
        ...


class TroubleAtTheSeam:
    """Counts the calls of ``Files``, and has one fail. Any thread may meet it."""

    def __init__(self, fault: Fault | None) -> None:
        self.counts: Counter[str] = Counter()
        self.has_fired = False
        self._fault = fault
        self._lock = threading.Lock()

    @property
    def lasts(self) -> bool:
        # A disk that is dead is dead to the end, so that what the close does about it is seen too.
        fault = self._fault
        return not self.has_fired or (fault is not None and fault[2:] == ("EIO", True))

    def start(self, root: Path) -> None:
        pass

    def make_files(self, root: Path) -> ActingFiles:
        return FailingFiles(root, self)

    def lift(self) -> None:
        with self._lock:
            self._fault = None

    def strikes(self, call: str) -> bool:
        """Whether this call of a kind, which is counted, is to fail."""
        with self._lock:
            self.counts[call] += 1
            fault = self._fault
            if fault is None:
                return False
            is_first = not self.has_fired and (call, self.counts[call]) == fault[:2]
            self.has_fired |= is_first
            follows = (
                self.has_fired and fault.is_sticky and call in STICKY.get(fault.code, {fault.call})
            )
            return is_first or follows

    def error(self) -> Exception:
        fault = self._fault
        code = fault.code if fault is not None else "EIO"
        if code == MAP_FULL:
            return lmdb.MapFullError("as the test wants it")
        number: int = getattr(errno, code)
        return OSError(number, os.strerror(number))

    def meet(self, call: str) -> None:
        if self.strikes(call):
            raise self.error()


class FailingFiles(ActingFiles):
    """Meets the trouble in every call that the product makes."""

    def __init__(self, root: Path, trouble: TroubleAtTheSeam) -> None:
        self.trouble = trouble
        trouble.meet("root")
        super().__init__(root)

    def close_file(self, descriptor: int) -> None:
        # Whatever the system answers, the descriptor is gone.
        super().close_file(descriptor)
        self.trouble.meet("close_file")

    def commit(self, transaction: Transaction) -> None:
        self.trouble.meet("commit")
        super().commit(transaction)
        self.trouble.meet("late commit")

    def is_in_place(self) -> bool:
        return not self.trouble.strikes("is_in_place") and super().is_in_place()


def _failing(name: str) -> Any:
    @functools.wraps(getattr(ActingFiles, name))
    def call(files: FailingFiles, *arguments: Any) -> Any:
        files.trouble.meet(name)
        return getattr(super(FailingFiles, files), name)(*arguments)

    return call


for _name in _CALLS:
    if _name not in vars(FailingFiles):
        setattr(FailingFiles, _name, _failing(_name))


@contextlib.contextmanager
def short_writes(trouble: TroubleAtTheSeam) -> Generator[None]:
    """Have the system's own write fall short, which ``Files.write`` has to make up for."""
    real = os.pwritev
    is_cut_off = False

    def pwritev(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        nonlocal is_cut_off
        if is_cut_off:
            is_cut_off = False
            raise trouble.error()
        is_cut_off = trouble.strikes("half")
        is_short = trouble.strikes("short")
        if not (is_cut_off or is_short):
            return real(descriptor, buffers, offset)
        content = b"".join(buffers)
        return real(descriptor, [content[: -(-len(content) // 2)]], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", pwritev)
        yield


def faults_of(counts: Counter[str]) -> list[Fault]:
    """Every fault that a history of so many calls can meet."""
    faults: list[Fault] = []
    for call, count in sorted(counts.items()):
        once = CODES
        sticky = [code for code, calls in STICKY.items() if call in calls]
        match call:
            case "short":
                once, sticky = ("",), [""]
            case "half":
                once, sticky = ("ENOSPC", "EDQUOT", "EIO"), ["ENOSPC"]
            case "commit":
                once = (*CODES, MAP_FULL)
            case "late commit":
                once, sticky = ("EIO", "ENOSPC"), ["EIO"]
            case _:
                pass
        for number in range(1, count + 1):
            faults += [Fault(call, number, code) for code in once]
            faults += [Fault(call, number, code, is_sticky=True) for code in sticky]
    return faults


class LibcFault(NamedTuple):
    """The n-th call that changes something below the root fails, LMDB's own calls counted too."""

    number: int
    code: str
    is_sticky: bool = False
    is_late: bool = False
    is_short: bool = False


class TroubleBelowLmdb:
    """The interposer has one call fail. With no fault it only watches."""

    def __init__(self, fault: LibcFault | None) -> None:
        self._interposer = Interposer()
        self._fault = fault
        self._has_fired = False

    def start(self, root: Path) -> None:
        self._interposer.watch(root)
        fault = self._fault
        if fault is None:
            self._interposer.start_trace()
        else:
            self._interposer.fail_at(
                fault.number,
                getattr(errno, fault.code),
                is_sticky=fault.is_sticky,
                is_late=fault.is_late,
                is_short=fault.is_short,
            )

    @property
    def has_fired(self) -> bool:
        return self._has_fired or self._interposer.fired > 0

    @property
    def lasts(self) -> bool:
        fault = self._fault
        return not self.has_fired or (fault is not None and fault[1:3] == ("EIO", True))

    def make_files(self, root: Path) -> ActingFiles:
        return ActingFiles(root)

    def lift(self) -> None:
        self._has_fired = self.has_fired
        self._interposer.reset()

    def steps(self) -> list[str]:
        return [str(call) for call in calls_of(self._interposer.take_trace())]


def libc_faults_of(steps: Sequence[str]) -> list[LibcFault]:
    """The faults that LMDB's own calls can meet: others are met at the seam."""
    faults: list[LibcFault] = []
    for number, step in enumerate(steps, 1):
        if "data.mdb" not in step and not step.startswith("write backup/"):
            continue
        faults += [LibcFault(number, code) for code in ("EIO", "ENOSPC", "EDQUOT", "EINTR")]
        faults += [LibcFault(number, code, is_sticky=True) for code in ("EIO", "ENOSPC")]
        faults.append(LibcFault(number, "EIO", is_late=True))
        if step.startswith("write"):
            faults.append(LibcFault(number, "EIO", is_short=True))
    return faults
