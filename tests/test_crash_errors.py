"""What the layer ``errors`` stands on, and what it has found. ``test_crash.py`` runs a share."""

import contextlib
import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crash.errors import problem_of
from crash.faults import FailingFiles, Fault, TroubleAtTheSeam, faults_of, short_writes
from crash.lives import open_store, scratch_directory, steady
from crash.recording import ActingFiles
from crash.scenes import SCENES, Base, MutableActs, Scene, make_bases
from crash.world import SETTINGS, World, boundary, key, pair, put, require_sound

from walkback.journal import compactor, environment
from walkback.journal.errors import NotRecordedError
from walkback.journal.events import SegmentSealed
from walkback.journal.files import FileStatus, Transaction
from walkback.journal.words import Kind, NotStoredReason
from walkback.store.boundary import Boundary, Claim, NotStored
from walkback.store.core import Mode
from walkback.store.deletion import MutableJanitor
from walkback.store.store import MutableStore


def met(trouble: TroubleAtTheSeam, *calls: str) -> list[int]:
    """The errno that each call meets, 0 for none."""
    codes: list[int] = []
    for call in calls:
        try:
            trouble.meet(call)
            codes.append(0)
        except OSError as error:
            codes.append(error.errno or -1)
    return codes


def test_one_call_fails_once() -> None:
    trouble = TroubleAtTheSeam(Fault("create", 2, "ENOSPC"))

    assert met(trouble, "create", "write", "create", "create") == [0, 0, errno.ENOSPC, 0]
    assert trouble.has_fired


def test_a_full_disk_takes_nothing_and_gives_up_what_it_has() -> None:
    trouble = TroubleAtTheSeam(Fault("write", 1, "ENOSPC", is_sticky=True))

    codes = met(trouble, "create", "write", "create", "unlink", "read")
    trouble.lift()

    assert codes == [0, errno.ENOSPC, errno.ENOSPC, 0, 0]
    assert met(trouble, "write") == [0]


def test_every_call_meets_every_error() -> None:
    faults = faults_of(Counter(create=2))

    assert {fault.number for fault in faults} == {1, 2}
    assert {fault.code for fault in faults} >= {"ENOSPC", "EIO", "EINTR", "EMFILE"}


@pytest.mark.parametrize("call", ["short", "half"])
def test_a_write_falls_short(call: str, tmp_path: Path) -> None:
    trouble = TroubleAtTheSeam(Fault(call, 1, "ENOSPC"))
    files = FailingFiles(tmp_path, trouble)
    descriptor = files.create("file")

    with (
        short_writes(trouble),
        contextlib.suppress(OSError) if call == "half" else contextlib.nullcontext(),
    ):
        files.write(descriptor, [b"abc", b"def"], 0)
    files.close_file(descriptor)

    assert (tmp_path / "file").read_bytes() == (b"abc" if call == "half" else b"abcdef")


class Over(TroubleAtTheSeam):
    """Trouble that is over before it began, so that all is looked at."""

    @property
    def lasts(self) -> bool:
        return False


def problem(tell: Callable[[MutableActs], None], scratch: Path) -> str | None:
    scene = Scene("in a test", "none", tell)
    with steady():
        return problem_of(scene, Base(scratch / "none", World()), scratch, Over(None))


def store(acts: MutableActs) -> None:
    acts.put("a1", pair("a1"), depth=1)


def test_nothing_is_wrong_with_a_sound_store(tmp_path: Path) -> None:
    assert problem(store, tmp_path) is None


def test_a_thread_that_died_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(janitor: MutableJanitor) -> None:
        raise ValueError

    monkeypatch.setattr(MutableJanitor, "_loop", die)

    assert "a thread is dead" in str(problem(store, tmp_path))


def test_a_file_that_was_left_open_is_noticed(tmp_path: Path) -> None:
    left: list[int] = []

    found = problem(lambda acts: left.append(acts.store.files.open("STORE")), tmp_path)
    os.close(left[0])

    assert "left open" in str(found)


def test_an_error_that_escapes_is_noticed(tmp_path: Path) -> None:
    assert "is missing" in str(problem(lambda acts: _raise(OSError("is missing")), tmp_path))


def test_what_was_acknowledged_and_cannot_be_read_is_noticed(tmp_path: Path) -> None:
    def forget(acts: MutableActs) -> None:
        store(acts)
        acts.store.operator.report_bad(Kind.BLOCK, key("a1"), "behind the back of the acts")

    assert "not to be read" in str(problem(forget, tmp_path))


def test_a_store_that_refuses_for_no_reason_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim(store: MutableStore, boundary: Boundary, **_: object) -> NotStored:
        return NotStored(NotStoredReason.FAILED, "in a test")

    monkeypatch.setattr(MutableStore, "claim", claim)

    assert "in a test" in str(problem(store, tmp_path))


