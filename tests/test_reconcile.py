"""A journal that is rolled back, lost or damaged under its payloads: they are adopted again."""

import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from crash.disk import Disk, Entries, Image
from crash.lives import another_life, scratch_directory
from crash.recording import RecordingFiles
from crash.world import (
    SETTINGS,
    Between,
    EntryId,
    Legal,
    World,
    boundary,
    key,
    located,
    pair,
    payload_files,
    put,
    require_sound,
    settle,
)

from walkback.journal.errors import RootRefusedError
from walkback.journal.words import Kind
from walkback.store.store import MutableStore

PAGE_BYTES = 4096
IMAGE_COUNT = 1000 if os.environ.get("WALKBACK_EXAMPLES") else 60


def make_cache(root: Path) -> dict[EntryId, bytes]:
    """A closed cache of two chains, and what it holds."""
    with MutableStore.open(root, SETTINGS) as store:
        for name, parent, depth in (("a1", "", 1), ("a2", "a1", 2), ("b1", "", 1)):
            store_pair(store, name, parent=parent, depth=depth)
    return pair("a1") | pair("a2") | pair("b1")


def store_pair(
    store: MutableStore, name: str, *, parent: str = "", depth: int, version: int = 1
) -> Mapping[EntryId, bytes]:
    entries = pair(name, version)
    claim = put(store, boundary(name, entries, parent=parent, depth=depth), entries)
    assert claim.refusal is None, claim.refusal
    return entries


def reopened(root: Path, expected: Mapping[EntryId, bytes], quarantined: int = 0) -> dict[str, int]:
    """Open twice; all that is expected must be there both times. What happened the first time."""
    world = World(expected, quarantined=quarantined)
    with MutableStore.open(root, SETTINGS) as store:
        require_sound(store, root, [world])
        events = store.statistics().events
    with MutableStore.open(root, SETTINGS) as store:
        require_sound(store, root, [world])
        assert "Rebuilt" not in store.statistics().events
    return events


def payloads_survive_a_journal_that_was_rolled_back(scratch: Path) -> None:
    root = scratch / "cache"
    entries = make_cache(root)
    shutil.copytree(root / "journal", scratch / "older")
    with MutableStore.open(root, SETTINGS) as store:
        for kind in Kind:
            found = located(store, kind, key("a1"))
            assert found is not None
            store.damage.suspect(found)
        # A replacement, whose older files are gone; a new leaf; and a file in quarantine.
        entries |= store_pair(store, "a1", depth=1, version=2)
        entries |= store_pair(store, "a3", parent="a2", depth=3)
        store_pair(store, "b2", parent="b1", depth=2)
        bad = located(store, Kind.BLOCK, key("b2"))
        assert bad is not None
        store.damage.quarantine(bad, "for the test")
        settle(store)
    shutil.rmtree(root / "journal")
    shutil.copytree(scratch / "older", root / "journal")

    with MutableStore.open(root, SETTINGS) as store:
        events = store.statistics().events
        settle(store)
        # What the journal forgot of a quarantine is never adopted.
        assert list((root / "quarantine").iterdir()) == []
        require_sound(store, root, [World(entries)])

    assert events["Rebuilt"] == 1
    assert events["Lost"] == 2
    assert events["Adopted"] == 4


def test_a_journal_that_was_rolled_back_forgets_no_payload(tmp_path: Path) -> None:
    payloads_survive_a_journal_that_was_rolled_back(tmp_path)


