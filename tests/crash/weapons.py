"""Two ways to kill a process at a change of the disk: at the ``Files`` seam, or below LMDB."""

import contextlib
import os
import signal
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

from walkback.journal.files import Transaction

from .interposer import Interposer, When
from .recording import ActingFiles
from .trace import calls_of
from .tracing import DurableScribbles


class Death(NamedTuple):
    """The change, counted from 1, at which a process dies."""

    number: int
    when: When


def deaths_of(steps: Sequence[str]) -> list[Death]:
    """Every death that these steps offer. A sync changes nothing that a death could show."""
    deaths: list[Death] = []
    for number, step in enumerate(steps, 1):
        if step.startswith("sync"):
            continue
        deaths += [Death(number, When.BEFORE), Death(number, When.AFTER)]
        if step.startswith("write"):
            deaths.append(Death(number, When.MIDDLE))
    return deaths


class Weapon(Protocol):
    """Something to die of."""

    name: str

    def aim(self, root: Path, death: Death | None) -> None:
        """Count the changes of the cache at ``root``, an absolute path, from here on, and die."""
        ...

    def make_files(self, root: Path) -> ActingFiles: ...

    def steps(self) -> list[str]:
        """The changes since it was aimed."""
        ...


class BelowLmdb:
    """The interposer: every change, LMDB's own too."""

    name = "libc"

    def __init__(self) -> None:
        self._interposer = Interposer()

    def aim(self, root: Path, death: Death | None) -> None:
        self._interposer.watch(root)
        if death is not None:
            self._interposer.kill_at(death.number, death.when)
        else:
            self._interposer.start_trace()

    def make_files(self, root: Path) -> ActingFiles:
        return DurableScribbles(root)

    def steps(self) -> list[str]:
        return [str(call) for call in calls_of(self._interposer.take_trace())]


class AtTheSeam:
    """``DyingFiles``: every change that goes through ``Files``, on any system."""

    name = "seam"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: list[str] = []
        self._death: Death | None = None

    def aim(self, root: Path, death: Death | None) -> None:
        self._steps, self._death = [], death

    def make_files(self, root: Path) -> ActingFiles:
        return DyingFiles(root, self)

    def steps(self) -> list[str]:
        return list(self._steps)

    @contextlib.contextmanager
    def step(self, what: str) -> Generator[bool]:
        """A change, and whether it is to be done by half, and ``die`` to follow."""
        with self._lock:
            self._steps.append(what)
            number, death = len(self._steps), self._death
        when = death.when if death is not None and death.number == number else None
        if when is When.BEFORE:
            die()
        try:
            yield when is When.MIDDLE
        finally:
            if when is not None:
                die()


class DyingFiles(DurableScribbles):
    """Tells a weapon of each change."""

    def __init__(self, root: Path, weapon: AtTheSeam) -> None:
        super().__init__(root)
        self._weapon = weapon

    def make_directory(self, name: str) -> None:
        with self._weapon.step(f"make {name}"):
            super().make_directory(name)

    def remove_directory(self, name: str) -> None:
        with self._weapon.step(f"remove {name}"):
            super().remove_directory(name)

    def create(self, name: str) -> int:
        with self._weapon.step(f"create {name}"):
            return super().create(name)

    def write(self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        with self._weapon.step(f"write {self.path_of(descriptor)}") as is_half:
            if is_half:
                content = b"".join(buffers)
                buffers = [content[: len(content) // 2]]
            super().write(descriptor, buffers, offset)

    def rename(self, old: str, new: str) -> None:
        with self._weapon.step(f"rename {old}"):
            super().rename(old, new)

    def unlink(self, name: str) -> None:
        with self._weapon.step(f"unlink {name}"):
            super().unlink(name)

    def commit(self, transaction: Transaction) -> None:
        with self._weapon.step("commit"):
            super().commit(transaction)


def die() -> NoReturn:
    """As the kernel's killer of processes has it: nothing is told, closed or flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives a SIGKILL")
