"""The caches that are damaged: as they stand when closed, and when their process died.

All blocks have one size and so have all sidecars, so that one plain layout reads them. One block is
nothing but a record. There are replaced generations, a quarantined file, a file whose deletion was
refused, a snapshot, sealed segments and backups.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from walkback.journal.words import Kind
from walkback.store import recovery
from walkback.store.root import make_identity

from .lives import open_store
from .recording import ActingFiles
from .story import Story, Worlds
from .world import EntryId, World, boundary, key, pair, put

JOURNAL = "journal/data.mdb"
NAMESPACE = "ns"

Tree = Mapping[str, bytes]


class Place(NamedTuple):
    """Where a block stands."""

    parent: str
    depth: int
    namespace: str = NAMESPACE


PLACES = {
    "a1": Place("", 1),
    "a2": Place("a1", 2),
    "a3": Place("a2", 3),
    "b2": Place("a1", 2),
    "c1": Place("", 1),
    "c2": Place("c1", 2),
    "r1": Place("", 1, "states only"),
    "z1": Place("", 1, "purged"),
}
BARE = ("r1",)


def chain_of(name: str) -> list[str]:
    """The names from the first block to this one."""
    parent = PLACES[name].parent
    return [*(chain_of(parent) if parent else ()), name]


def entries_of(name: str, version: int) -> dict[EntryId, bytes]:
    """The bytes of a block and its sidecar."""
    entries = pair(name, version)
    return entries | {(Kind.BLOCK, key(name)): b""} if name in BARE else entries


def boundary_of(name: str, entries: Mapping[EntryId, bytes]) -> Any:
    """The boundary that stores them."""
    return boundary(name, entries, **PLACES[name]._asdict())


@dataclass(frozen=True, slots=True)
class Earlier:
    """The journal and HEAD as they were at an earlier moment, and the world of then."""

    number: int
    journal: bytes
    head: bytes
    epoch: int
    world: World
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Specimen:
    """A cache at rest, in memory, with what it holds and what it was."""

    name: str
    folders: tuple[str, ...]
    files: Tree
    world: World
    earlier: tuple[Earlier, ...]
    # STORE and the journal of another cache.
    foreign: Tree = field(default_factory=dict[str, bytes])
    boot_id: str = "this"

    def write_to(self, root: Path) -> None:
        root.mkdir(mode=0o700)
        for folder in self.folders:
            (root / folder).mkdir()
        for path, content in self.files.items():
            (root / path).write_bytes(content)

    @property
    def payloads(self) -> dict[str, EntryId]:
        """The files of live entries, and whose they are."""
        found: dict[str, EntryId] = {}
        for path, content in self.files.items():
            if path.startswith(("blocks/", "sidecars/")):
                entry, data = payload_in(content)
                if self.world.entries.get(entry) == data:
                    found[path] = entry
        return found

    @property
    def purged(self) -> dict[EntryId, bytes]:
        """The payloads in place that are of no live entry."""
        live = self.payloads
        return dict(
            payload_in(content)
            for path, content in self.files.items()
            if path.startswith(("blocks/", "sidecars/")) and path not in live
        )


def payload_in(content: bytes) -> tuple[EntryId, bytes]:
    """Whose a payload says that it is, and its data, read without the product's code."""
    end = 8 + int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8:end])["__metadata__"]
    kind = next(kind for kind in Kind if kind.word == metadata["kind"])
    return (kind, bytes.fromhex(metadata["key"])), content[end:]


def tree_of(root: Path) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """The folders and files below a root."""
    paths = sorted(root.rglob("*"))
    folders = [str(path.relative_to(root)) for path in paths if path.is_dir()]
    files = {str(path.relative_to(root)): path.read_bytes() for path in paths if path.is_file()}
    return tuple(folders), files


