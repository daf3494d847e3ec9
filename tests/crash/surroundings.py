"""Layer ``surroundings``: what the world around a cache does to it, open or closed.

At each step of a course each trouble begins, and the course goes on as far as it can. Then what was
outside must be as it was; the trouble is put right, and the cache is opened and read: nothing that
was promised is lost, but what the trouble itself took away.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from .course import ACTS, CLOSED, Course, Trouble
from .judging import Case, judge_all, mixed
from .layer import Layer, MutableReport
from .lives import scratch_directory
from .processes import run_apart
from .specimen import tree_of
from .troubles_of_files import of_folders, of_names, of_payloads, of_the_directory
from .troubles_of_machines import of_case, of_processes, of_the_machine
from .world import settle

_KINDS = {
    "of the directory": of_the_directory,
    "of payloads": of_payloads,
    "of folders": of_folders,
    "of names": of_names,
    "of the machine": of_the_machine,
    "of processes": of_processes,
    "of case": of_case,
}


def rehearsed(root: Path) -> list[tuple[str, int, Trouble]]:
    """The troubles that find their target before each act, with their kind."""
    course = _course_at(root)
    found: list[tuple[str, int, Trouble]] = []
    for step in range(len(ACTS)):
        if step:
            found += [
                (kind, step, trouble)
                for kind, troubles in _KINDS.items()
                for trouble in troubles()
                if trouble.target(course) and (course.store or not trouble.needs_open)
            ]
        _live(course, range(step, step + 1))
    course.close()
    assert not course.failures, course.failures
    return found


def judge(trouble: Trouble, step: int, root: Path) -> None:
    """Live the course with this trouble from this step on."""
    course = _course_at(root)
    course.make_files = trouble.make_files
    _live(course, range(step))
    put_right = trouble.begin(course)
    outside = tree_of(course.outside)
    # One that was opened in another place would be another cache.
    end = CLOSED if trouble.is_offline and course.store is not None else len(ACTS)
    stored_count = course.stored_count
    _live(course, range(step, max(step, end)))
    if course.store is None and trouble.is_offline:
        assert course.stored_count == stored_count, "it was stored where nobody finds it"
    course.close()
    assert tree_of(course.outside) == outside, "something outside was touched"
    assert not (trouble.is_harmless and course.failures), course.failures
    put_right()
    for _ in range(2):
        course.failures.clear()
        course.open()
        assert not course.failures, course.failures
        course.require_promised()
        course.close()


def _live(course: Course, steps: range) -> None:
    for step in steps:
        ACTS[step](course)
        if course.store is not None:
            settle(course.store)


def _course_at(root: Path) -> Course:
    (root / "outside").mkdir(parents=True)
    (root / "outside/precious").write_bytes(b"not ours" * 3000)
    return Course(root / "cache", root / "outside")


def cases(report: MutableReport, scratch: Path) -> Iterator[Case]:
    """Those states that the report takes."""
    wanted = rehearsed(scratch / "rehearsal")
    if report.effort.until_failure:
        wanted = mixed(wanted, report.effort.seed)
    for kind, step, trouble in wanted:
        state = report.takes(report.layer, trouble.name, step)
        if state is not None:
            label = f"before act {step}, {trouble.name}"
            yield Case(state, label, (kind,), partial(judge, trouble, step))


def survey(report: MutableReport) -> None:
    """All of it, in a process without threads."""
    with scratch_directory() as scratch:
        report.told("acts")
        judge_all(report, cases(report, scratch), scratch)


def run(report: MutableReport) -> None:
    """Disturb the course in every way that the report takes."""
    run_apart(survey, report, os.environ)


LAYER = Layer("surroundings", run, full_share=0.5, quick_share=0.02)
