"""The story that the crash layers tell: three epochs in the life of a cache.

It stores, replaces, evicts, quarantines, purges, is refused a deletion, compacts, archives, writes
backups, closes and opens again. At each moment it says what may be found if it all ended there.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from walkback.journal.events import Restored
from walkback.journal.words import Kind
from walkback.store.lookup import Located
from walkback.store.store import MutableStore

from .lives import open_store
from .recording import ActingFiles
from .world import (
    LARGE_BYTES,
    EntryId,
    World,
    boundary,
    difference,
    key,
    located,
    pair,
    put,
    settle,
    world_of,
)

Worlds = tuple[World, ...]
MakeFiles = Callable[[Path], ActingFiles]


class Story:
    """Runs a store. Each act says which worlds it leads through.

    ``announce`` is called whenever another set of worlds may be found: before an act begins, and
    when it is over and what it did was acknowledged.
    """

    def __init__(
        self,
        root: Path,
        make_files: MakeFiles = ActingFiles,
        announce: Callable[[Worlds], None] = lambda legal: None,
    ) -> None:
        self.root = root
        self.world = World()
        self._make_files = make_files
        self._announce = announce
        self._stores: list[MutableStore] = []

    @property
    def store(self) -> MutableStore:
        return self._stores[-1]

    @property
    def files(self) -> ActingFiles:
        files = self.store.files
        assert isinstance(files, ActingFiles)
        return files

    @contextlib.contextmanager
    def act(self, *worlds: World) -> Generator[None]:
        """While it lasts any of these worlds may be found, once it is over only the last."""
        self._announce((self.world, *worlds))
        yield
        if self._stores:
            settle(self.store)
        self.world = (self.world, *worlds)[-1]
        self._announce((self.world,))
        if self._stores:
            self._require_the_world()

    def open(self) -> None:
        with self.act():
            self._stores.append(open_store(self.root, self._make_files))

    def close(self) -> None:
        assert list(self.store.violations()) == []
        self._require_the_world()
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
        assert found == self.world, difference(found, [self.world])


def tell(
    root: Path,
    make_files: MakeFiles = ActingFiles,
    announce: Callable[[Worlds], None] = lambda legal: None,
) -> World:
    """Tell it at ``root``, which is made. The world in which it ends."""
    story = Story(root, make_files, announce)
    try:
        _first_epoch(story)
        _second_epoch(story)
        _third_epoch(story)
    finally:
        story.abandon()
    return story.world


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
