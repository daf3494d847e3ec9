"""What is easily forgotten: leftovers beside payloads, refusals kept back, ancestors gone bad."""

import dataclasses
import errno
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
from cache_maker import (
    NAMESPACE,
    SETTINGS,
    CacheMaker,
    Failing,
    boundary,
    claimed,
    core_of,
    files_of,
    is_readable,
    key_of,
    locate,
    made_caches,
    outcome,
    put,
    settle,
    store_chain,
    store_one,
    tensors_for,
    wait_until,
)

from walkback.journal.codec import encode
from walkback.journal.errors import FormatError, RootRefusedError, SettingsError
from walkback.journal.events import NotStored as NotStoredEvent
from walkback.journal.events import Record, SettingSet
from walkback.journal.words import Kind, NotStoredReason
from walkback.store import core as core_module
from walkback.store.boundary import NotStored
from walkback.store.core import Mode
from walkback.store.deletion import MutableJanitor
from walkback.store.ordering import stage_claim
from walkback.store.settings import StoreSettings


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


def test_what_resumed_from_below_a_bad_entry_is_not_stored_either(caches: CacheMaker) -> None:
    store = caches.open()
    store_chain(store, "a", 3)
    below = locate(store, Kind.SIDECAR, key_of("a", 2))
    assert below is not None
    store.operator.report_bad(Kind.SIDECAR, key_of("a", 0), "it loops")
    store_chain(store, "a", 3)

    refusal = store.claim(
        boundary("a", 3), request=1, producer="a test", restored_from=below.sequence
    )

    assert isinstance(refusal, NotStored)


@pytest.mark.parametrize("folder", ["journal", "backup", "blocks", "staging", "archive"])
def test_what_a_file_browser_leaves_disturbs_nobody(caches: CacheMaker, folder: str) -> None:
    store = caches.open()
    paths = [store.files.root / folder / name for name in (".DS_Store", "Icon\r", "My notes.txt")]
    for path in paths:
        path.write_bytes(b"x")

    store_one(store, boundary("a", 0))
    store = caches.reopen(store)
    store_one(store, boundary("a", 1))

    assert store.mode is Mode.WRITING
    for path in paths:
        path.unlink()


def test_an_interrupt_while_writing_for_others_leaves_nobody_waiting(caches: CacheMaker) -> None:
    store = caches.open()
    claim = claimed(store, boundary("a", 0))
    store.reserve(claim)
    core = core_of(store)
    with core.lock:
        for writing, tensors in zip(claim.writings, tensors_for(claim), strict=True):
            writing.tensors, writing.is_handed_over = tensors, True
        claim.is_put = True
        core.staging_now += 1

    def interrupted(step: str, name: str) -> None:
        if step == "write":
            raise KeyboardInterrupt

    files_of(store).hook = interrupted
    with pytest.raises(KeyboardInterrupt):
        stage_claim(core, claim)
    files_of(store).hook = None

    refusal = outcome(claim)
    assert refusal is not None
    assert refusal.reason is NotStoredReason.ABORTED
    with core.lock:
        assert (core.staging_now, core.staging_bytes, core.overlay.reserved_bytes) == (0, 0, 0)


def test_a_full_disk_in_the_compactor_is_not_the_end_of_writing(caches: CacheMaker) -> None:
    settings = dataclasses.replace(SETTINGS, compact_every_events=8, journal_events_kept=4)
    store = caches.open(settings)
    files_of(store).hook = Failing("create", errno.ENOSPC, path="archive")
    store_chain(store, "a", 6)
    files_of(store).hook = Failing("write", errno.ENOSPC, path="backup")
    store_chain(store, "b", 6)
    files_of(store).hook = None

    assert store.mode is Mode.WRITING
    store_chain(store, "c", 2)


def test_a_journal_made_anew_leaves_the_archive_of_the_old_one(caches: CacheMaker) -> None:
    settings = dataclasses.replace(SETTINGS, compact_every_events=8, journal_events_kept=4)
    store = caches.open(settings)
    store_chain(store, "a", 8)
    store.close()
    root = store.files.root
    sealed = {path.name: path.read_bytes() for path in (root / "archive").iterdir()}
    assert sealed
    shutil.rmtree(root / "journal")
    shutil.rmtree(root / "backup")

    caches.open(settings)

    kept = {path.name: path.read_bytes() for path in (root / "archive.bad").iterdir()}
    assert kept == sealed


def test_an_event_that_could_not_be_read_again_is_not_written() -> None:
    event = SettingSet(name="budget_bytes", value=cast(int, 1e9))
    record = Record(sequence=1, wall_ns=0, epoch=1, event=event)

    with pytest.raises(TypeError, match="not int"):
        encode(record)


@pytest.mark.parametrize("name", ["budget_bytes", "free_floor_bytes", "staging_bytes"])
@pytest.mark.parametrize("value", [1e9, "1G", True, 1 << 80, float("nan")])
def test_a_size_that_is_no_number_of_bytes_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=name):
        StoreSettings(**{name: value})


def test_a_janitor_that_dies_is_told_of(
    caches: CacheMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))

    def broken(self: MutableJanitor) -> int:
        raise RuntimeError("broken for the test")

    monkeypatch.setattr(MutableJanitor, "run_once", broken)
    store.operator.purge(NAMESPACE)
    wait_until(lambda: store.mode is Mode.READING, "the janitor's death was not told")
    monkeypatch.undo()


def test_history_takes_its_share_of_the_budget_and_no_more(caches: CacheMaker) -> None:
    settings = dataclasses.replace(
        SETTINGS, budget_bytes=1 << 20, compact_every_events=8, journal_events_kept=4
    )
    store = caches.open(settings)
    for index in range(60):
        refusal = outcome(put(store, boundary(f"c{index}", 0)))
        assert refusal is None, refusal
    settle(store)

    with core_of(store).lock:
        segments = core_of(store).state.segments.values()
        taken = sum(each.allocated_bytes for each in segments)
    assert 0 < taken <= (1 << 20) // 16 + 2 * 4096
    names = {path.name for path in (store.files.root / "archive").iterdir()}
    assert names == {each.path.rpartition("/")[2] for each in segments}


@pytest.mark.parametrize("place", range(0, 60, 7))
def test_a_damaged_store_file_is_refused_and_nothing_is_touched(
    caches: CacheMaker, place: int
) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    store.close()
    path = store.files.root / "STORE"
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1
    path.write_bytes(damaged)

    with pytest.raises((RootRefusedError, FormatError)):
        caches.open()

    path.write_bytes(whole)
    assert is_readable(caches.open(), "a", 0)


@pytest.mark.parametrize("how", ["truncated", "zeroed"])
def test_a_journal_that_was_damaged_at_rest_does_not_kill_its_opener(
    caches: CacheMaker, how: str
) -> None:
    store = caches.open()
    store_chain(store, "a", 8)
    store.close()
    path = store.files.root / "journal" / "data.mdb"
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(content[:8192] + bytes(len(content) - 8192))

    again = caches.open()

    assert all(is_readable(again, "a", index) for index in range(8))
