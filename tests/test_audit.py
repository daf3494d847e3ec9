"""The audit: it sees what is wrong, and changes nothing."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from quiet_caches import (
    NAMESPACE,
    SETTINGS,
    crashed_copy,
    image_of,
    key_of,
    make_cache,
    open_store,
    remove_event,
    store_boundary,
)

from walkback.journal.errors import CacheLockedError, RootRefusedError
from walkback.journal.events import Record
from walkback.store.audit import Audit, Gap
from walkback.store.findings import Area, Finding, findings, notes, payload_findings
from walkback.store.settings import StoreSettings

# Small enough that a few boundaries fill sealed segments.
COMPACTED = StoreSettings(
    budget_bytes=64 << 20, free_floor_bytes=0, compact_every_events=8, journal_events_kept=8
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "cache")


@pytest.fixture
def archived(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "cache", boundary_count=12, settings=COMPACTED)


def findings_of(root: Path) -> list[Finding]:
    with Audit.open_verified(root) as audit:
        return [*findings(audit), *payload_findings(audit)]


def notes_of(root: Path) -> list[str]:
    with Audit.open_verified(root) as audit:
        return list(notes(audit))


def history_of(root: Path) -> list[Record | Gap]:
    with Audit.open(root) as audit:
        return list(audit.records())


def sequences_of(history: list[Record | Gap]) -> list[int]:
    return [each.sequence for each in history if isinstance(each, Record)]


def from_another_boot(root: Path) -> None:
    """Make the last opener one of another boot, that did not close the cache."""
    owner = json.loads((root / "OWNER").read_bytes())
    (root / "OWNER").write_text(json.dumps(owner | {"boot_id": "another"}))
    (root / "journal" / "data.mdb").touch()


def look_at_everything(root: Path) -> None:
    with Audit.open_verified(root) as audit:
        list(findings(audit))
        list(payload_findings(audit))
        list(notes(audit))
        list(audit.records())
    with Audit.open(root) as audit:
        list(findings(audit))


# It only looks.


def test_a_cache_that_was_closed_is_clean(root: Path) -> None:
    assert findings_of(root) == []
    assert notes_of(root) == []


def test_an_audit_changes_no_byte_and_no_time(archived: Path) -> None:
    before = image_of(archived)

    look_at_everything(archived)

    assert image_of(archived) == before


def test_an_audit_after_a_crash_changes_nothing_and_sweeps_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "cache") as store:
        store_boundary(store, 0)
        crashed = crashed_copy(store, tmp_path / "crashed")
    (crashed / "staging" / "00000001-00000099").write_bytes(b"half")
    before = image_of(crashed)

    look_at_everything(crashed)

    assert image_of(crashed) == before


def test_an_audit_of_a_damaged_journal_changes_nothing(root: Path) -> None:
    (root / "journal" / "data.mdb").write_bytes(b"not LMDB's")
    before = image_of(root)

    look_at_everything(root)

    assert image_of(root) == before


def test_an_audit_keeps_others_out_and_lets_them_in_afterwards(root: Path) -> None:
    with Audit.open(root), pytest.raises(CacheLockedError):
        Audit.open(root)

    Audit.open(root).close()


def test_a_holder_that_is_no_more_is_not_named(root: Path) -> None:
    # An audit holds the lock without writing itself down, so OWNER may be of a dead process.
    (root / "OWNER").write_text(json.dumps({"pid": 2**22 + 1, "boot_id": ""}))

    with Audit.open(root), pytest.raises(CacheLockedError) as caught:
        Audit.open(root)

    assert caught.value.pid is None


def test_a_directory_that_is_no_cache_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RootRefusedError, match="no STORE"):
        Audit.open(tmp_path)
    with pytest.raises(RootRefusedError, match="no cache at"):
        Audit.open(tmp_path / "missing")

    assert list(tmp_path.iterdir()) == []


# The journal.


def test_a_journal_of_another_boot_is_verified_in_a_child_before_it_is_opened(root: Path) -> None:
    # LMDB would end this process with SIGBUS: the file is shorter than its meta pages say.
    data = root / "journal" / "data.mdb"
    data.write_bytes(data.read_bytes()[:12288])
    from_another_boot(root)

    with Audit.open(root) as audit:
        assert audit.state is None
        assert audit.log is None
        assert audit.damage


def test_an_event_that_was_removed_is_found(root: Path) -> None:
    remove_event(root, 6)

    (finding,) = findings_of(root)

    assert finding.area is Area.JOURNAL
    assert "event 6 is missing" in finding.text
    assert "an empty journal" in finding.remedy


def test_a_removed_event_that_the_snapshot_covers_is_found_without_a_child_too(
    archived: Path,
) -> None:
    with Audit.open(archived) as audit:
        assert audit.log is not None
        sequence = audit.log.first_sequence + 1
        assert sequence < audit.log.watermark.sequence
    remove_event(archived, sequence)

    with Audit.open(archived) as audit:
        found = list(findings(audit))

    assert [each.area for each in found] == [Area.JOURNAL]
    assert f"event {sequence} is missing" in found[0].text
    assert "backups that verifies" in found[0].remedy


def test_a_journal_that_was_rolled_back_is_found_by_head(tmp_path: Path) -> None:
    root = make_cache(tmp_path / "cache")
    older = (root / "journal" / "data.mdb").read_bytes()
    with open_store(root) as store:
        store_boundary(store, 3)
    (root / "journal" / "data.mdb").write_bytes(older)

    (finding,) = findings_of(root)

    assert "rolled back" in finding.text
    assert "HEAD saw" in finding.text
    assert "adopted" in finding.remedy
    assert len(notes_of(root)) == 1


def test_payloads_of_an_epoch_that_the_journal_does_not_know_are_not_to_be_deleted(
    root: Path,
) -> None:
    folder = root / "blocks" / "00000007"
    folder.mkdir()
    (folder / "00000001").write_bytes(b"x")

    (finding,) = findings_of(root)

    assert finding.area is Area.JOURNAL
    assert "payloads of epoch 7" in finding.text


def test_a_missing_journal_is_a_finding_and_not_an_empty_cache(root: Path) -> None:
    (root / "journal").rename(root.parent / "elsewhere")

    (finding,) = findings_of(root)

    assert finding.text == "the journal is missing"


def test_a_cache_of_which_only_store_was_made_is_clean(root: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "STORE").write_bytes((root / "STORE").read_bytes())

    assert findings_of(begun) == []
    assert "no journal yet" in notes_of(begun)[0]


def test_the_journal_of_another_cache_is_damage(root: Path, tmp_path: Path) -> None:
    other = make_cache(tmp_path / "other")
    (root / "journal" / "data.mdb").write_bytes((other / "journal" / "data.mdb").read_bytes())

    (finding,) = findings_of(root)

    assert "another cache" in finding.text


# The history.


def test_the_history_goes_through_sealed_segments_without_a_gap(archived: Path) -> None:
    history = history_of(archived)

    assert len(list((archived / "archive").iterdir())) > 2
    assert sequences_of(history) == list(range(1, len(history) + 1))


def test_the_history_can_begin_anywhere(archived: Path) -> None:
    whole = history_of(archived)

    with Audit.open(archived) as audit:
        for first in (2, len(whole) // 2, len(whole), len(whole) + 1):
            assert list(audit.records(first)) == whole[first - 1 :]


def test_a_missing_segment_is_a_gap_in_the_history_and_a_finding(archived: Path) -> None:
    whole = history_of(archived)
    segments = sorted((archived / "archive").iterdir())
    first, end = (int(each.name, 16) for each in segments[1:3])
    segments[1].unlink()

    history = history_of(archived)
    (finding,) = findings_of(archived)

    gap = Gap(first=first, last=end - 1, reason=f"archive/{first:016x} is missing", is_damage=True)
    assert history == [*whole[: first - 1], gap, *whole[end - 1 :]]
    assert f"events {first} to {end - 1}" in finding.text


def test_a_segment_with_a_flipped_bit_is_a_gap_and_a_finding(archived: Path) -> None:
    segment = sorted((archived / "archive").iterdir())[0]
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)

    history = history_of(archived)
    (finding,) = findings_of(archived)

    assert isinstance(history[0], Gap)
    assert "not the file that was sealed" in history[0].reason
    assert "not the file that was sealed" in finding.text


def test_of_a_damaged_journal_the_history_before_the_damage_is_shown(archived: Path) -> None:
    whole = history_of(archived)
    with Audit.open(archived) as audit:
        assert audit.log is not None
        last = audit.log.sequence
    remove_event(archived, last - 3)

    history = history_of(archived)

    gap = history[-1]
    assert isinstance(gap, Gap)
    assert (gap.first, gap.is_damage) == (last - 3, True)
    assert history[:-1] == whole[: last - 4]


def test_of_a_journal_that_does_not_open_the_sealed_segments_are_shown(archived: Path) -> None:
    with Audit.open(archived) as audit:
        assert audit.log is not None
        first, last = audit.log.first_sequence, audit.log.sequence
    (archived / "journal" / "data.mdb").write_bytes(b"not LMDB's")

    *history, gap = history_of(archived)

    assert sequences_of(history) == list(range(1, first))
    assert isinstance(gap, Gap)
    assert (gap.first, gap.last) == (first, last)


# State and files.


def test_a_file_that_no_event_names_is_found(root: Path) -> None:
    (root / "blocks" / "00000001" / "000000aa").write_bytes(b"orphan")

    (finding,) = findings_of(root)

    assert finding.area is Area.FILES
    assert finding.text == "blocks/00000001/000000aa is named by no event"
    assert "delete it" in finding.remedy


def test_a_missing_payload_is_found(root: Path) -> None:
    (root / "sidecars" / "00000001" / "00000002").unlink()

    (finding,) = findings_of(root)

    assert finding.text == "sidecars/00000001/00000002 is missing"
    assert "will miss it" in finding.remedy


def test_a_payload_with_a_flipped_bit_is_found_by_reading_it(root: Path) -> None:
    payload = root / "blocks" / "00000001" / "00000003"
    content = bytearray(payload.read_bytes())
    content[-1] ^= 1
    payload.write_bytes(content)

    (finding,) = findings_of(root)

    assert finding.area is Area.PAYLOAD
    assert finding.text.startswith("blocks/00000001/00000003: ")
    assert "quarantines it" in finding.remedy


def test_a_copied_cache_without_its_empty_folders_is_clean(root: Path) -> None:
    for name in ("staging", "quarantine"):
        (root / name).rmdir()

    assert findings_of(root) == []


def test_what_a_crash_left_is_a_note_and_no_finding(tmp_path: Path) -> None:
    with open_store(tmp_path / "cache") as store:
        store_boundary(store, 0)
        crashed = crashed_copy(store, tmp_path / "crashed")
    (crashed / "staging" / "00000001-00000099").write_bytes(b"half")
    (crashed / "blocks" / "00000001" / "00000098").write_bytes(b"published, not committed")

    assert findings_of(crashed) == []
    (note,) = notes_of(crashed)
    assert "epoch 1 was not closed" in note
    assert "sweeps 2 files of 8192 bytes" in note


def test_refused_deletions_are_noted_with_their_reason(tmp_path: Path) -> None:
    root = make_cache(tmp_path / "cache", boundary_count=1)
    payload = root / "blocks" / "00000001" / "00000001"
    (tmp_path / "second name").hardlink_to(payload)
    with open_store(root) as store:
        store.operator.purge(NAMESPACE)
        store.settle_deletions()

    (note,) = notes_of(root)

    assert note.startswith("blocks/00000001/00000001 was refused deletion 1 times")
    assert "has 2 links" in note


def test_quarantined_payloads_and_holes_are_noted(tmp_path: Path) -> None:
    root = make_cache(tmp_path / "cache", boundary_count=2)
    with open_store(root) as store:
        located, lease = store.choose(lambda view: (view.block(key_of(0)), []))
        store.release(lease)
        assert located is not None
        store.damage.quarantine(located, "its data does not match its digest")
        store.settle_deletions()

    found = notes_of(root)

    key = key_of(0)[:8].hex()
    assert findings_of(root) == []
    assert f"block {key} is quarantined (quarantine/block-00000001-00000001): its data" in found[0]
    assert f"block {key} is a hole" in found[1]


def test_a_closed_audit_can_be_closed_again(root: Path) -> None:
    audit = Audit.open(root)

    audit.close()
    audit.close()


def test_events_that_are_not_kept_are_a_gap_and_no_damage(archived: Path) -> None:
    with Audit.open(archived) as audit:
        assert audit.state is not None
        # As a SegmentDropped leaves the state.
        dropped = audit.state.segments.pop(1)

        history = list(audit.records())

    assert history[0] == Gap(
        first=1, last=dropped.last, reason="they are no longer kept", is_damage=False
    )
    assert all(b == a + 1 for a, b in pairwise(sequences_of(history)))


def test_opening_again_after_an_interrupted_verification_verifies_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # OWNER once named this boot before the journal was verified, so whoever interrupted that
    # had it trusted unseen the next time.
    root = make_cache(tmp_path / "cache")
    from_another_boot(root)
    calls: list[Path] = []

    def interrupted(root: Path) -> str | None:
        calls.append(root)
        raise KeyboardInterrupt

    monkeypatch.setattr("walkback.store.found_journal.verify_in_child", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), open_store(root, SETTINGS):
            pass

    assert len(calls) == 2
