"""The interposer, the model of pages, and the layers that stand on them."""

import errno
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crash.disk import SECTOR_BYTES
from crash.failed_sync import NO_FAULT, faults_in, told_with_faults
from crash.interposer import Interposer, Kind, When, preloaded_environment, unavailable
from crash.lives import scratch_directory
from crash.losses import lost_power
from crash.pages import PAGE_BYTES, File, PageDisk
from crash.trace import Call, calls_of
from crash.tracing import Told, require_that_all_was_seen, run_with_interposer

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return preloaded_environment(tmp_path_factory.mktemp("interposer"))


# Five calls: create, write, write, sync, unlink. What happened is said at the end.
PROGRAM = """
import json, os, sys
from pathlib import Path
from crash.interposer import *

root, orders = Path(sys.argv[1]), sys.argv[2]
interposer = Interposer()
interposer.watch(root)
interposer.start_trace()
exec(orders)
said = []
descriptor = os.open(root / "file", os.O_CREAT | os.O_RDWR)
for call in (
    lambda: os.write(descriptor, b"abcd"),
    lambda: os.pwritev(descriptor, [b"ef", b"gh"], 4),
    lambda: os.fsync(descriptor),
    lambda: os.unlink(root / "file"),
):
    try:
        said.append(call())
    except OSError as error:
        said.append(-error.errno)
print(json.dumps([said, interposer.calls, interposer.fired, len(interposer.take_trace())]))
"""


def run(environment: dict[str, str], root: Path, orders: str) -> tuple[int, list[object]]:
    """The program's exit status, and what it said."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), orders],
        env=environment,
        stdout=subprocess.PIPE,
        check=False,
    )
    return done.returncode, json.loads(done.stdout or "[]")


def test_an_interposer_is_only_in_a_process_that_was_started_with_it() -> None:
    with pytest.raises(RuntimeError):
        Interposer()


@pytest.mark.parametrize(
    ("orders", "said", "fired"),
    [
        ("", [4, 4, None, None], 0),
        ("interposer.fail_at(2, 28)", [-errno.ENOSPC, 4, None, None], 1),
        ("interposer.fail_at(2, 5, kind=Kind.WRITE)", [4, -errno.EIO, None, None], 1),
        ("interposer.fail_at(2, 5, is_sticky=True)", [-5, -5, -5, -5], 4),
        ("interposer.fail_at(1, 5, kind=SYNCS)", [4, 4, -5, None], 1),
        ("interposer.fail_at(2, 0, is_short=True)", [4, 2, None, None], 1),
        ("interposer.fail_at(9, 5)", [4, 4, None, None], 0),
        ("interposer.fail_at(1, 5); interposer.reset()", [4, 4, None, None], 0),
    ],
)
def test_a_call_fails_as_it_was_ordered(
    orders: str, said: list[object], fired: int, environment: dict[str, str], tmp_path: Path
) -> None:
    status, (found, calls, found_fired, trace_bytes) = run(environment, tmp_path, orders)

    assert (status, found, calls, found_fired) == (0, said, 5, fired)
    assert isinstance(trace_bytes, int) and trace_bytes > 0


def test_a_call_that_fails_late_has_had_its_effect(
    environment: dict[str, str], tmp_path: Path
) -> None:
    _, (said, *_) = run(environment, tmp_path, "interposer.fail_at(5, 5, is_late=True)")

    assert said == [4, 4, None, -errno.EIO]
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("number", "when", "left"),
    [
        (1, When.BEFORE, None),
        (1, When.AFTER, b""),
        (2, When.BEFORE, b""),
        (3, When.MIDDLE, b"abcdef"),
        (3, When.AFTER, b"abcdefgh"),
        (5, When.BEFORE, b"abcdefgh"),
        (5, When.MIDDLE, None),
    ],
)
def test_a_process_dies_at_the_call_that_was_ordered(
    number: int, when: When, left: bytes | None, environment: dict[str, str], tmp_path: Path
) -> None:
    status, _ = run(environment, tmp_path, f"interposer.kill_at({number}, When({int(when)}))")

    path = tmp_path / "file"
    assert status == -9
    assert (path.read_bytes() if path.exists() else None) == left


def test_what_is_not_below_the_root_is_not_seen(
    environment: dict[str, str], tmp_path: Path
) -> None:
    for name in ("watched", "watched.not"):
        (tmp_path / name).mkdir()
    orders = "interposer.watch(root.parent / 'watched'); interposer.fail_at(1, 5)"

    _, (said, calls, *_) = run(environment, tmp_path / "watched.not", orders)

    assert (said, calls) == ([4, 4, None, None], 0)


def test_kinds_are_the_same_in_both_languages() -> None:
    source = Path(__file__).with_name("crash").joinpath("interposer.c").read_text()

    for kind in Kind:
        assert f"{kind.name} = 1 << {kind.value.bit_length() - 1}," in source


# What is traced.


def traced(environment: dict[str, str], root: Path, program: str) -> tuple[PageDisk, list[Call]]:
    """The calls of a program below ``root``, and the model of the disk after them."""
    before = PageDisk.of(root)
    text = f"""