def test_memory_that_is_held_is_noticed(tmp_path: Path) -> None:
    def hold(acts: MutableActs) -> None:
        claim = acts.store.claim(boundary("a1", pair("a1"), depth=1), request=1, producer="test")
        assert isinstance(claim, Claim)
        acts.store.reserve(claim)

    assert "399 bytes of memory are held" in str(problem(hold, tmp_path))


@pytest.mark.parametrize("pages", [8, 12, 16])
def test_a_map_that_is_full_grows(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_MAP_BYTES", 4096 * pages)

    with steady(), scratch_directory() as scratch:
        bases = make_bases(scratch)
        for scene in SCENES:
            trouble = Over(None)
            assert problem_of(scene, bases[scene.base], scratch, trouble) is None


# What it has found.


class Refusing(ActingFiles):
    """Refuses some calls, or does so from the next commit on."""

    refused_calls: frozenset[str] = frozenset()
    refused_after_commit: frozenset[str] = frozenset()

    def _meet(self, call: str) -> None:
        if call in self.refused_calls:
            raise OSError(errno.EIO, call)

    def close_file(self, descriptor: int) -> None:
        super().close_file(descriptor)
        self._meet("close_file")

    def status(self, name: str) -> FileStatus | None:
        self._meet(f"status {name}")
        return super().status(name)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._meet(f"read {self.path_of(descriptor)}")
        return super().read(descriptor, buffers, offset)

    def commit(self, transaction: Transaction) -> None:
        is_refused = "commit" in self.refused_calls
        self.refused_calls |= self.refused_after_commit
        if is_refused:
            raise OSError(errno.EIO, "commit")
        super().commit(transaction)


def refusing(*calls: str) -> type[Refusing]:
    return type("Refusing", (Refusing,), {"refused_calls": frozenset(calls)})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_store(tmp_path / "cache") as store:
        put(store, boundary("a1", pair("a1"), depth=1), pair("a1"))
    return tmp_path / "cache"


@pytest.mark.parametrize("call", ["close_file", "status journal/data.mdb"])
def test_a_close_lets_go_of_the_lock_whatever_the_disk_says(call: str, root: Path) -> None:
    """The error escaped from ``close``, in the first case before the root was closed."""
    store = open_store(root, Refusing)
    assert isinstance(store.files, Refusing)
    store.files.refused_after_commit = frozenset([call])

    store.close()

    with open_store(root) as again:
        require_sound(again, root, [World(pair("a1"))])


def test_an_opening_that_cannot_read_head_closes_it(root: Path) -> None:
    before = len(list(Path("/dev/fd").iterdir()))

    with pytest.raises(OSError, match="read HEAD"):
        open_store(root, refusing("read HEAD"))

    assert len(list(Path("/dev/fd").iterdir())) == before


def test_a_segment_whose_commit_failed_is_removed_at_the_close(root: Path) -> None:
    """It stayed, named by no event, and after a clean close nobody swept it."""
    settings = replace(SETTINGS, compact_every_events=3, journal_events_kept=2)
    with open_store(root, Refusing, settings) as store:
        files = store.files
        assert isinstance(files, Refusing)
        seal = compactor.seal_segment

        def seal_and_refuse(*arguments: Any, **named: Any) -> SegmentSealed:
            files.refused_calls = frozenset(["commit"])
            return seal(*arguments, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compactor, "seal_segment", seal_and_refuse)
            put(store, boundary("c1", pair("c1"), depth=1), pair("c1"))
            store.flush()
        assert list((root / "archive").iterdir())
        files.refused_calls = frozenset()

    assert not list((root / "archive").iterdir())


def test_nothing_is_committed_after_a_commit_in_doubt(root: Path) -> None:
    """The next commit of the same round was tried all the same, and the journal thread died."""
    with open_store(root, Refusing) as store:
        files = store.files
        assert isinstance(files, Refusing)
        refusal = NotStored(NotStoredReason.FAILED, "in a test")
        store.refuse(refusal, request=1, key=key("a1"), position=4)
        files.refused_calls = frozenset(["commit"])
        # So the journal cannot be reopened to see whether the commit stands.
        files.refused_after_commit = frozenset(["status journal/data.mdb"])

        with pytest.raises(NotRecordedError):
            store.operator.purge(key("ns"))

        assert store.mode is Mode.READING
        assert "walkback-journal" in [thread.name for thread in threading.enumerate()]
        files.refused_calls = files.refused_after_commit = frozenset()

    with open_store(root) as again:
        require_sound(again, root, [World(pair("a1"))])


def _raise(error: Exception) -> None:
    raise error
