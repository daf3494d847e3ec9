"""What must be found in a cache that was damaged, by its history alone, and whether it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from walkback.journal.words import Kind
from walkback.store.store import MutableStore

from .damages import Changes, Damage
from .restoring import heal, restored_whole
from .specimen import JOURNAL, PLACES, Earlier, Specimen, chain_of, payload_in
from .world import EntryId, World, difference, key, settle, world_of
from .world import state_of as state_in


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be found, by the history alone.

    ``bad`` are entries whose own files are not what they were; of these ``missing`` have none.
    ``kept`` are there with these bytes, ``doubtful`` may be there with these bytes.
    """

    bad: frozenset[EntryId]
    missing: frozenset[EntryId]
    kept: dict[EntryId, bytes]
    doubtful: dict[EntryId, bytes]
    quarantined: int
    is_journal_hurt: bool

    @property
    def hurt_min(self) -> int:
        """How many are found bad at least: of a pair the block may take the sidecar along."""
        return len({name for _, name in self.bad - self.missing})


def expected_of(specimen: Specimen, damage: Damage, changes: Changes) -> Expected:
    """What the damage may cost."""
    world = specimen.world.entries
    after: dict[str, bytes | None] = {**specimen.files, **changes}
    hurt = {
        path: entry
        for path, entry in specimen.payloads.items()
        if after[path] != specimen.files[path]
    }
    bad = frozenset(hurt.values())
    is_journal_hurt = JOURNAL in changes
    # The sidecar of a bad block goes with it.
    doubtful = {
        (Kind.SIDECAR, name): world[Kind.SIDECAR, name]
        for kind, name in bad
        if kind is Kind.BLOCK and (Kind.SIDECAR, name) in world
    }
    if is_journal_hurt:
        doubtful |= _not_adoptable(world, bad)
        # The purge may be forgotten, and its file still stands.
        doubtful |= specimen.purged
    if damage.earlier is not None:
        doubtful |= _unknown_to(damage.earlier, specimen)
    return Expected(
        bad=bad,
        missing=frozenset(entry for path, entry in hurt.items() if after[path] is None),
        kept={e: data for e, data in world.items() if e not in bad and e not in doubtful},
        doubtful={entry: data for entry, data in doubtful.items() if entry not in bad},
        quarantined=sum(
            path.startswith("quarantine/") and content is not None
            for path, content in after.items()
        ),
        is_journal_hurt=is_journal_hurt,
    )


def _not_adoptable(world: Mapping[EntryId, bytes], bad: frozenset[EntryId]) -> dict[EntryId, bytes]:
    """What a new journal cannot know: records without a file, and what is below something bad."""
    good = {entry for entry, data in world.items() if data and entry not in bad}
    return {
        (kind, key(name)): world[kind, key(name)]
        for name in PLACES
        for kind in Kind
        if (kind, key(name)) in world
        and not {(kind, key(name)), *((Kind.BLOCK, key(each)) for each in chain_of(name))} <= good
    }


def _unknown_to(earlier: Earlier, specimen: Specimen) -> dict[EntryId, bytes]:
    """What may go if journal and HEAD agree that it never was.

    If a newer epoch than theirs left payloads they are not believed. Within one epoch what they do
    not name looks like what a crash left, and that is swept.
    """
    if max(int(path.split("/")[1], 16) for path in specimen.payloads) > earlier.epoch:
        return {}
    world = specimen.world.entries
    bare = {entry: data for entry, data in world.items() if entry not in earlier.world.entries}
    unnamed = {
        entry: world[entry]
        for path, entry in specimen.payloads.items()
        if path not in earlier.names
    }
    return bare | unnamed


def require_restored(
    store: MutableStore, root: Path, specimen: Specimen, damage: Damage, expected: Expected
) -> World:
    """All that is kept is served, what is lost is named, and healed the cache is sound."""
    world = specimen.world.entries
    is_rebuilt = "Rebuilt" in store.statistics().events
    is_told = is_rebuilt or damage.earlier is not None
    assert expected.is_journal_hurt or not is_rebuilt, "a whole journal was not believed"
    if not expected.bad and damage.earlier is None:
        require_no_violations(store)
    served = restored_whole(store)
    found = entries_in(store, root, expected)
    assert served.items() <= found.items(), difference(World(served), [World(found)])
    lost = [entry for entry, data in expected.kept.items() if found.get(entry) != data]
    assert not lost, f"lost: {lost}"
    events = store.statistics().events
    named = sum(events.get(name, 0) for name in ("Lost", "Quarantined", "Evicted"))
    lost = [entry for entry in world if state_in(store).entry(*entry) is None]
    assert is_told or named >= len(lost), f"{lost} was lost in silence: {events}"
    while healed := heal(store, world):
        found |= healed
        served = restored_whole(store)
        assert served.items() <= found.items(), difference(World(served), [World(found)])
    settle(store)
    final = World(
        found, frozenset(state_in(store).pins), len(list((root / "quarantine").iterdir()))
    )
    if not is_told:
        assert final.pins == specimen.world.pins, f"the pins are {final.pins}"
        count = store.statistics().events.get("Quarantined", 0)
        assert expected.hurt_min <= count <= len(expected.bad - expected.missing), f"{count} bad"
        assert final.quarantined == expected.quarantined + count, f"{final.quarantined} put aside"
    require_world(store, root, final)
    return final


def require_world(store: MutableStore, root: Path, wanted: World) -> None:
    """This is what is found, and the invariants hold."""
    require_no_violations(store)
    found = world_of(store, root)
    assert found == wanted, difference(found, [wanted])


def require_no_violations(store: MutableStore) -> None:
    settle(store)
    violations = list(store.violations())
    assert not violations, violations


def entries_in(store: MutableStore, root: Path, expected: Expected) -> dict[EntryId, bytes]:
    """The entries of the index with their bytes.

    Of several bad ones some may still be there, since the first was in the way of the others. So
    may those whose files went, if the journal forgot that they did.
    """
    found: dict[EntryId, bytes] = {}
    state = state_in(store)
    for entry in (*state.blocks.values(), *state.sidecars.values()):
        identity = entry.kind, entry.key
        if identity in expected.bad:
            assert len(expected.bad) > 1, f"{identity} was not found bad"
            continue
        path = None if entry.file is None else root / entry.file.path
        if path is not None and not path.exists() and identity in expected.doubtful:
            continue
        content = b""
        if path is not None:
            whose, content = payload_in(path.read_bytes())
            assert whose == identity, f"{identity} has the file of {whose}"
        legal = expected.kept.get(identity), expected.doubtful.get(identity)
        assert content in legal, f"{identity} came back as {content[:20]!r}"
        found[identity] = content
    return found
