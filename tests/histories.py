"""Histories that can be true: events made up one by one, each legal for the state before it."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar

from blake3 import blake3

from walkback.journal.entries import Entry
from walkback.journal.events import (
    Abandoned,
    Adopted,
    Closed,
    Committed,
    Deleted,
    DeletionRefused,
    Event,
    Evicted,
    Lost,
    NamespaceSeen,
    Opened,
    Pinned,
    Purged,
    Quarantined,
    Record,
    Reinstated,
    Replaced,
    ReportedBad,
    SegmentDropped,
    SegmentSealed,
    SettingSet,
    Staged,
    Superseded,
    Swept,
    Touched,
    Unpinned,
)
from walkback.journal.state import State
from walkback.journal.words import AbandonReason, Cause, EvictReason, FileName, Kind

ROOTS = (blake3(b"one").digest(), blake3(b"two").digest())
TOKENS = 16


def child_key(parent: bytes, index: int) -> bytes:
    return blake3(parent + bytes([index])).digest()


class Historian:
    """Makes records one after the other and keeps the state that they give."""

    def __init__(self) -> None:
        self.state = State()
        self.records: list[Record] = []
        self._counter = 0
        self._ends = dict.fromkeys(ROOTS, 0)
        self.say(Opened(epoch=1, pid=1, boot_id="boot", versions="1"))

    def say(self, *events: Event) -> None:
        """Append events and fold them in."""
        for event in events:
            record = Record(
                sequence=self.state.sequence + 1,
                wall_ns=0,
                epoch=event.epoch if isinstance(event, Opened) else self.state.epoch,
                event=event,
            )
            self.state.apply(record)
            self.records.append(record)

    # Events, made legal.

    def file(self, kind: Kind) -> FileName:
        self._counter += 1
        return FileName(kind, self.state.epoch, self._counter)

    def staged(self, kind: Kind, key: bytes, generation: int = 1) -> Staged:
        return Staged(
            kind=kind,
            key=key,
            generation=generation,
            file=self.file(kind),
            nbytes=4000,
            cause=Cause.PREFILL,
            restored_from=None,
        )

    def committed(
        self, kind: Kind, key: bytes, parent: bytes, file: FileName | None, generation: int = 1
    ) -> Committed:
        start = self._ends[parent]
        end = self._ends.setdefault(key, start + TOKENS)
        return Committed(
            kind=kind,
            key=key,
            parent=parent,
            namespace=self.namespace_of(parent),
            start=end if kind is Kind.SIDECAR else start,
            end=end,
            generation=generation,
            file=file,
            nbytes=4000 if file else 0,
            allocated_bytes=4096 if file else 0,
            header_digest=bytes(32),
            plan_digest=bytes(16),
            prefill_seconds=0.25,
        )

    def namespace_of(self, parent: bytes) -> bytes:
        if parent in ROOTS:
            return parent
        above = self.state.blocks.get(parent) or self.state.holes[parent]
        return above.namespace

    def store(self, kind: Kind, key: bytes, parent: bytes, *, has_file: bool = True) -> None:
        """Store or replace an entry."""
        older = self.state.entry(kind, key)
        generation = 1 if older is None else older.generation + 1
        file = None
        if has_file:
            staged = self.staged(kind, key, generation)
            file = staged.file
            self.say(staged)
        self.say(self.committed(kind, key, parent, file, generation))
        if older is not None and older.file is not None:
            self.say(Replaced(kind=kind, key=key, generation=older.generation, file=older.file))

    def block(self, parent: bytes, index: int = 0, *, has_file: bool = True) -> bytes:
        """Store a block below a parent and return its key."""
        key = child_key(parent, index)
        self.store(Kind.BLOCK, key, parent, has_file=has_file)
        return key

    def tail(self, parent: bytes, length: int) -> bytes:
        """Store a block of fewer tokens below a parent and return its key."""
        key = child_key(parent, TOKENS + length)
        self._ends.setdefault(key, self._ends[parent] + length)
        self.store(Kind.BLOCK, key, parent)
        return key

    def full_blocks(self) -> list[bytes]:
        """The keys that a block may stand below: not those of tails."""
        return [
            key for key, block in self.state.blocks.items() if block.end - block.start == TOKENS
        ]

    def sidecar(self, key: bytes) -> None:
        self.store(Kind.SIDECAR, key, self.state.blocks[key].parent)

    def chain(self, count: int, root: bytes = ROOTS[0]) -> list[bytes]:
        """Store blocks below one another, each with a sidecar."""
        keys: list[bytes] = []
        for _ in range(count):
            keys.append(self.block(keys[-1] if keys else root))
            self.sidecar(keys[-1])
        return keys

    def evicted(self, entry: Entry) -> Evicted:
        return Evicted(
            kind=entry.kind,
            key=entry.key,
            generation=entry.generation,
            reason=EvictReason.BUDGET,
            policy="lru",
            budget_bytes=0,
            need_bytes=0,
        )

    def evict(self, key: bytes) -> None:
        """Evict a leaf with its sidecar."""
        pair = self.state.sidecars.get(key)
        if pair is not None:
            self.say(self.evicted(pair))
        self.say(self.evicted(self.state.blocks[key]))

    def touch(self, *keys: bytes) -> None:
        self.say(Touched(keys=keys))

    def supersede(self, *keys: bytes) -> None:
        self.say(Superseded(keys=keys))

    def quarantine(self, kind: Kind, key: bytes) -> FileName:
        entry = self.state.entry(kind, key)
        assert entry is not None and entry.file is not None
        self.say(
            Quarantined(kind=kind, key=key, generation=entry.generation, reason="its data differs")
        )
        return entry.file

    def lose(self, kind: Kind, key: bytes) -> None:
        entry = self.state.entry(kind, key)
        assert entry is not None
        self.say(Lost(kind=kind, key=key, generation=entry.generation, reason="not there"))

    # Random steps.

    def step(self, choice: int, pick: int) -> None:
        """Do the thing that ``choice`` names to what ``pick`` names, if there is such a thing."""
        _STEPS[choice % len(_STEPS)](self, pick)


Thing = TypeVar("Thing")


def _pick(things: Iterable[Thing], pick: int) -> Thing | None:
    found = list(things)
    return found[pick % len(found)] if found else None


def _store_block(history: Historian, pick: int) -> None:
    parent = _pick([*ROOTS, *history.full_blocks()], pick // 2)
    assert parent is not None
    history.block(parent, pick % 2, has_file=pick % 5 != 0)


def _store_tail(history: Historian, pick: int) -> None:
    parent = _pick([*ROOTS, *history.full_blocks()], pick // 2)
    assert parent is not None
    history.tail(parent, 1 + pick % 3)


def _store_chain(history: Historian, pick: int) -> None:
    parent = _pick([*ROOTS, *history.full_blocks()], pick // 2)
    assert parent is not None
    for _ in range(3):
        parent = history.block(parent, pick % 2)
        if pick % 3:
            history.sidecar(parent)


def _make_hole(history: Historian, pick: int) -> None:
    inner = _pick([each for each in history.state.blocks.values() if each.child_count], pick)
    if inner is not None:
        history.lose(Kind.BLOCK, inner.key)


def _store_sidecar(history: Historian, pick: int) -> None:
    key = _pick(history.state.blocks, pick)
    if key is not None:
        history.sidecar(key)


def _heal(history: Historian, pick: int) -> None:
    hole = _pick(history.state.holes.values(), pick)
    if hole is not None and (hole.parent in ROOTS or hole.parent in history.state.blocks):
        history.store(Kind.BLOCK, hole.key, hole.parent)


def _adopt(history: Historian, pick: int) -> None:
    parent = _pick([*ROOTS, *history.full_blocks()], pick // 2)
    assert parent is not None
    key = child_key(parent, pick % 2)
    older = history.state.blocks.get(key)
    committed = history.committed(
        Kind.BLOCK,
        key,
        parent,
        history.file(Kind.BLOCK),
        1 if older is None else older.generation + 1,
    )
    fields = {each.name: getattr(committed, each.name) for each in dataclasses.fields(Committed)}
    history.say(Adopted(**fields))


def _touch(history: Historian, pick: int) -> None:
    keys = list(history.state.blocks)
    if keys:
        first, second = keys[pick % len(keys)], keys[pick // 7 % len(keys)]
        history.touch(*dict.fromkeys((first, second)))


def _supersede(history: Historian, pick: int) -> None:
    key = _pick(history.state.blocks, pick)
    if key is not None:
        history.supersede(key)


def _evict_leaf(history: Historian, pick: int) -> None:
    leaf = _pick([each for each in history.state.blocks.values() if not each.child_count], pick)
    if leaf is not None:
        history.evict(leaf.key)


def _thin(history: Historian, pick: int) -> None:
    sidecar = _pick(history.state.sidecars.values(), pick)
    if sidecar is not None:
        history.say(history.evicted(sidecar))


def _delete(history: Historian, pick: int) -> None:
    file = _pick([*history.state.doomed, *history.state.quarantined], pick)
    if file is not None:
        history.say(Deleted(file=file, already_gone=False))


def _refuse(history: Historian, pick: int) -> None:
    file = _pick([*history.state.doomed, *history.state.quarantined], pick)
    if file is not None:
        history.say(DeletionRefused(file=file, reason="no", attempts=1 + pick % 3))


def _damage(history: Historian, pick: int) -> None:
    state = history.state
    entry = _pick([*state.blocks.values(), *state.sidecars.values()], pick // 2)
    if entry is not None and (pick % 2 or entry.file is None):
        history.lose(entry.kind, entry.key)
    elif entry is not None:
        history.quarantine(entry.kind, entry.key)


def _reinstate(history: Historian, pick: int) -> None:
    kept = _pick(history.state.quarantined.values(), pick)
    if kept is None:
        return
    entry = kept.entry
    above = entry.key if entry.kind is Kind.SIDECAR else entry.parent
    has_place = above in history.state.blocks or (entry.kind is Kind.BLOCK and above in ROOTS)
    if has_place and history.state.entry(entry.kind, entry.key) is None:
        history.say(Reinstated(file=kept.file))


def _purge(history: Historian, pick: int) -> None:
    if pick % 4 == 0:
        history.say(Purged(namespace=ROOTS[pick // 4 % 2]))


def _report_bad(history: Historian, pick: int) -> None:
    key = _pick([*history.state.blocks, *history.state.holes], pick // 2)
    if key is not None:
        history.say(ReportedBad(kind=Kind(pick % 2), key=key, detail="it loops"))


def _pin(history: Historian, pick: int) -> None:
    key = _pick([*history.state.blocks, *history.state.pins], pick)
    if key is not None:
        history.say(Unpinned(key=key) if key in history.state.pins else Pinned(key=key))


def _reopen(history: Historian, pick: int) -> None:
    epoch = history.state.epoch
    for file in list(history.state.staged):
        history.say(Abandoned(file=file, reason=AbandonReason.CRASH))
    if pick % 2 and epoch in history.state.unswept:
        history.say(Closed(files=()))
    history.say(Opened(epoch=epoch + 1, pid=1, boot_id="boot", versions="1"))
    history.say(Swept(epoch=epoch, file_count=0, nbytes=0))


def _set(history: Historian, pick: int) -> None:
    history.say(SettingSet(name=f"setting_{pick % 2}", value=pick))
    history.say(NamespaceSeen(namespace=ROOTS[pick % 2], fields=(("weights", str(pick)),)))


def _seal(history: Historian, pick: int) -> None:
    segment = _pick(history.state.segments.values(), pick)
    if segment is not None and pick % 2:
        history.say(SegmentDropped(first=segment.first, last=segment.last, reason="old"))
    else:
        at = history.state.sequence
        history.say(SegmentSealed(first=at, last=at, allocated_bytes=4096, digest=bytes(32)))


def _stage_in_vain(history: Historian, pick: int) -> None:
    file = _pick(history.state.staged, pick)
    if file is not None and pick % 2:
        history.say(Abandoned(file=file, reason=AbandonReason.CRASH))
    else:
        history.say(history.staged(Kind.BLOCK, child_key(ROOTS[0], pick % 3)))


_STEPS: tuple[Callable[[Historian, int], None], ...] = (
    *(_store_block,) * 4,
    *(_store_chain,) * 2,
    *(_store_tail,) * 3,
    *(_store_sidecar,) * 4,
    *(_touch,) * 2,
    _supersede,
    *(_evict_leaf,) * 2,
    *(_delete,) * 2,
    *(_damage,) * 2,
    *(_heal,) * 2,
    _make_hole,
    _adopt,
    _thin,
    _refuse,
    _reinstate,
    _purge,
    _report_bad,
    _pin,
    _reopen,
    _set,
    _seal,
    _stage_in_vain,
)