@dataclass(slots=True)
class _MutableHistory:
    """The life of the cache, and what was seen of it on its way."""

    root: Path
    earlier: list[Earlier] = field(default_factory=list[Earlier])
    found: list[Specimen] = field(default_factory=list[Specimen])

    def note(self, worlds: Worlds) -> None:
        """Keep journal and HEAD as they are now, between two acts."""
        *others, world = worlds
        if others or not (self.root / "HEAD").exists():
            return
        epoch = max(int(path.name, 16) for path in (self.root / "blocks").iterdir())
        names = [path for folder in Kind for path in (self.root / folder.folder).rglob("*/*")]
        moment = Earlier(
            len(self.earlier),
            (self.root / JOURNAL).read_bytes(),
            (self.root / "HEAD").read_bytes(),
            epoch,
            world,
            frozenset(str(path.relative_to(self.root)) for path in names),
        )
        if not self.earlier or self.earlier[-1].head != moment.head:
            self.earlier.append(moment)

    def keep(self, name: str, world: World) -> None:
        folders, files = tree_of(self.root)
        self.found.append(Specimen(name, folders, files, world, tuple(self.earlier)))


def specimens(root: Path) -> list[Specimen]:
    """Live it at ``root``: closed, died between two opens, and the latter after another boot."""
    history = _MutableHistory(root)
    refused: set[str] = set()

    def make_files(root: Path) -> ActingFiles:
        files = ActingFiles(root)
        files.refused = refused
        return files

    story = Story(root, make_files, history.note)
    try:
        _live(story, history, refused)
    finally:
        story.abandon()
    foreign = _of_another_cache(root.with_name("another"))
    died, closed = (replace(each, foreign=foreign) for each in history.found)
    return [closed, died, replace(died, name="rebooted", boot_id="another")]


def _of_another_cache(root: Path) -> Tree:
    with pytest.MonkeyPatch.context() as patch:
        other = partial(make_identity, randomness=lambda count: b"o" * count)
        patch.setattr(recovery, "make_identity", other)
        open_store(root).close()
    return {path: (root / path).read_bytes() for path in ("STORE", JOURNAL)}


def _live(story: Story, history: _MutableHistory, refused: set[str]) -> None:
    keep = partial(_put, story)
    story.open()
    for name in ("a1", "a2", "a3", "b2", "z1"):
        keep(name)
    _close(story, history)
    story.open()
    for version in (2, 3):
        _suspect(story, "b2")
        keep("b2", version)
    with story.act(replace(story.world, pins=frozenset([key("a1")]))):
        story.store.operator.pin(key("a1"))
    _quarantine(story, "a2")
    keep("a2", 2)
    for name in ("r1", "c1"):
        keep(name)
    file = story.located(Kind.BLOCK, "z1").file
    assert file is not None
    refused.add(file.path)
    with story.act(story.world.without(*entries_of("z1", 1))):
        story.store.operator.purge(key("purged"))
    _close(story, history)
    story.open()
    _suspect(story, "c1")
    keep("c1", 2)
    # It dies while a payload is being written.
    world = story.world
    story.files.before_sync = lambda: history.keep("died", world)
    keep("c2")
    story.close()
    history.keep("closed", story.world)


def _close(story: Story, history: _MutableHistory) -> None:
    story.close()
    history.note((story.world,))


def _put(story: Story, name: str, version: int = 1) -> None:
    entries = entries_of(name, version)
    with story.act(story.world.with_entries(entries)):
        claim = put(story.store, boundary_of(name, entries), entries)
        assert claim.refusal is None, claim.refusal


def _suspect(story: Story, name: str) -> None:
    for kind in Kind:
        story.store.damage.suspect(story.located(kind, name))


def _quarantine(story: Story, name: str) -> None:
    gone = story.world.without(*entries_of(name, 1))
    with story.act(replace(gone, quarantined=gone.quarantined + 1)):
        story.store.damage.quarantine(story.located(Kind.BLOCK, name), "for the test")
