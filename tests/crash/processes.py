"""Other processes: one that runs a part of a layer, and forked ones that may die of it."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from .layer import MutableReport
from .mutants import switch_on

Part = Callable[[MutableReport], None]

_TESTS = Path(__file__).parents[1]


def run_apart(part: Part, report: MutableReport, environment: Mapping[str, str]) -> None:
    """Have a process of its own, without threads, run ``part``, a function of a module.

    It begins with the report as it is, which is filled in when it has ended.
    """
    paths = [str(_TESTS.parent / "src"), str(_TESTS), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import serve; serve()"],
        input=pickle.dumps((part, report)),
        capture_output=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace")
        raise RuntimeError(f"{part.__name__} ended with {done.returncode}:\n{said}")
    told: MutableReport = pickle.loads(done.stdout)
    for name in ("histories", "states", "failures", "tallies", "_met"):
        setattr(report, name, getattr(told, name))


def serve() -> None:
    """Be that process."""
    part: Part
    report: MutableReport
    part, report = pickle.load(sys.stdin.buffer)
    switch_on(report.effort.mutant)
    part(report)
    sys.stdout.buffer.write(pickle.dumps(report))


class Ending(NamedTuple):
    """How a forked process ended, and what it had said."""

    code: int
    said: bytes

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def problem(self) -> str | None:
        """What was wrong with a process that was to end well, None if it did."""
        if not self.code:
            return None
        said = self.said.decode(errors="replace") or "it said nothing"
        return said if self.code > 0 else f"died of signal {-self.code}; {said}"


class Forked(NamedTuple):
    """A forked process, seen from its parent."""

    pid: int
    reader: int

    def ending(self) -> Ending:
        """Wait for its end."""
        with os.fdopen(self.reader, "rb") as stream:
            said = stream.read()
        _, status = os.waitpid(self.pid, 0)
        return Ending(os.waitstatus_to_exitcode(status), said)


def fork() -> Forked | int:
    """Fork a process that has no threads. The child gets a descriptor to say something.

    The child comes back here with all that its parent had, and must go by ``leave``.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        return writer
    os.close(writer)
    return Forked(pid, reader)


def leave(writer: int, error: BaseException | None = None) -> NoReturn:
    """End a forked process: well, or with what went wrong."""
    if error is not None:
        os.write(writer, f"{type(error).__name__}: {error}".encode())
    os._exit(0 if error is None else 1)


def ending_of(run: Callable[[], bytes | None]) -> Ending:
    """How a forked process ends that does nothing but ``run``, and says what that returns."""
    forked = fork()
    if isinstance(forked, Forked):
        return forked.ending()
    try:
        os.write(forked, run() or b"")
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent has to hear of it
        leave(forked, error)
    leave(forked)
