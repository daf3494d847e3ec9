"""What may be found in a cache, how a test puts things in, and how it looks at what is there.

The oracle is a ``World``: which bytes a history put under which keys, and nothing that the product
computes. What is found must be one of the worlds that are legal at that moment, and the files must
be exactly those of that world.
"""

import functools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from walkback.journal.state import State
from walkback.journal.words import Kind
from walkback.store.boundary import Boundary, Claim, Part
from walkback.store.lookup import Located
from walkback.store.settings import StoreSettings
from walkback.store.store import MutableStore
from walkback.store.tensors import Tensor, TensorSpec

LARGE_BYTES = 64 << 20

# Small enough that a history compacts, seals a segment and writes a backup several times.
SETTINGS = StoreSettings(
    free_floor_bytes=0,
    budget_bytes=LARGE_BYTES,
    compact_every_events=40,
    journal_events_kept=6,
    room_wait_seconds=5.0,
)

# A janitor that never gets to it is a failure, not a wait.
_SECOND_TRY_SECONDS_MAX = 10.0

EntryId = tuple[Kind, bytes]


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
    # The commit of the last deletion may have made a compaction due, which is over after this.
    store.flush()


def world_of(store: MutableStore, root: Path) -> World:
    """What a reader finds, its bytes read without the product's code."""
    state = state_of(store)
    names = [*((Kind.BLOCK, name) for name in state.blocks)]
    names += [(Kind.SIDECAR, name) for name in state.sidecars]

    def choose(view: Any) -> tuple[list[Located | None], list[Located]]:
        found = [
            view.block(name) if kind is Kind.BLOCK else view.sidecar(name) for kind, name in names
        ]
        return found, [each for each in found if each is not None]

    found, lease = store.choose(choose)
    store.release(lease)
    entries: dict[EntryId, bytes] = {}
    for (kind, name), each in zip(names, found, strict=True):
        assert each is not None, f"{name!r} is in the index, and a lookup does not see it"
        file = each.file
        entries[kind, name] = raw_data(root / file.path, kind, name) if file is not None else b""
    return World(entries, frozenset(state.pins), len(list((root / "quarantine").iterdir())))


def raw_data(path: Path, kind: Kind, name: bytes) -> bytes:
    """The data of a safetensors file that says that it is this entry."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise AssertionError(f"{path} is not there: {error}") from error
    said_kind, said_key, data = _parts_of(content)
    assert (said_kind, said_key) == (kind.word, name.hex()), f"{path} holds another payload"
    return data


@functools.lru_cache(maxsize=256)
def _parts_of(content: bytes) -> tuple[str, str, bytes]:
    end = 8 + int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8:end])["__metadata__"]
    return metadata["kind"], metadata["key"], content[end:]


def payload_files(root: Path) -> dict[str, int]:
    """Every file of a payload, wherever it stands, with the bytes that it takes."""
    folders = ("blocks", "sidecars", "staging", "quarantine")
    found: dict[str, int] = {}
    for folder in folders:
        for path, _, names in os.walk(f"{root}/{folder}"):
            for name in names:
                status = os.stat(f"{path}/{name}")  # noqa: PTH116 - done for every state
                blocks = max(status.st_blocks * 512, -(-status.st_size // 4096) * 4096)
                found[f"{path}/{name}".removeprefix(f"{root}/")] = blocks
    return found


def require_sound(store: MutableStore, root: Path, legal: Legal) -> World:
    """The world that is found, which must be legal, with its files and nothing but its files."""
    settle(store)
    wait_for_refused(store)
    assert store.mode.value == "writing", store.mode_detail
    violations = list(store.violations())
    assert not violations, violations
    found = world_of(store, root)
    assert found in legal, difference(found, legal)
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


def wait_for_refused(store: MutableStore) -> None:
    """Wait for the second try of a deletion that was refused: its turn is the janitor's to take."""
    deadline = time.monotonic() + _SECOND_TRY_SECONDS_MAX
    while state_of(store).doomed and time.monotonic() < deadline:
        time.sleep(0.0005)
        store.flush()
        settle(store)


def difference(found: World, legal: Legal) -> str:
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