def test_an_evicted_file_is_lost_to_a_journal_that_forgot_the_eviction(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    make_cache(root)
    shutil.copytree(root / "journal", tmp_path / "older")
    with MutableStore.open(root, SETTINGS) as store:
        store.operator.report_bad(Kind.BLOCK, key("a2"), "for the test")
        settle(store)
    shutil.rmtree(root / "journal")
    shutil.copytree(tmp_path / "older", root / "journal")

    events = reopened(root, pair("a1") | pair("b1"))

    assert events["Lost"] == 2
    assert "Adopted" not in events


def test_without_a_journal_every_payload_is_adopted(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    entries = make_cache(root)
    shutil.rmtree(root / "journal")

    events = reopened(root, entries)

    assert events["Adopted"] == len(entries)
    assert "Lost" not in events


def test_without_a_journal_a_backup_is_taken_and_what_is_newer_adopted(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    entries = make_cache(root)
    with MutableStore.open(root, SETTINGS) as store:
        parent = "a2"
        for number in range(3, 12):
            entries |= store_pair(store, f"a{number}", parent=parent, depth=number)
            parent = f"a{number}"
    assert list((root / "backup").iterdir())
    shutil.rmtree(root / "journal")

    events = reopened(root, entries)

    assert 0 < events["Adopted"] < len(entries)
    assert "Lost" not in events


def test_a_payload_that_does_not_verify_is_not_adopted_but_swept(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    entries = make_cache(root)
    with MutableStore.open(root, SETTINGS) as store:
        found = located(store, Kind.SIDECAR, key("a2"))
    assert found is not None and found.file is not None
    path = root / found.file.path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    shutil.rmtree(root / "journal")

    del entries[found.kind, found.key]
    reopened(root, entries)

    assert not path.exists()


@pytest.mark.parametrize("page", [0, 1, 3, 6, 9])
def test_a_zeroed_page_of_the_journal_costs_no_payload(page: int, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    entries = make_cache(root)
    with MutableStore.open(root, SETTINGS) as store:
        entries |= store_pair(store, "a3", parent="a2", depth=3)
        settle(store)
        # As it stands while it is open: no clean mark.
        image = tmp_path / "image"
        shutil.copytree(root, image)
    path = image / "journal" / "data.mdb"
    content = bytearray(path.read_bytes())
    content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = bytes(PAGE_BYTES)
    path.write_bytes(content)
    owner = image / "OWNER"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"boot_id": "another"}))

    reopened(image, entries)


@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_a_crash_after_any_step_of_reconciling_costs_no_payload(
    is_rolled_back: bool, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    entries = make_cache(root)
    shutil.copytree(root / "journal", tmp_path / "older")
    with MutableStore.open(root, SETTINGS) as store:
        entries |= store_pair(store, "a3", parent="a2", depth=3)
    shutil.rmtree(root / "journal")
    if is_rolled_back:
        shutil.copytree(tmp_path / "older", root / "journal")

    images = crashes_inside_opening(root, Disk.of(root))

    assert len(images) > 20
    require_all(images, [World(entries)])


def test_what_is_adopted_stays_although_its_name_was_not_durable(tmp_path: Path) -> None:
    """Only the process died, so a name that never was synced is seen, and may still go."""
    root = tmp_path / "cache"
    entries = make_cache(root)
    shutil.rmtree(root / "journal")
    disk = Disk.of(root)
    for kind in Kind:
        folder = disk.find(f"{kind.folder}/00000001")
        assert folder is not None
        names, disk.folders[folder] = disk.folders[folder], {}
        disk.pending += [Entries(folder, (each,)) for each in names.items()]

    images = crashes_inside_opening(root, disk)

    require_all(images, Between(World(entries), World()))


def crashes_inside_opening(root: Path, disk: Disk) -> list[Image]:
    """What crashes leave after each step of opening a cache, in both models."""
    images: dict[str, Image] = {}

    def note(step: str) -> None:
        for image in (disk.died(), *disk.lost_power(random.Random(1), random_count=2)):
            images.setdefault(image.identity, image)

    with (
        another_life(is_verified=False),
        MutableStore.open(
            root, SETTINGS, make_files=lambda path: RecordingFiles(path, disk, note)
        ) as store,
    ):
        settle(store)
    return random.Random(1).sample(list(images.values()), k=min(IMAGE_COUNT, len(images)))


def require_all(images: Sequence[Image], legal: Legal) -> None:
    with scratch_directory() as scratch, another_life(is_verified=False):
        for number, image in enumerate(images):
            root = scratch / str(number)
            image.write_to(root)
            with MutableStore.open(root, SETTINGS) as store:
                require_sound(store, root, legal)


def test_a_store_of_another_cache_touches_no_payload_when_the_journal_is_missing(
    tmp_path: Path,
) -> None:
    root = tmp_path / "cache"
    expected = make_cache(root)
    make_cache(tmp_path / "other")
    mine = (root / "STORE").read_bytes()
    shutil.copy(tmp_path / "other" / "STORE", root / "STORE")
    shutil.move(root / "journal", tmp_path / "journal")
    shutil.rmtree(root / "backup")
    before = payload_files(root)

    with pytest.raises(RootRefusedError, match="of another cache than its STORE"):
        MutableStore.open(root, SETTINGS)

    assert payload_files(root) == before and not (root / "journal").exists()
    (root / "STORE").write_bytes(mine)
    assert "Adopted" in reopened(root, expected)


@pytest.mark.parametrize("folder", ["blocks", "archive", "journal", "staging"])
@pytest.mark.parametrize("what", ["file", "link"])
def test_what_is_no_folder_where_one_belongs_is_refused_by_name(
    folder: str, what: str, tmp_path: Path
) -> None:
    root = tmp_path / "cache"
    expected = make_cache(root)
    (root / folder).rename(tmp_path / "aside")
    if what == "file":
        (root / folder).write_bytes(b"")
    else:
        (root / folder).symlink_to(tmp_path / "aside")

    with pytest.raises(RootRefusedError, match=f"cache/{folder}.* is a link or a file"):
        MutableStore.open(root, SETTINGS)

    (root / folder).unlink()
    (tmp_path / "aside").rename(root / folder)
    reopened(root, expected)
