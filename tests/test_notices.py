"""What a person is told of a disk that takes nothing, and how often."""

import errno
from collections.abc import Generator
from pathlib import Path

import pytest
from cache_maker import CacheMaker, Failing, boundary, files_of, made_caches, outcome, put

from walkback.journal.words import NotStoredReason
from walkback.store.boundary import NotStored
from walkback.store.notices import TELL_AGAIN_SECONDS, MutableNotices

FULL = NotStored(NotStoredReason.DISK_FULL, "No space left on device")


@pytest.fixture
def caches(tmp_path: Path) -> Generator[CacheMaker]:
    with made_caches(tmp_path) as maker:
        yield maker


def test_a_full_disk_is_told_once_and_so_is_its_end(
    caches: CacheMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "walkback")
    store = caches.open()
    files_of(store).hook = Failing("write", errno.ENOSPC, path="staging")
    for index in range(5):
        assert outcome(put(store, boundary(f"chain {index}", 0))) is not None
    told = caplog.text.count("the disk is full; requests are served all the same")
    files_of(store).hook = None
    for index in range(2):
        assert outcome(put(store, boundary(f"chain {index}", 0))) is None
    store.flush()

    assert told == 1
    assert caplog.text.count("the disk is full") == 1
    assert caplog.text.count("storing goes on (it had stopped: disk_full)") == 1


def test_a_cache_that_writes_no_more_says_so_once(
    caches: CacheMaker, caplog: pytest.LogCaptureFixture
) -> None:
    store = caches.open()
    files_of(store).hook = Failing("sync", errno.EIO, path="staging")

    assert outcome(put(store, boundary("a", 0))) is not None
    files_of(store).hook = None
    for index in range(3):
        refusal = store.claim(boundary("b", index), request=1, producer="a test")
        assert isinstance(refusal, NotStored)

    assert caplog.text.count("nothing is stored any more until the cache is reopened") == 1
    assert "storing goes on" not in caplog.text


def test_what_comes_and_goes_is_not_told_each_time() -> None:
    notices = MutableNotices()
    told = [notices.refused(FULL, now) is not None for now in (0.0, 1.0)]
    over = [notices.stored() is not None for _ in range(2)]
    soon = notices.refused(FULL, TELL_AGAIN_SECONDS - 1)
    late = notices.refused(FULL, TELL_AGAIN_SECONDS)

    assert (told, over) == ([True, False], [True, False])
    assert soon is None and late is not None


def test_what_nobody_can_do_anything_about_is_not_told() -> None:
    refusal = NotStored(NotStoredReason.PARENT, "the block before it is not stored")

    assert MutableNotices().refused(refusal, 0.0) is None
