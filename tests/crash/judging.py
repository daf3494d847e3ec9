"""States that are judged in forked processes, since what is wrong with one may end its process."""

import gc
import io
import os
import pickle
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .layer import MutableReport
from .processes import Forked, fork, leave

Mixed = TypeVar("Mixed", bound=tuple[Any, ...])

# A judge that lives on judges this many.
_BATCH = 64
# One state takes some milliseconds; what takes this long never ends.
_HANGS_SECONDS = 120


class Case(NamedTuple):
    """A state to be judged at a path where nothing is, and what it is called."""

    state: bytes
    label: str
    kinds: tuple[str, ...]
    judge: Callable[[Path], None]


def judge_all(report: MutableReport, cases: Iterable[Case], scratch: Path) -> None:
    """Judge them, a batch in one process, until it is over. What a judge raises is a failure.

    So is its death. After either another judge goes on with the next.
    """
    waiting = iter(cases)
    while batch := list(islice(waiting, _BATCH)):
        while batch:
            problems, death = _judged(batch, scratch)
            if death is not None and len(problems) < len(batch):
                problems.append(f"its judge {death}")
            for case, problem in zip(batch, problems, strict=False):
                report.looked(case.state, *case.kinds)
                if problem is not None:
                    report.failed(case.state, f"{case.label}: {problem}")
            if report.is_over:
                return
            batch = batch[len(problems) :]


def mixed(cases: Iterable[Mixed], seed: int) -> list[Mixed]:
    """In random order, and of every kind, which comes first, as many as of any other.

    What is wrong at all mostly shows with one kind only.
    """
    kinds: dict[str, list[Mixed]] = {}
    for case in cases:
        kinds.setdefault(str(case[0]), []).append(case)
    for each in kinds.values():
        random.Random(seed).shuffle(each)
    turns = zip_longest(*kinds.values())
    return [case for turn in turns for case in turn if case is not None]


def _judged(batch: Sequence[Case], scratch: Path) -> tuple[list[str | None], str | None]:
    """What one process says of those that it came to, and how it died if it did."""
    forked = fork()
    if not isinstance(forked, Forked):
        _be_the_judge(batch, scratch, forked)
        leave(forked)
    ending = forked.ending()
    problems = list(_unpickled(ending.said))
    shutil.rmtree(scratch / "judged", ignore_errors=True)
    if not ending.code:
        return problems, None
    code = ending.code
    return problems, f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def _be_the_judge(batch: Sequence[Case], scratch: Path, writer: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Nothing of its parent's is garbage, and to look at it would copy every page of it.
    gc.freeze()
    root = scratch / "judged"
    for case in batch:
        signal.alarm(_HANGS_SECONDS)
        problem: str | None = None
        try:
            case.judge(root)
        except Exception as error:  # noqa: BLE001 - whatever the product raises is the finding
            problem = f"{type(error).__name__}: {error}"
        os.write(writer, pickle.dumps(problem))
        if problem is not None:
            # What it left open would disturb the next.
            return
        shutil.rmtree(root, ignore_errors=True)


def _unpickled(said: bytes) -> Iterator[str | None]:
    stream = io.BytesIO(said)
    while stream.tell() < len(said):
        yield pickle.load(stream)
