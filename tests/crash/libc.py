"""Layer ``libc``: the power is lost after any call that changes a file, LMDB's own among them.

The story is told by a process with the interposer. Its trace is replayed into a model of pages and
directory entries, and what each moment may leave is recovered by processes that may die of it: LMDB
is not trusted here. Then some of the recoveries are traced themselves, and lose the power too.
"""

import itertools
import math
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from .interposer import preloaded_environment, unavailable
from .judging import Case, judge_all
from .layer import Layer, MutableReport
from .lives import require_recovery, scratch_directory, steady
from .losses import lost_power
from .pages import PagedImage, PageDisk
from .tracing import (
    CACHE,
    NOTHING,
    Moment,
    identity_of,
    moments_of,
    require_that_all_was_seen,
    run_with_interposer,
    told_recoveries,
    told_story,
)
from .world import Legal

# Recoveries that are traced, of those that differ in what they find to do.
_RECOVERIES = 60
# Every how manieth state is opened a second time.
_REPEAT_EVERY = 8
# At one moment, of combinations that are too many.
_RANDOM_COUNT = 40


def survey(report: MutableReport, moments: Sequence[Moment], *kinds: str) -> Iterator[Case]:
    """What a power loss may leave at every moment, if the report takes it.

    A small share is a share of what some of the moments may leave.
    """
    effort = report.effort
    count = len(moments) if effort.only else math.ceil(min(1, 4 * effort.share) * len(moments))
    numbers = sorted(random.Random(effort.seed).sample(range(len(moments)), count))
    cases = [_cases_at(report, moments[number], number, kinds) for number in numbers]
    # When one failure is enough, a little of everything first.
    yield from _in_turn(cases) if effort.until_failure else itertools.chain.from_iterable(cases)


def _cases_at(
    report: MutableReport, moment: Moment, number: int, kinds: Sequence[str]
) -> Iterator[Case]:
    worlds = identity_of(moment.legal)
    inside = ("inside a store",) if moment.is_inside_a_store else ()
    for image in _images_at(report, moment, number):
        state = report.takes(image.identity, worlds)
        if state is not None:
            label = f"after '{moment.step}', {image.label}"
            is_repeated = not state[0] % _REPEAT_EVERY
            judging = partial(judge, image, moment.legal, is_repeated)
            yield Case(state, label, (*kinds, *inside), judging)


def _in_turn(sources: Sequence[Iterator[Case]]) -> Iterator[Case]:
    for cases in itertools.zip_longest(*random.Random(1).sample(sources, len(sources))):
        yield from filter(None, cases)


def _images_at(report: MutableReport, moment: Moment, number: int) -> Iterator[PagedImage]:
    randomness = random.Random(f"{report.effort.seed} {number}")
    return lost_power(moment.disk, randomness, random_count=_RANDOM_COUNT)


def judge(image: PagedImage, legal: Legal, is_repeated: bool, directory: Path) -> None:
    """Recover an image at this path, where nothing is yet."""
    image.whole().write_to(directory)
    require_recovery(directory / CACHE, legal, is_verified=True, is_repeated=is_repeated)


def of_each_kind(moments: Sequence[Moment]) -> list[Moment]:
    """One moment of each kind, in a random order."""
    kinds: dict[tuple[str, ...], Moment] = {}
    for moment in random.Random(5).sample(moments, len(moments)):
        kinds.setdefault(moment.kind, moment)
    return list(kinds.values())


def moments_inside_recoveries(
    report: MutableReport,
    chosen: Sequence[Moment],
    scratch: Path,
    environment: Mapping[str, str],
) -> Iterator[list[Moment]]:
    """For each of these moments, the calls of recovering one of the disks that it may leave."""
    directories = [scratch / f"recovered{number}" for number in range(len(chosen))]
    disks: list[PageDisk] = []
    for number, (moment, directory) in enumerate(zip(chosen, directories, strict=True)):
        images = list(_images_at(report, moment, number))
        random.Random(f"{report.effort.seed} {number}").choice(images).whole().write_to(directory)
        disks.append(PageDisk.of(directory))
    recoveries = run_with_interposer(
        environment, report.effort.mutant, told_recoveries, directories
    )
    for moment, disk, told, directory in zip(chosen, disks, recoveries, directories, strict=True):
        report.told("recovery", directory.name)
        yield moments_of(disk, told, moment.legal, f"{moment.step}, then ")
        require_that_all_was_seen(disk, directory)
        shutil.rmtree(directory)


def run(report: MutableReport) -> None:
    """Power losses in the story, then in its recoveries."""
    effort = report.effort
    if (reason := unavailable()) is not None:
        report.skipped = reason
        return
    with steady(), scratch_directory() as scratch:
        environment = preloaded_environment(scratch)
        directory, disk = scratch / "told", PageDisk()
        directory.mkdir()
        told = run_with_interposer(environment, effort.mutant, told_story, directory)
        moments = moments_of(disk, told, NOTHING)
        require_that_all_was_seen(disk, directory)
        report.told("story")
        judge_all(report, survey(report, moments), scratch)
        if report.is_over:
            return
        kinds = of_each_kind(moments)
        count = len(kinds) if effort.only else max(4, round(_RECOVERIES * effort.share))
        for inner in moments_inside_recoveries(report, kinds[:count], scratch, environment):
            judge_all(report, survey(report, inner, "inside recovery"), scratch)
            if report.is_over:
                return


LAYER = Layer("libc", run, quick_share=0.05, full_share=0.8)
