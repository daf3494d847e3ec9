"""What the layer ``kill`` stands on. ``test_crash.py`` runs a share of it."""

import os
from functools import partial
from pathlib import Path

import pytest
from crash.interposer import When
from crash.killing import Killed, judge
from crash.layer import Effort, MutableReport
from crash.lives import open_store, steady
from crash.processes import Ending, ending_of
from crash.weapons import AtTheSeam, Death, deaths_of
from crash.world import World, boundary, pair, put

KILLED = Ending(-9, b"..")


def test_a_write_has_three_deaths_and_a_sync_has_none() -> None:
    assert deaths_of(["create a", "sync a", "write a"]) == [
        (1, When.BEFORE),
        (1, When.AFTER),
        (3, When.BEFORE),
        (3, When.AFTER),
        (3, When.MIDDLE),
    ]


@pytest.mark.parametrize(
    ("when", "left"), [(When.BEFORE, b""), (When.MIDDLE, b"ab"), (When.AFTER, b"abcd")]
)
def test_a_process_dies_at_the_step_that_was_aimed_at(
    when: When, left: bytes, tmp_path: Path
) -> None:
    ending = ending_of(partial(_write_and_unlink, tmp_path, Death(2, when)))

    assert ending.was_killed
    assert (tmp_path / "file").read_bytes() == left


def _write_and_unlink(root: Path, death: Death) -> None:
    weapon = AtTheSeam()
    weapon.aim(root, death)
    files = weapon.make_files(root)
    descriptor = files.create("file")
    files.write(descriptor, [b"abc", b"d"], 0)
    files.unlink("file")


def test_a_call_that_fails_is_survived_by_nobody_who_was_to_die_after_it(tmp_path: Path) -> None:
    def unlink() -> None:
        weapon = AtTheSeam()
        weapon.aim(tmp_path, Death(1, When.AFTER))
        weapon.make_files(tmp_path).unlink("missing")

    assert ending_of(unlink).was_killed


def test_a_forked_process_says_what_went_wrong_in_it() -> None:
    ending = ending_of(lambda: os.fsencode(1))  # pyright: ignore[reportArgumentType]

    assert ending.problem is not None and ending.problem.startswith("TypeError")


def test_a_world_that_was_not_announced_is_a_failure(tmp_path: Path) -> None:
    world, root = World(pair("a1")), tmp_path / "cache"
    with steady():
        with open_store(root) as store:
            put(store, boundary("a1", pair("a1"), depth=1), pair("a1"))
        right = _judged(root, (World(), world), KILLED)
        wrong = _judged(root, (World(), World(pair("a1", 2))), KILLED)

    assert right.failures == [] and len(right.states) == 1
    assert len(wrong.failures) == 1 and "a1 block 1" in wrong.failures[0]


def test_only_a_process_that_was_killed_is_a_state(tmp_path: Path) -> None:
    lived = _judged(tmp_path, (World(),), Ending(0, b"."))
    failed = _judged(tmp_path, (World(),), Ending(1, b".AssertionError: no"))

    assert not lived.states and not lived.failures
    assert not failed.states and "AssertionError: no" in failed.failures[0]


def _judged(root: Path, legal: tuple[World, ...], ending: Ending) -> MutableReport:
    report = MutableReport("kill", Effort())
    judge(report, b"state", Killed((), "in a test", root, legal), ending)
    return report