import os, sys
from pathlib import Path
from crash.interposer import *
import lmdb

root, interposer = Path({str(root)!r}), Interposer()
interposer.watch(root)
interposer.start_trace()
{program}
sys.stdout.buffer.write(interposer.take_trace())
"""
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, stdout=subprocess.PIPE, check=True
    )
    calls = list(calls_of(done.stdout))
    for call in calls:
        before.apply(call)
    return before, calls


CHANGES = """
os.mkdir(root / "folder")
descriptor = os.open("old", os.O_RDWR | os.O_CREAT, dir_fd=os.open(root, os.O_RDONLY))
os.truncate(root / "grown", 9000)
os.ftruncate(descriptor, 6000)
os.pwritev(descriptor, [b"a" * 3000, b"b" * 3000], 5000)
os.posix_fallocate(descriptor, 0, 20000)
os.ftruncate(descriptor, 10001)
os.ftruncate(descriptor, 12000)
os.rename(root / "old", root / "folder" / "new")
os.write(os.dup(descriptor), b"written behind its name")
os.link(root / "grown", root / "linked")
os.unlink(root / "grown")
(root / "folder" / "emptied").write_bytes(b"first")
(root / "folder" / "emptied").write_text("second")
os.mkdir(root / "folder" / "gone")
os.rmdir(root / "folder" / "gone")
with lmdb.open(str(root / "lmdb"), map_size=1 << 20, lock=False) as env:
    for number in range(20):
        with env.begin(write=True) as transaction:
            transaction.put(b"%d" % number, bytes(999))
