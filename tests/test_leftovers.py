"""What is easily forgotten: leftovers beside payloads, refusals kept back, ancestors gone bad."""

import errno
from collections.abc import Generator
from pathlib import Path

import pytest
from cache_maker import (
    CacheMaker,
    Failing,
    boundary,
    core_of,
    files_of,
    key_of,
    locate,
    made_caches,
    outcome,
    put,
    settle,
    store_chain,
    store_one,
)

from walkback.journal.events import NotStored as NotStoredEvent
from walkback.journal.words import Kind, NotStoredReason
from walkback.store import core as core_module
from walkback.store.boundary import NotStored


@pytest.fixture
def caches(tmp_path: Path) -> Generator[CacheMaker]:
    with made_caches(tmp_path) as maker:
        yield maker


def test_what_a_request_computed_from_a_bad_sidecar_is_not_stored(caches: CacheMaker) -> None:
    store = caches.open()
    store_chain(store, "a", 2)
    found = locate(store, Kind.SIDECAR, key_of("a", 1))
    assert found is not None
    store.operator.report_bad(Kind.SIDECAR, key_of("a", 1), "it loops")

    refusal = store.claim(
        boundary("a", 2), request=1, producer="a test", restored_from=found.sequence
    )

    assert isinstance(refusal, NotStored)
    assert refusal.reason is NotStoredReason.PARENT


def test_refusals_that_were_kept_back_are_told_at_the_close(caches: CacheMaker) -> None:
    store = caches.open()
    refusal = NotStored(NotStoredReason.OFF_GRID, "for the test")
    for _ in range(7):
        store.refuse(refusal, request=1, key=b"", position=3)
    records: list[NotStoredEvent] = []

    store.close()
    again = caches.open()
    for record in core_of(again).log.read(1):
        if isinstance(record.event, NotStoredEvent):
            records.append(record.event)

    assert sum(event.repeats for event in records) == 7
    assert len(records) < 7


def test_a_pin_says_whether_there_was_something_to_pin(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))

    assert store.operator.pin(key_of("a", 0))
    assert not store.operator.pin(key_of("a", 7))
    store.operator.unpin(key_of("a", 0))


def test_an_unclean_opening_removes_what_quarantine_and_archive_forgot(
    caches: CacheMaker,
) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    root = store.files.root
    (root / "quarantine" / "block-00000001-000000ff").write_bytes(b"forgotten")
    (root / "archive" / f"{1:016x}").write_bytes(b"forgotten")
    kept = root / "quarantine" / "notes.txt"
    kept.write_bytes(b"somebody's")

    again = caches.after_a_crash(store)

    names = {path.name for path in (again.files.root / "quarantine").iterdir()}
    assert names == {"notes.txt"}
    assert list((again.files.root / "archive").iterdir()) == []
    (again.files.root / "quarantine" / "notes.txt").unlink()
    for path in (kept, root / "archive" / f"{1:016x}"):
        path.unlink()
    (root / "quarantine" / "block-00000001-000000ff").unlink()


def test_a_disk_that_stays_full_does_not_fill_the_memory(
    caches: CacheMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "RIDING_MAX", 8)
    store = caches.open()
    settle(store)
    files_of(store).hook = Failing("write", errno.ENOSPC)

    for index in range(20):
        refusal = outcome(put(store, boundary(f"c{index}", 0)))
        assert refusal is not None
        assert refusal.reason is NotStoredReason.DISK_FULL

    with core_of(store).lock:
        assert len(core_of(store).overlay.riding) <= 8
    files_of(store).hook = None
