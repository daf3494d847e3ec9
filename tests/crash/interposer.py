"""The interposer (interposer.c), from the outside and from the inside.

Outside, a process is started with it::

    if unavailable() is None:
        environment = preloaded_environment(scratch)
        subprocess.run([sys.executable, "-m", "crash.some_program"], env=environment)

Inside, it is steered::

    interposer = Interposer()
    interposer.watch(root)                              # an absolute path without links
    interposer.kill_at(7, When.MIDDLE)                  # or
    interposer.fail_at(2, errno.EIO, kind=SYNCS)        # or
    interposer.start_trace()
    ...
    interposer.calls                                    # how many there were: then repeat for each

A process that is not preloaded has no ``Interposer``: making one raises. What a preloaded process
starts or forks is preloaded too; a fork keeps what was asked for, a new program watches nothing.
"""

import ctypes
import enum
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).with_name("interposer.c")
_TESTS = Path(__file__).parents[1]


class Kind(enum.IntFlag):
    """What a call does; kinds can be joined. Known to interposer.c."""

    CREATE = enum.auto()
    WRITE = enum.auto()
    TRUNCATE = enum.auto()
    ALLOCATE = enum.auto()
    SYNC = enum.auto()
    SYNC_DATA = enum.auto()
    SYNC_DIRECTORY = enum.auto()
    RENAME = enum.auto()
    UNLINK = enum.auto()
    LINK = enum.auto()
    MAKE_DIRECTORY = enum.auto()
    REMOVE_DIRECTORY = enum.auto()
    # Only in a trace: what the process said with ``mark``.
    MARK = enum.auto()


SYNCS = Kind.SYNC | Kind.SYNC_DATA | Kind.SYNC_DIRECTORY
ANY = ~Kind.MARK


class When(enum.IntEnum):
    """When to die: in the middle of a write half of it is done, of anything else all."""

    BEFORE = 0
    AFTER = 1
    MIDDLE = 2


def unavailable() -> str | None:
    """Why no process can be started with it here; None if one can."""
    if sys.platform != "linux":
        return f"LD_PRELOAD and /proc are Linux's, and this is {sys.platform}"
    if platform.architecture()[0] != "64bit":
        return "it is for systems of 64 bits"
    if shutil.which("cc") is None:
        return "there is no C compiler named cc"
    return None


def preloaded_environment(scratch: Path) -> dict[str, str]:
    """An environment for Python processes of these tests that have it. Compiled in ``scratch``."""
    library = scratch / "interposer.so"
    if not library.exists():
        new = scratch / f"interposer.{os.getpid()}"
        flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["cc", *flags, "-o", new, _SOURCE], check=True)
        new.rename(library)
    paths = [str(_TESTS.parent / "src"), str(_TESTS), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


class Interposer:
    """Steers the interposer of this process.

    Numbers count from 1, from the last ``watch`` or ``reset``, or from the order itself if that
    came later. A number that is never reached does nothing: see ``calls`` and ``fired``.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        if not hasattr(library, "interposer_watch"):
            raise RuntimeError("this process was not started with the interposer")
        library.interposer_calls.restype = ctypes.c_long
        library.interposer_fault_count.restype = ctypes.c_long
        library.interposer_trace_start.restype = ctypes.c_void_p
        self._library = library

    def watch(self, root: Path | None) -> None:
        """See the calls on ``root`` and below, and no others; None sees none. Resets."""
        self._library.interposer_watch(os.fsencode(root.resolve()) if root is not None else b"")

    def reset(self) -> None:
        """Forget what was asked for, and count from 0. A trace goes on."""
        self._library.interposer_reset()

    @property
    def calls(self) -> int:
        """The calls that change something, below the root, since ``watch`` or ``reset``."""
        return self._library.interposer_calls()

    def kill_at(self, number: int, when: When, *, kind: Kind = ANY) -> None:
        """SIGKILL this process at the n-th call of a kind."""
        self._library.interposer_kill(
            ctypes.c_long(number), ctypes.c_uint32(kind & ANY), ctypes.c_int(when)
        )

    def fail_at(
        self,
        number: int,
        code: int,
        *,
        kind: Kind = ANY,
        is_sticky: bool = False,
        is_short: bool = False,
        is_late: bool = False,
    ) -> None:
        """Let the n-th call of a kind fail with errno ``code``, and all after it if ``is_sticky``.

        ``is_late`` fails after the call had its effect. ``is_short`` instead lets a write succeed
        with half of what it was asked for; ``code`` then means nothing.
        """
        kinds = Kind.WRITE if is_short else kind & ANY
        self._library.interposer_fail(
            ctypes.c_long(number),
            ctypes.c_uint32(kinds),
            ctypes.c_int(code),
            ctypes.c_bool(is_sticky),
            ctypes.c_bool(is_short),
            ctypes.c_bool(is_late),
        )

    @property
    def fired(self) -> int:
        """How many calls were made to fail or fall short."""
        return self._library.interposer_fault_count()

    def start_trace(self) -> None:
        """Trace from here on, from nothing."""
        self._library.interposer_trace(ctypes.c_bool(True))

    def take_trace(self) -> bytes:
        """The trace, which ends with this; no thread may be writing. ``trace.py`` reads it."""
        count = ctypes.c_size_t()
        start = self._library.interposer_trace_start(ctypes.byref(count))
        trace = ctypes.string_at(start, count.value) if start else b""
        self._library.interposer_trace(ctypes.c_bool(False))
        return trace

    def mark(self, text: str) -> None:
        """Write a line into the trace."""
        self._library.interposer_mark(text.encode())