"""


def test_the_model_after_a_trace_is_the_disk(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "grown").write_bytes(b"x" * 5000)

    disk, calls = traced(environment, tmp_path, CHANGES)

    require_that_all_was_seen(disk, tmp_path)
    assert len(calls) > 70 and any(call.is_durable for call in calls)
    (tmp_path / "folder" / "emptied").write_text("changed by nobody")
    with pytest.raises(AssertionError, match="folder/emptied"):
        require_that_all_was_seen(disk, tmp_path)


def test_a_history_that_is_told_again_leaves_the_same_trace(environment: dict[str, str]) -> None:
    with scratch_directory() as scratch:
        first, second = run_with_interposer(
            environment, "", told_with_faults, scratch, [NO_FAULT, NO_FAULT]
        )

    assert isinstance(first, Told) and isinstance(second, Told)
    calls, again = (
        [replace(call, inode=0) for call in calls_of(told.trace)] for told in (first, second)
    )
    assert calls == again
    faults = [str(fault) for fault in faults_in(calls)]
    assert len(faults) == len(set(faults)) > 150 and "sync 1 failed" in faults


# What a power loss may leave. One file, whose number is 1, in the root.

LETTERS = (b"a", b"b", b"c")
SECTORS = range(0, PAGE_BYTES, SECTOR_BYTES)


def disk_with_a_file(content: bytes) -> PageDisk:
    return PageDisk(
        files={1: File().written(0, 0, content).synced()},
        folders={0: {"file": 1}},
        seen={0: {"file": 1}},
        bound={7: 1},
        count=1,
    )


def step(disk: PageDisk, kind: Kind, path: str = "file", **other: Any) -> None:
    fields: dict[str, Any] = {
        "other_path": "",
        "inode": 7,
        "offset": 0,
        "content": b"",
        "is_durable": False,
        "error": 0,
    }
    disk.apply(Call(kind=kind, path=path, **{**fields, **other}))


def left(disk: PageDisk) -> set[tuple[tuple[str, bytes], ...]]:
    """What all disks that a power loss may leave hold, each page as its first byte."""
    images = lost_power(disk, random.Random(1), random_count=10)
    return {
        tuple((path, bytes(content)[::PAGE_BYTES]) for path, _, content in image.files)
        for image in images
    }


def page(letter: bytes) -> bytes:
    return letter * PAGE_BYTES


def test_a_page_has_one_of_its_versions_and_pages_are_independent() -> None:
    disk = disk_with_a_file(page(b"a") * 2)
    step(disk, Kind.WRITE, content=page(b"b") * 2)
    step(disk, Kind.WRITE, content=page(b"c"))

    assert left(disk) == {
        (("file", first + second),) for first in LETTERS for second in LETTERS[:2]
    }


def test_a_size_may_be_there_without_its_data_and_data_without_its_size() -> None:
    disk = disk_with_a_file(page(b"a"))
    step(disk, Kind.WRITE, content=page(b"b"), offset=PAGE_BYTES)

    assert left(disk) == {(("file", each),) for each in (b"a", b"a\0", b"ab")}


def test_a_page_is_torn_between_two_versions_at_a_sector() -> None:
    disk = disk_with_a_file(page(b"a"))
    step(disk, Kind.WRITE, content=page(b"b"))

    images = lost_power(disk, random.Random(1), random_count=0)
    torn = [bytes(each.files[0][2]) for each in images if each.label.startswith("torn")]

    assert len(torn) == 2
    for content in torn:
        assert set(content[::SECTOR_BYTES]) == {*b"ab"}
        assert all(len(set(content[at : at + SECTOR_BYTES])) == 1 for at in SECTORS)


def test_a_durable_write_forces_its_own_bytes_only() -> None:
    disk = disk_with_a_file(page(b"a") * 2)
    step(disk, Kind.WRITE, content=page(b"b"), offset=PAGE_BYTES)
    step(disk, Kind.WRITE, content=b"c", is_durable=True)

    assert left(disk) == {(("file", b"ca"),), (("file", b"cb"),)}


@pytest.mark.parametrize("kind", [Kind.SYNC, Kind.SYNC_DATA])
def test_a_sync_leaves_nothing_to_lose(kind: Kind) -> None:
    disk = disk_with_a_file(page(b"a"))
    step(disk, Kind.WRITE, content=page(b"b") * 2)
    step(disk, kind)

    assert left(disk) == {(("file", b"bb"),)}


def test_after_a_failed_sync_another_one_only_helps_what_was_written_again() -> None:
    disk = disk_with_a_file(page(b"a") * 2)
    step(disk, Kind.WRITE, content=page(b"b") * 2)
    step(disk, Kind.SYNC, error=errno.EIO)
    step(disk, Kind.SYNC)
    assert left(disk) == {(("file", each),) for each in (b"aa", b"ab", b"ba", b"bb")}

    step(disk, Kind.WRITE, content=page(b"b"))
    step(disk, Kind.SYNC)

    assert left(disk) == {(("file", b"ba"),), (("file", b"bb"),)}


def test_a_durable_write_that_failed_may_be_there_until_it_is_overruled() -> None:
    disk = disk_with_a_file(page(b"a"))
    step(disk, Kind.WRITE, content=b"b", is_durable=True, error=errno.EIO)
    step(disk, Kind.SYNC)
    assert left(disk) == {(("file", b"a"),), (("file", b"b"),)}

    step(disk, Kind.WRITE, content=b"a")
    assert left(disk) == {(("file", b"a"),), (("file", b"b"),)}

    step(disk, Kind.SYNC)
    assert left(disk) == {(("file", b"a"),)}


def test_entries_are_lost_one_by_one_but_a_rename_in_a_directory_is_one() -> None:
    disk = disk_with_a_file(b"a")
    step(disk, Kind.MAKE_DIRECTORY, "folder", inode=8)
    step(disk, Kind.SYNC_DIRECTORY, "", inode=9)
    step(disk, Kind.RENAME, "file", other_path="renamed")
    assert left(disk) == {(("file", b"a"),), (("renamed", b"a"),)}

    step(disk, Kind.SYNC_DIRECTORY, "", inode=9)
    step(disk, Kind.RENAME, "renamed", other_path="folder/moved")

    here, there = ("renamed", b"a"), ("folder/moved", b"a")
    assert left(disk) == {(), (here,), (there,), (there, here)}
