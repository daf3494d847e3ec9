"""What a layer is, how much of it is run, and what it reports."""

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from blake3 import blake3

_WHOLE = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much of a layer to run, and with which luck.

    ``share`` of its states are looked at, chosen by their identity and ``seed``, so that two runs
    of one seed look at the same. Of ``parts`` processes this is number ``part``. ``only`` is the
    beginning of one state's identity, in hex. ``until_failure`` stops at the first failure.
    ``mutant`` is switched on in the processes that a layer starts. ``kind`` is the only one of a
    layer's kinds to look at, where it has such.
    """

    seed: int = 1
    share: float = 1.0
    part: int = 0
    parts: int = 1
    only: str = ""
    kind: str = ""
    until_failure: bool = False
    mutant: str = ""


@dataclass(slots=True)
class MutableReport:
    """What a layer looked at, and what was wrong."""

    layer: str
    effort: Effort
    # By their identity: each process tells some of them again.
    histories: set[bytes] = field(default_factory=set[bytes])
    states: set[bytes] = field(default_factory=set[bytes])
    failures: list[str] = field(default_factory=list[str])
    # States of some kind, such as "inside a store".
    tallies: Counter[str] = field(default_factory=Counter[str])
    skipped: str = ""
    seconds: float = 0.0
    _met: set[bytes] = field(default_factory=set[bytes])

    def takes(self, *identity: object) -> bytes | None:
        """The state of this identity, if it is to be looked at here and was not yet.

        The identity must be the same in every run: no time, no pid, no inode number.
        """
        state = state_of(*identity)
        if state in self._met:
            return None
        self._met.add(state)
        effort = self.effort
        if effort.only:
            return state if state.hex().startswith(effort.only) else None
        number = int.from_bytes(state[:8], "little")
        if number % effort.parts != effort.part:
            return None
        luck = int.from_bytes(blake3(state + b"%d" % effort.seed).digest(8), "little")
        return state if luck < effort.share * _WHOLE else None

    def told(self, *identity: object) -> None:
        """A history was told, which is the same in every process that tells it."""
        self.histories.add(state_of(*identity))

    def looked(self, state: bytes, *kinds: str) -> None:
        """``state`` was looked at."""
        self.states.add(state)
        self.tallies.update(kinds)

    def failed(self, state: bytes, what: str) -> None:
        """What was wrong with ``state``, and how to see it again."""
        self._add_failure(what, f"--only {state.hex()[:12]}")

    def failed_when_drawn(self, what: str) -> None:
        """What was wrong with a history that only the same draws lead to."""
        effort = self.effort
        self._add_failure(what, f"--share {effort.share:g} --processes {effort.parts} --no-mutants")

    def _add_failure(self, what: str, how: str) -> None:
        again = f"--layer {self.layer} --seed {self.effort.seed} {how}"
        if self.effort.mutant:
            again += f" --mutant '{self.effort.mutant}'"
        self.failures.append(f'{what}\n    again: make crash ARGS="{again}"')

    @property
    def is_over(self) -> bool:
        """Whether a failure was enough."""
        return self.effort.until_failure and bool(self.failures)


def state_of(*identity: object) -> bytes:
    """16 bytes that stand for an identity."""
    return blake3(repr(identity).encode()).digest(16)


def in_a_line(error: BaseException) -> str:
    """An error in one line, with the line of code that raised it; of several, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = cast(BaseExceptionGroup[BaseException], error).exceptions[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}, {frame.line}"
    return f"{type(error).__name__}: {error} ({place})"


class Layer(NamedTuple):
    """One way to break a cache.

    ``quick_share`` of it is run by ``make test``, ``full_share`` by ``make crash``.
    """

    name: str
    run: Callable[[MutableReport], None]
    quick_share: float
    full_share: float = 1.0

    def report(self, effort: Effort) -> MutableReport:
        """Run it."""
        report = MutableReport(self.name, effort)
        started = time.monotonic()
        self.run(report)
        report.seconds = time.monotonic() - started
        return report


def is_at_length() -> bool:
    """Whether the tests were asked for more than their share."""
    return bool(os.environ.get("WALKBACK_EXAMPLES"))
