"""The story that the crash tests tell, what may be there after a crash in it, and who looks.

The oracle is a ``World``: which bytes the story put under which keys, and nothing that the product
computes. After a crash what is found must be one of the worlds that were legal at that moment, and
the files must be exactly those of that world.
"""

import contextlib
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
from crashes import Disk, Image, RecordingFiles

from walkback.journal import backup
from walkback.journal.events import Restored
from walkback.journal.files import Files
from walkback.journal.state import State
from walkback.journal.verify import damage_of
from walkback.journal.words import Kind
from walkback.store import recovery
from walkback.store.boundary import Boundary, Claim, Part
from walkback.store.lookup import Located
from walkback.store.root import Owner
from walkback.store.settings import StoreSettings
from walkback.store.store import MutableStore
from walkback.store.tensors import Tensor, TensorSpec

LARGE_BYTES = 64 << 20

# Small enough that the story compacts, seals a segment and writes a backup several times.
SETTINGS = StoreSettings(
    free_floor_bytes=0,
    budget_bytes=LARGE_BYTES,
    compact_every_events=40,
    journal_events_kept=6,
    room_wait_seconds=5.0,
)

EntryId = tuple[Kind, bytes]
MakeFiles = Callable[[Path, Disk, Callable[[str], None]], RecordingFiles]


@dataclass(frozen=True, slots=True)
class World:
    """What is stored, as bytes; which blocks are pinned; how many files stand in quarantine."""

    entries: Mapping[EntryId, bytes] = field(default_factory=dict[EntryId, bytes])
    pins: frozenset[bytes] = frozenset()
    quarantined: int = 0

    def with_entries(self, entries: Mapping[EntryId, bytes]) -> "World":
        return replace(self, entries={**self.entries, **entries})

    def without(self, *gone: EntryId) -> "World":
        return replace(self, entries={k: v for k, v in self.entries.items() if k not in gone})


@dataclass(frozen=True, slots=True)
class Between:
    """Every world on the way from one to another that does both of what belongs together."""

    before: World
    after: World

    def __contains__(self, world: World) -> bool:
        before, after = self.before.entries, self.after.entries
        keys = before.keys() | after.keys() | world.entries.keys()
        return (
            all(world.entries.get(k) in (before.get(k), after.get(k)) for k in keys)
            and all((Kind.BLOCK, name) in world.entries for _, name in world.entries)
            and world.pins in (self.before.pins, self.after.pins)
            and self.after.quarantined <= world.quarantined <= self.before.quarantined
        )

    def __iter__(self) -> Iterator[World]:
        return iter((self.before, self.after))


Legal = Sequence[World] | Between


@dataclass(slots=True)
class Moment:
    """The disk after one step, and the worlds of which one must be found if it all ends here."""

    step: str
    disk: Disk
    legal: tuple[World, ...]


# Boundaries.


