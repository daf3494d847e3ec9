"""Short histories that bear it when the disk refuses, and say what may be found afterwards."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from walkback.journal.errors import CacheClosedError, NotRecordedError
from walkback.journal.events import Restored
from walkback.journal.words import Kind
from walkback.store.boundary import Boundary, Claim
from walkback.store.lookup import Located
from walkback.store.settings import StoreSettings
from walkback.store.store import MutableStore
from walkback.store.verify import verify_payload

from .lives import open_store
from .recording import ActingFiles
from .world import SETTINGS, EntryId, World, boundary, key, located, pair, settle, tensors_of

Change = Callable[[World], World]

# Whoever waits for room here would wait in vain.
_SETTINGS = replace(SETTINGS, room_wait_seconds=0.05)
# Compacts, seals a segment and writes a backup after almost every commit.
_COMPACTING = replace(_SETTINGS, compact_every_events=3, journal_events_kept=2)


class MutableActs:
    """Acts on a store, each of which may be refused. ``worlds`` are those that may be found."""

    def __init__(self, store: MutableStore, root: Path, world: World) -> None:
        self.store = store
        self.root = root
        self.worlds = [world]
        self.refusals: list[str] = []

    def act(self, do: Callable[[], object], change: Change) -> None:
        """It is done if nothing is said against it; else it may be, or not."""
        try:
            refusal = do()
        except (CacheClosedError, NotRecordedError) as error:
            refusal = error
        if refusal is not None:
            self.refusals.append(str(refusal))
        self._become([change] if refusal is None else [_as_it_is, change])

    def may(self, change: Change) -> None:
        """The store may do this of its own accord, sooner or later."""
        self._become([_as_it_is, change])

    def put(self, name: str, entries: Mapping[EntryId, bytes], **where: Any) -> None:
        stored: dict[EntryId, bytes] = {}
        self.act(
            lambda: self._put(boundary(name, entries, **where), entries, stored),
            lambda world: world.with_entries(stored),
        )

    def located(self, kind: Kind, name: str) -> Located | None:
        return located(self.store, kind, key(name))

    def _put(
        self, wanted: Boundary, entries: Mapping[EntryId, bytes], stored: dict[EntryId, bytes]
    ) -> object:
        claim = self.store.claim(wanted, request=1, producer="test")
        if not isinstance(claim, Claim):
            return claim
        if not claim.is_empty:
            ids = [(each.part.kind, each.part.key) for each in claim.writings]
            stored.update({each: entries[each] for each in ids})
            self.store.reserve(claim)
            self.store.put(claim, tensors_of(claim, entries), prefill_seconds=0.5)
            assert claim.settled.wait(30), "a claim is never settled"
        return claim.refusal

    def _become(self, changes: Iterable[Change]) -> None:
        found = [change(world) for change in changes for world in self.worlds]
        self.worlds = [each for index, each in enumerate(found) if each not in found[:index]]


def _as_it_is(world: World) -> World:
    return world


@dataclass(frozen=True, slots=True)
class Base:
    """A cache that a scene begins with; nothing may stand at its root."""

    root: Path
    world: World

    def copy_to(self, root: Path) -> None:
        if self.root.exists():
            shutil.copytree(self.root, root)


@dataclass(frozen=True, slots=True)
class Scene:
    """What happens in one opening of a cache, which is then closed."""

    name: str
    base: str
    tell: Callable[[MutableActs], None]
    settings: StoreSettings = _SETTINGS


def make_bases(scratch: Path) -> dict[str, Base]:
    """No cache yet, one that was closed, one with damage, and one whose process was killed."""
    root = scratch / "stored"
    with open_store(root, settings=_SETTINGS) as store:
        acts = MutableActs(store, root, World())
        acts.put("a1", pair("a1"), depth=1)
        acts.put("a2", pair("a2"), parent="a1", depth=2)
        acts.put("a3", pair("a3", nbytes=800_000), parent="a2", depth=3)
        acts.put("b2", pair("b2"), parent="a1", depth=2)
        acts.put("z1", pair("z1"), depth=1, namespace="other")
        assert not acts.refusals
        a2 = _file_of(acts, "a2")
    stored = Base(root, acts.worlds[0])
    return {
        "none": Base(scratch / "none", World()),
        "stored": stored,
        "damaged": _damaged(stored, a2),
        "killed": _killed(stored),
    }


def _file_of(acts: MutableActs, name: str) -> str:
    found = acts.located(Kind.BLOCK, name)
    assert found is not None and found.file is not None
    return found.file.path


def _damaged(stored: Base, a2: str) -> Base:
    root = stored.root.with_name("damaged")
    stored.copy_to(root)
    (root / a2).write_bytes((root / a2).read_bytes()[:-1] + b"?")
    content = stored.world.entries[Kind.BLOCK, key("a2")][:-1] + b"?"
    return Base(root, stored.world.with_entries({(Kind.BLOCK, key("a2")): content}))


def _killed(stored: Base) -> Base:
    """What a process leaves that dies with a deletion refused and two stores under way."""
    root = stored.root.with_name("living")
    stored.copy_to(root)
    with open_store(root, settings=_SETTINGS) as store:
        acts = MutableActs(store, root, stored.world)
        acts.put("c1", pair("c1"), depth=1)
        assert isinstance(store.files, ActingFiles)
        store.files.refused.add(_file_of(acts, "z1"))
        acts.act(lambda: store.operator.purge(key("other")), _without("z1"))
        settle(store)
        assert not acts.refusals
        killed = Base(stored.root.with_name("killed"), acts.worlds[0])
        Base(root, killed.world).copy_to(killed.root)
    (killed.root / "staging/00000002-000000fe").write_bytes(b"torn")
    (killed.root / "blocks/00000002/000000ff").write_bytes(b"not committed")
    return killed


def _without(name: str) -> Change:
    return lambda world: world.without(*pair(name))


# The scenes.


def _make(acts: MutableActs) -> None:
    acts.put("a1", pair("a1"), depth=1)


def _store(acts: MutableActs) -> None:
    acts.put("b3", {(Kind.BLOCK, key("b3")): b"b3 alone"}, parent="b2", depth=3)
    bare = {(Kind.BLOCK, key("b4")): b"", (Kind.SIDECAR, key("b4")): b"state"}
    acts.put("b4", bare, parent="b3", depth=4)


def _read(acts: MutableActs) -> None:
    """What cannot be read is stored again when its boundary comes by."""
    for name, parent in (("a1", ""), ("b2", "a1")):
        is_suspected = False
        for kind in Kind:
            found = acts.located(kind, name)
            if found is None or found.file is None:
                continue
            try:
                verify_payload(acts.store.files, found.file.path, found.header_digest)
            except OSError:
                acts.store.damage.suspect(found)
                is_suspected = True
        if is_suspected:
            acts.put(name, pair(name, 2), parent=parent, depth=int(name[1]))
    event = Restored(
        request=1,
        tip=key("b2")[:8],
        block_count=1,
        matched=1,
        endpoint=1,
        endpoint_tokens=4,
        prompt_tokens=5,
        walkbacks=0,
        mixed_plan=False,
    )
    acts.store.note_restored(event, endpoint=key("b2"), sidecars_read=1)
    acts.store.flush()


def _replace(acts: MutableActs) -> None:
    for kind in Kind:
        found = acts.located(kind, "b2")
        if found is not None:
            acts.store.damage.suspect(found)
    acts.put("b2", pair("b2", 2), parent="a1", depth=2)


def _evict(acts: MutableActs) -> None:
    """Room is made for what is stored: a3 goes, and more if its file does not go."""
    acts.act(lambda: acts.store.operator.set_budget(1 << 20), _as_it_is)
    for name in ("a3", "a2", "b2", "z1", "a1"):
        acts.may(_without(name))
    acts.put("c1", pair("c1", nbytes=300_000), depth=1)


def _operate(acts: MutableActs) -> None:
    operator = acts.store.operator

    def pin() -> object:
        return None if operator.pin(key("b2")) else "not pinned"

    acts.act(pin, lambda world: replace(world, pins=frozenset([key("b2")])))
    acts.act(lambda: operator.purge(key("other")), _without("z1"))
    acts.act(lambda: operator.unpin(key("b2")), lambda world: replace(world, pins=frozenset()))


def _damage(acts: MutableActs) -> None:
    store, found = acts.store, acts.located(Kind.BLOCK, "a2")
    assert found is not None

    def quarantine() -> object:
        store.damage.quarantine(found, "its data does not match its digest")
        return acts.located(Kind.BLOCK, "a2")

    def gone(world: World) -> World:
        return replace(world.without(*pair("a2")), quarantined=1)

    acts.act(quarantine, gone)
    acts.act(lambda: store.operator.report_bad(Kind.BLOCK, key("b2"), "wrong"), _without("b2"))
    acts.put("a2", pair("a2", 2), parent="a1", depth=2)


def _compact(acts: MutableActs) -> None:
    acts.put("c1", pair("c1"), depth=1)
    acts.put("c2", pair("c2"), parent="c1", depth=2)


def _go_on(acts: MutableActs) -> None:
    acts.put("c2", pair("c2"), parent="c1", depth=2)


SCENES = (
    Scene("make", "none", _make),
    Scene("store", "stored", _store),
    Scene("read", "stored", _read),
    Scene("replace", "stored", _replace),
    Scene("evict", "stored", _evict),
    Scene("operate", "stored", _operate),
    Scene("damage", "damaged", _damage),
    Scene("compact", "stored", _compact, _COMPACTING),
    Scene("recover", "killed", _go_on),
)