def key(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def boundary(
    name: str,
    entries: Mapping[EntryId, bytes],
    *,
    parent: str = "",
    depth: int,
    namespace: str = "ns",
) -> Boundary:
    """A boundary of the parts that ``entries`` holds for ``name``; four tokens a block."""
    parts = tuple(
        Part(
            kind=kind,
            key=key(name),
            parent=key(parent or namespace),
            start=4 * depth - 4 if kind is Kind.BLOCK else 4 * depth,
            end=4 * depth,
            tensors=(_spec(entries[kind, key(name)]),) if entries[kind, key(name)] else (),
        )
        for kind in Kind
        if (kind, key(name)) in entries
    )
    return Boundary(
        namespace=key(namespace),
        layout_digest=b"l" * 32,
        plan_digest=b"p" * 32,
        position=4 * depth,
        parts=parts,
    )


def pair(name: str, version: int = 1, *, nbytes: int = 300) -> dict[EntryId, bytes]:
    """The bytes of a block and its sidecar; each version has others."""
    return {
        (Kind.BLOCK, key(name)): (f"{name} block {version};".encode() * nbytes)[:nbytes],
        (Kind.SIDECAR, key(name)): (f"{name} sidecar {version};".encode() * 99)[:99],
    }


def put(store: MutableStore, wanted: Boundary, entries: Mapping[EntryId, bytes]) -> Claim:
    """Store a boundary and wait for it."""
    claim = store.claim(wanted, request=1, producer="test")
    assert isinstance(claim, Claim), claim
    if not claim.is_empty:
        store.reserve(claim)
        store.put(claim, tensors_of(claim, entries), prefill_seconds=0.5)
        assert claim.settled.wait(30)
    return claim


def tensors_of(claim: Claim, entries: Mapping[EntryId, bytes]) -> list[list[Tensor]]:
    return [
        [
            Tensor(spec=spec, buffer=memoryview(entries[each.part.kind, each.part.key]))
            for spec in each.part.tensors
        ]
        for each in claim.writings
    ]


def located(store: MutableStore, kind: Kind, name: bytes) -> Located | None:
    """Where an entry is, as a lookup would see it."""

    def choose(view: Any) -> tuple[Located | None, list[Located]]:
        found = view.block(name) if kind is Kind.BLOCK else view.sidecar(name)
        return found, [found] if found is not None else []

    found, lease = store.choose(choose)
    store.release(lease)
    return found


def _spec(content: bytes) -> TensorSpec:
    return TensorSpec(name="0", dtype="U8", shape=(len(content),))


# Looking.


def state_of(store: MutableStore) -> State:
    return store._core.state  # pyright: ignore[reportPrivateUsage]


def settle(store: MutableStore) -> None:
    """Wait until nothing is under way; a deletion that was refused before is tried once more."""
    store.settle_deletions()
    store.flush()
    store.settle_deletions()


def world_of(store: MutableStore, root: Path) -> World:
    """What a reader finds, its bytes read without the product's code."""
    state = state_of(store)
    entries: dict[EntryId, bytes] = {}
    for kind, table in ((Kind.BLOCK, state.blocks), (Kind.SIDECAR, state.sidecars)):
        for name in list(table):
            found = located(store, kind, name)
            assert found is not None, f"{name!r} is in the index, and a lookup does not see it"
            entries[kind, name] = b""
            if found.file is not None:
                entries[kind, name] = raw_data(root / found.file.path, kind, name)
    return World(entries, frozenset(state.pins), len(list((root / "quarantine").iterdir())))


def raw_data(path: Path, kind: Kind, name: bytes) -> bytes:
    """The data of a safetensors file that says that it is this entry."""
    assert path.is_file(), f"{path} is not there"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8:end])["__metadata__"]
    assert (metadata["kind"], metadata["key"]) == (kind.word, name.hex()), (
        f"{path} holds another payload"
    )
    return content[end:]


def payload_files(root: Path) -> dict[str, int]:
    """Every file of a payload, wherever it stands, with the bytes that it takes."""
    folders = ("blocks", "sidecars", "staging", "quarantine")
    found: dict[str, int] = {}
    for folder in folders:
        for path, _, names in os.walk(root / folder):
            for name in names:
                status = Path(path, name).stat()
                blocks = max(status.st_blocks * 512, -(-status.st_size // 4096) * 4096)
                found[f"{path}/{name}".removeprefix(f"{root}/")] = blocks
    return found


def require_sound(store: MutableStore, root: Path, legal: Legal) -> World:
    """The world that is found, which must be legal, with its files and nothing but its files."""
    settle(store)
    _wait_for_refused(store)
    assert store.mode.value == "writing", store.mode_detail
    violations = list(store.violations())
    assert not violations, violations
    found = world_of(store, root)
    assert found in legal, _difference(found, legal)
    state, files = state_of(store), payload_files(root)
    assert not state.staged, f"still staged: {state.staged}"
    with_bytes = sum(bool(content) for content in found.entries.values())
    assert len(files) == with_bytes + found.quarantined, sorted(files)
    assert len([name for name in files if name.startswith("quarantine/")]) == found.quarantined
    for segment in state.segments.values():
        assert (root / f"archive/{segment.first:016x}").stat().st_size
    segment_bytes = sum(each.allocated_bytes for each in state.segments.values())
    assert state.used_bytes == sum(files.values()) + segment_bytes
    return found


def _wait_for_refused(store: MutableStore) -> None:
    for _ in range(100):
        if not state_of(store).doomed:
            return
        store.flush()
        settle(store)


def _difference(found: World, legal: Legal) -> str:
    lines = [f"found {len(found.entries)} entries, {found.quarantined} quarantined, {found.pins}"]
    for index, world in enumerate(legal):
        for identity in sorted(found.entries.keys() | world.entries.keys()):
            here, there = found.entries.get(identity), world.entries.get(identity)
            if here != there:
                lines.append(
                    f"legal {index}: {identity[0].word} {identity[1].decode(errors='replace')}: "
                    f"{here and here[:20]} instead of {there and there[:20]}"
                )
        lines.append(f"legal {index}: {world.quarantined} quarantined, {world.pins}")
    return "\n".join(lines)


# Coming back after a crash.

_NOT_AFTER_A_CRASH = {"Lost", "Quarantined", "Adopted", "Rebuilt", "Reinstated"}


class UnsyncedFiles(Files):
    """Files of an image: nobody pulls its plug, so nothing need be synced."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, name: str) -> None:
        pass


@contextlib.contextmanager
def another_life(*, is_verified: bool) -> Generator[None]:
    """Open what a crash left, quickly: no flush reaches a disk, and damage is looked for here.

    The journal is verified as after another boot, in this process.
    """
    real_open: Any = lmdb.open

    def unsynced_open(*args: Any, **settings: Any) -> Any:
        return real_open(*args, **{"sync": False, **settings})

    def verify_here(root: Path, folder: str = "journal") -> str | None:
        files = Files(root)
        try:
            return damage_of(files, folder)
        finally:
            files.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmdb, "open", unsynced_open)
        patch.setattr(recovery, "verify_in_child", verify_here)
        patch.setattr(backup, "verify_in_child", verify_here)
        if is_verified:
            patch.setattr(recovery, "this_process", lambda: Owner(pid=1, boot_id="another"))
        yield


def require_recovery(
    root: Path, legal: Sequence[World], *, is_verified: bool, is_repeated: bool
) -> None:
    """Open what a crash left at ``root``: it is sound. Opened again, nothing is new."""
    with another_life(is_verified=is_verified):
        with MutableStore.open(root, SETTINGS, make_files=UnsyncedFiles) as store:
            found = require_sound(store, root, legal)
            events = store.statistics().events
            assert not _NOT_AFTER_A_CRASH & events.keys(), events
        if not is_repeated:
            return
        files = payload_files(root)
        with MutableStore.open(root, SETTINGS, make_files=UnsyncedFiles) as store:
            assert require_sound(store, root, [found]) == found
            assert store.statistics().events.keys() <= {"Opened", "Compacted", "SegmentSealed"}
        assert payload_files(root) == files


@dataclass(slots=True)
class Survey:
    """Crashes of many moments, each image once. ``seed`` makes it repeatable.

    Of what is lost alone, kept alone, torn or drawn, ``fraction`` is looked at.
    """

    seed: int = 1
    fraction: float = 1.0
    random_count: int = 1
    counts: Counter[str] = field(default_factory=Counter[str])
    _seen: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def images(self, moment: Moment) -> Iterator[tuple[Image, bool]]:
        """The images of a moment that were not met before, and whether it was a power loss."""
        randomness = random.Random(f"{self.seed} {moment.step} {len(self._seen)}")
        lost = moment.disk.lost_power(randomness, random_count=self.random_count)
        for image, is_new_boot in [(moment.disk.died(), False), *((each, True) for each in lost)]:
            if image.label not in ("died", "all", "none") and randomness.random() > self.fraction:
                continue
            identity = (image.identity, _identity(moment.legal))
            if identity not in self._seen:
                self._seen.add(identity)
                yield image, is_new_boot

    def look(self, image: Image, moment: Moment, scratch: Path, *, is_new_boot: bool) -> None:
        """Recover one image and hold it against the worlds of its moment."""
        root = scratch / "image"
        model = "power" if is_new_boot else "died"
        self.counts[model] += 1
        image.write_to(root)
        try:
            require_recovery(
                root,
                moment.legal,
                # LMDB's file is whole by the model, so verifying it each time would find nothing.
                is_verified=is_new_boot and self.counts[model] % 8 == 0,
                is_repeated=self.counts[model] % 5 == 0,
            )
        except Exception as error:
            raise AssertionError(
                f"after '{moment.step}', {model}, {image.label}: {type(error).__name__}: {error}"
            ) from error
        finally:
            shutil.rmtree(root)


def crashes_inside_recovery(
    image: Image, moment: Moment, scratch: Path, *, is_new_boot: bool
) -> list[Moment]:
    """The steps of recovering one image: a crash after any of them is a crash as well."""
    moments: list[Moment] = []
    root = scratch / "recovered"
    image.write_to(root)
    disk = Disk.of(root)

    def note(step: str) -> None:
        moments.append(Moment(f"{moment.step}, then {step}", disk.copy(), moment.legal))

    with another_life(is_verified=is_new_boot):
        store = MutableStore.open(
            root, SETTINGS, make_files=lambda root: RecordingFiles(root, disk, note)
        )
        with store:
            settle(store)
            _wait_for_refused(store)
    shutil.rmtree(root)
    return moments


def _identity(legal: Sequence[World]) -> int:
    return hash(tuple((tuple(sorted(w.entries.items())), w.pins, w.quarantined) for w in legal))


@contextlib.contextmanager
def scratch_directory() -> Generator[Path]:
    """A directory for thousands of images: in memory where the system has such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name).resolve()


# The story.


class Story:
    """Runs a store over a recorded disk. Each act says which worlds it leads through."""

    def __init__(self, root: Path, make_files: MakeFiles = RecordingFiles) -> None:
        root.mkdir()
        self.root = root
        self.disk = Disk()
        self.moments: list[Moment] = []
        self.world = World()
        self._legal = (self.world,)
        self._make_files = make_files
        self._stores: list[MutableStore] = []

    @property
    def store(self) -> MutableStore:
        return self._stores[-1]

    @property
    def files(self) -> RecordingFiles:
        files = self.store.files
        assert isinstance(files, RecordingFiles)
        return files

    @contextlib.contextmanager
    def act(self, *worlds: World) -> Generator[None]:
        """While it lasts any of these worlds may be found, once it is over only the last."""
        self._legal = (self.world, *worlds)
        yield
        if self._stores:
            settle(self.store)
        self.world = (self.world, *worlds)[-1]
        self._legal = (self.world,)
        self.moments[-1].legal = self._legal
        if self._stores:
            self._require_the_world()

    def open(self) -> None:
        with self.act():
            store = MutableStore.open(
                self.root,
                SETTINGS,
                make_files=lambda root: self._make_files(root, self.disk, self._note),
            )
            self._stores.append(store)

    def close(self) -> None:
        assert list(self.store.violations()) == []
        self._require_the_world()
        self._legal = (self.world,)
        self._stores.pop().close()

    def abandon(self) -> None:
        while self._stores:
            self._stores.pop().close()

    def put(self, name: str, entries: Mapping[EntryId, bytes], **where: Any) -> None:
        with self.act(self.world.with_entries(entries)):
            claim = put(self.store, boundary(name, entries, **where), entries)
            assert claim.refusal is None, claim.refusal

    def located(self, kind: Kind, name: str) -> Located:
        found = located(self.store, kind, key(name))
        assert found is not None
        return found

    def _require_the_world(self) -> None:
        found = world_of(self.store, self.root)
        assert found == self.world, _difference(found, [self.world])

    def _note(self, step: str) -> None:
        self.moments.append(Moment(step, self.disk.copy(), self._legal))


def tell(root: Path, make_files: MakeFiles = RecordingFiles) -> list[Moment]:
    """Three epochs in the life of a cache; every step of it, and what may be found after it."""
    story = Story(root, make_files)
    try:
        _first_epoch(story)
        _second_epoch(story)
        _third_epoch(story)
    finally:
        story.abandon()
    return story.moments


def _first_epoch(story: Story) -> None:
    story.open()
    story.put("a1", pair("a1"), depth=1)
    story.put("a2", pair("a2"), parent="a1", depth=2)
    story.put("a3", pair("a3", nbytes=800_000), parent="a2", depth=3)
    story.put("b2", pair("b2"), parent="a1", depth=2)
    story.put("z1", pair("z1"), depth=1, namespace="other")
    story.close()


def _second_epoch(story: Story) -> None:
    story.open()
    _restore(story, "b2")
    _restore(story, "z1")
    with story.act(story.world.without(*pair("a3"))):
        _shrink(story)
    _grow(story)
    story.put("a3", pair("a3", 2), parent="a2", depth=3)
    # A block, later its sidecar; and a block that is nothing but a record.
    story.put("b3", {(Kind.BLOCK, key("b3")): b"b3 alone"}, parent="b2", depth=3)
    story.put("b3", {(Kind.SIDECAR, key("b3")): b"repaired"}, parent="b2", depth=3)
    bare = {(Kind.BLOCK, key("b4")): b"", (Kind.SIDECAR, key("b4")): b"state"}
    story.put("b4", bare, parent="b3", depth=4)
    # A replacement of files of an older epoch, then of this one.
    for name, parent, version in (("b2", "a1", 2), ("b2", "a1", 3)):
        for kind in Kind:
            story.store.damage.suspect(story.located(kind, name))
        story.put(name, pair(name, version), parent=parent, depth=2)
    with story.act(replace(story.world, pins=frozenset([key("a1")]))):
        story.store.operator.pin(key("a1"))
    _quarantine(story, "a2")
    story.put("a2", pair("a2", 2), parent="a1", depth=2)
    # One of the files stays on the disk until the next opening.
    file = story.located(Kind.BLOCK, "z1").file
    assert file is not None
    story.files.refused.add(file.path)
    with story.act(story.world.without(*pair("z1"))):
        story.store.operator.purge(key("other"))
    assert story.store.statistics().holdings.refused_count == 1
    story.close()


def _third_epoch(story: Story) -> None:
    story.open()
    # A commit between Staged and Committed.
    pinned = replace(story.world, pins=frozenset())
    story.files.before_sync = lambda: story.store.operator.unpin(key("a1"))
    entries = pair("c1")
    with story.act(pinned, pinned.with_entries(entries)):
        assert put(story.store, boundary("c1", entries, depth=1), entries).refusal is None
    # What is reported bad takes along what was computed from it.
    with story.act(story.world.without(*pair("b2"), *pair("b3"), *pair("b4"))):
        story.store.operator.report_bad(Kind.BLOCK, key("b2"), "it was wrong")
    story.close()
    story.open()
    story.put("c2", pair("c2"), parent="c1", depth=2)
    story.close()


def _restore(story: Story, name: str) -> None:
    with story.act():
        event = Restored(
            request=1,
            tip=key(name)[:8],
            block_count=1,
            matched=1,
            endpoint=1,
            endpoint_tokens=4,
            prompt_tokens=5,
            walkbacks=0,
            mixed_plan=False,
        )
        story.store.note_restored(event, endpoint=key(name), sidecars_read=1)
        story.store.flush()


def _shrink(story: Story) -> None:
    """Make room too small for a3, the least recently used leaf."""
    story.store.operator.set_budget(1 << 20)


def _grow(story: Story) -> None:
    with story.act():
        story.store.operator.set_budget(LARGE_BYTES)


def _quarantine(story: Story, name: str) -> None:
    found = story.located(Kind.BLOCK, name)
    assert found.file is not None
    content = bytearray(story.world.entries[Kind.BLOCK, key(name)])
    content[-1] ^= 1
    damaged = story.world.with_entries({(Kind.BLOCK, key(name)): bytes(content)})
    with story.act(damaged):
        story.files.scribble(found.file.path, found.nbytes - 1)
    gone = damaged.without(*pair(name))
    # On its way a power loss may cost the file both of its names.
    with story.act(gone, replace(gone, quarantined=gone.quarantined + 1)):
        story.store.damage.quarantine(found, "its data does not match its digest")
