"""The folded state: what replaying the events yields, and nothing else.

``State.apply`` is the only thing that changes it, and it decides nothing: a victim is named by its
event. Applying an event twice changes nothing, so a snapshot may overlap the events after it. An
event that cannot be true of the state before it is damage, and stops the replay.
"""

import dataclasses
import heapq
from typing import TypeVar

from . import entries
from .entries import DoomedFile, Entry, Hole, Opening, QuarantinedFile, Segment, StagedFile
from .errors import JournalDamagedError
from .events import (
    Abandoned,
    Adopted,
    Closed,
    Committed,
    Compacted,
    Deleted,
    DeletionRefused,
    Event,
    Evicted,
    Lost,
    Missed,
    NamespaceSeen,
    NotStored,
    Opened,
    Pinned,
    Purged,
    Quarantined,
    Rebuilt,
    Record,
    Reinstated,
    Replaced,
    ReportedBad,
    Restored,
    SegmentDropped,
    SegmentSealed,
    SettingSet,
    Staged,
    Superseded,
    Swept,
    Touched,
    Unpinned,
)
from .tables import Recorded, Tables
from .words import FileName, Kind

Thing = TypeVar("Thing", bound=Recorded)


class State(Tables):
    """Index, recency, ledger, pins, tombstones, holes and settings at one sequence.

    Its owner is whoever appends the events; readers take the owner's lock. Invariants, which
    ``journal.invariants`` checks:

    - a block's parent is live, a hole, or its namespace; a sidecar's block is live;
    - no file is named twice, and ``charges`` are what the named files were charged;
    - recency is total within each kind.
    """

    # The fold.

    def apply(self, record: Record) -> None:
        """Take one event in. One already applied is a no-op; a gap is a JournalDamagedError."""
        if record.sequence <= self.sequence:
            return
        if record.sequence != self.sequence + 1:
            raise JournalDamagedError(
                f"events {self.sequence + 1} to {record.sequence - 1} are missing"
            )
        try:
            self._fold(record)
        except KeyError as error:
            raise JournalDamagedError(
                f"event {record.sequence}, {type(record.event).__name__}, "
                f"speaks of something that is not there: {error}"
            ) from error
        self.sequence = record.sequence

    def _fold(self, record: Record) -> None:
        event = record.event
        match event:
            case Touched() | Superseded():
                self._touch(record.sequence, event)
            case Staged():
                self.staged[event.file] = self._note(
                    StagedFile(
                        file=event.file,
                        key=event.key,
                        generation=event.generation,
                        nbytes=event.nbytes,
                    )
                )
            case Committed():
                if event.file is not None and event.file not in self.staged:
                    raise KeyError(event.file)
                self._add(_entry_of(event, record.sequence))
                if event.file is not None:
                    self._forget(self.staged.pop(event.file))
            case Adopted():
                self._add(_entry_of(event, record.sequence))
            case Replaced():
                if event.file not in self.doomed:
                    raise KeyError(event.file)
            case Abandoned():
                self._forget(self.staged.pop(event.file))
            case Evicted():
                self._evict(event)
            case Deleted():
                self._delete(event.file)
            case DeletionRefused():
                if event.file not in self.quarantined:
                    before = self.doomed[event.file]
                    refused = dataclasses.replace(before, refusals=event.attempts)
                    self.doomed[event.file] = self._note(refused)
                    self.refused_count += bool(refused.refusals) - bool(before.refusals)
            case Quarantined():
                entry = self._require(event.kind, event.key, event.generation)
                if entry.file is None:
                    raise KeyError(f"the file of {event.key.hex()}")
                self._lose(event.kind, event.key)
                kept = self._note(QuarantinedFile(entry=entry, reason=event.reason))
                self.quarantined[kept.file] = kept
                self.charges[entries.QUARANTINED] += entry.allocated_bytes
            case Lost():
                self._require(event.kind, event.key, event.generation)
                self._lose(event.kind, event.key)
            case Reinstated():
                kept = self.quarantined[event.file]
                recency = record.sequence << entries.RECENCY_SHIFT
                self._add(
                    dataclasses.replace(kept.entry, recency=recency, child_count=0, is_short=False)
                )
                self._forget(self.quarantined.pop(event.file))
                self.charges[entries.QUARANTINED] -= kept.entry.allocated_bytes
            case Purged():
                self._purge(event.namespace)
            case ReportedBad():
                self._report_bad(event)
            case _:
                self._fold_about_the_cache(record)

    def _fold_about_the_cache(self, record: Record) -> None:
        event: Event = record.event
        match event:
            case Opened():
                self.epoch = event.epoch
                self.unswept.add(event.epoch)
                self.opening = Opening(
                    epoch=event.epoch,
                    pid=event.pid,
                    boot_id=event.boot_id,
                    versions=event.versions,
                    wall_ns=record.wall_ns,
                )
                self.changed |= {entries.OPENING, entries.EPOCHS}
            case Closed():
                self.unswept.remove(record.epoch)
                self.changed.add(entries.EPOCHS)
            case Swept():
                self.unswept.discard(event.epoch)
                self.changed.add(entries.EPOCHS)
            case Rebuilt():
                self.unswept |= set(event.epochs)
                self.changed.add(entries.EPOCHS)
            case NamespaceSeen():
                self.namespaces[event.namespace] = event.fields
                self.changed.add(entries.NAMESPACES + event.namespace)
            case SettingSet():
                self.settings[event.name] = event.value
                self.changed.add(entries.SETTINGS + event.name.encode())
            case Pinned():
                self.pins.add(event.key)
                self.changed.add(entries.PINS + event.key)
            case Unpinned():
                self.pins.remove(event.key)
                self.changed.add(entries.PINS + event.key)
            case SegmentSealed():
                self.segments[event.first] = self._note(
                    Segment(
                        first=event.first,
                        last=event.last,
                        allocated_bytes=event.allocated_bytes,
                        digest=event.digest,
                    )
                )
                self.charges[entries.SEGMENTS] += event.allocated_bytes
            case SegmentDropped():
                segment = self.segments.pop(event.first, None)
                if segment is not None:
                    self._forget(segment)
                    self.charges[entries.SEGMENTS] -= segment.allocated_bytes
            case Restored() | Missed() | NotStored() | Compacted():
                pass  # kept for the audit; nothing follows from them
            case _:
                raise AssertionError(f"{type(event).__name__} was folded elsewhere")

    def _add(self, entry: Entry) -> None:
        """Make an entry live; an older generation gives way and its file is doomed."""
        table = self.blocks if entry.kind is Kind.BLOCK else self.sidecars
        older = table.get(entry.key)
        if entry.kind is Kind.SIDECAR and entry.key not in self.blocks:
            raise KeyError(entry.key)
        if older is not None:
            entry.child_count = older.child_count
            entry.is_short = older.is_short
            self.charges[older.table] -= older.allocated_bytes
            self._doom(older, "replaced")
        elif entry.kind is Kind.BLOCK:
            hole = self.holes.pop(entry.key, None)
            if hole is not None:
                self._forget(hole)
                entry.child_count = hole.child_count
            else:
                self._attach(entry.parent, entry.namespace)
        if entry.kind is Kind.BLOCK and older is None:
            self.population[entry.namespace] += 1
            self._count_short(entry)
        table[entry.key] = self._note(entry)
        self.charges[entry.table] += entry.allocated_bytes
        self._push_leaf(entry)

    def _require(self, kind: Kind, key: bytes, generation: int) -> Entry:
        """The live entry that an event speaks of; of another generation it cannot be true."""
        entry = self.entry(kind, key)
        if entry is None or entry.generation != generation:
            raise KeyError(f"generation {generation} of {key.hex()}")
        return entry

    def _evict(self, event: Evicted) -> None:
        entry = self._require(event.kind, event.key, event.generation)
        if event.kind is Kind.SIDECAR:
            self._doom(self._drop(self.sidecars, event.key), event.reason)
            return
        if entry.child_count or event.key in self.sidecars:
            raise KeyError(f"{event.key.hex()} still carries a sidecar or blocks")
        self._drop(self.blocks, event.key)
        self._doom(entry, event.reason)
        parent = self.blocks.get(entry.parent)
        if parent is not None and parent.recency < entry.recency:
            # Only endpoints are touched, so a parent looks older than it is while it has children.
            parent.recency = entry.recency
            self._note(parent)
        self._detach(entry.parent)

    def _lose(self, kind: Kind, key: bytes) -> Entry:
        """Drop an entry that is damaged or not there; a block with blocks below becomes a hole."""
        if kind is Kind.SIDECAR:
            return self._drop(self.sidecars, key)
        sidecar = self.sidecars.get(key)
        if sidecar is not None:
            self._doom(self._drop(self.sidecars, key), "pair")
        entry = self._drop(self.blocks, key)
        if entry.child_count:
            self.holes[key] = self._note(
                Hole(
                    key=key,
                    parent=entry.parent,
                    namespace=entry.namespace,
                    child_count=entry.child_count,
                )
            )
        else:
            self._detach(entry.parent)
        return entry

    def _report_bad(self, event: ReportedBad) -> None:
        below = self.descendants(event.key)
        for key in reversed(below):
            self._drop_pair(key, "reported_bad")
        if event.kind is Kind.BLOCK and event.key in self.blocks:
            self._drop_pair(event.key, "reported_bad")
        elif event.kind is Kind.SIDECAR and event.key in self.sidecars:
            self._doom(self._drop(self.sidecars, event.key), "reported_bad")

    def _drop_pair(self, key: bytes, reason: str) -> None:
        if key in self.sidecars:
            self._doom(self._drop(self.sidecars, key), reason)
        entry = self._drop(self.blocks, key)
        self._doom(entry, reason)
        self._detach(entry.parent)

    def _purge(self, namespace: bytes) -> None:
        for table in (self.sidecars, self.blocks):
            for entry in [each for each in table.values() if each.namespace == namespace]:
                self._doom(self._drop(table, entry.key), "purged")
        for hole in [each for each in self.holes.values() if each.namespace == namespace]:
            self._forget(self.holes.pop(hole.key))

    def _delete(self, file: FileName) -> None:
        kept = self.quarantined.pop(file, None)
        if kept is not None:
            self._forget(kept)
            self.charges[entries.QUARANTINED] -= kept.entry.allocated_bytes
            return
        doomed = self.doomed.pop(file)
        self._forget(doomed)
        self.charges[entries.DOOMED] -= doomed.allocated_bytes
        self.refused_count -= bool(doomed.refusals)

    def _touch(self, sequence: int, event: Touched | Superseded) -> None:
        for index, key in enumerate(event.keys):
            for entry in self.pair(key):
                if isinstance(event, Touched):
                    entry.recency = (sequence << entries.RECENCY_SHIFT) + index
                elif entry.recency >= 0:
                    entry.recency -= entries.SUPERSEDED
                self._push_leaf(self._note(entry))

    def _drop(self, table: dict[bytes, Entry], key: bytes) -> Entry:
        entry = table.pop(key)
        self.charges[entry.table] -= entry.allocated_bytes
        if entry.kind is Kind.BLOCK:
            self.population[entry.namespace] -= 1
            self._discount_short(entry)
        self._forget(entry)
        return entry

    def _doom(self, entry: Entry, reason: str) -> None:
        """A dropped entry's file, if it has one, stays charged until it is deleted."""
        if entry.file is None:
            return
        self.doomed[entry.file] = self._note(
            DoomedFile(
                file=entry.file,
                nbytes=entry.nbytes,
                allocated_bytes=entry.allocated_bytes,
                reason=reason,
            )
        )
        self.charges[entries.DOOMED] += entry.allocated_bytes

    def _attach(self, parent: bytes, namespace: bytes) -> None:
        above = self.blocks.get(parent) or self.holes.get(parent)
        if above is not None:
            above.child_count += 1
        elif parent != namespace:
            raise KeyError(parent)

    def _detach(self, parent: bytes) -> None:
        while True:
            block = self.blocks.get(parent)
            if block is not None:
                block.child_count -= 1
                self._push_leaf(block)
                return
            hole = self.holes.get(parent)
            if hole is None:
                return
            hole.child_count -= 1
            if hole.child_count:
                return
            self._forget(self.holes.pop(parent))
            parent = hole.parent

    def _push_leaf(self, entry: Entry) -> None:
        if entry.kind is Kind.BLOCK and not entry.child_count:
            heapq.heappush(self._leaves, (entry.recency, entry.key))
            if len(self._leaves) > 2 * len(self.blocks) + 1024:
                self._leaves = [
                    (each.recency, each.key)
                    for each in self.blocks.values()
                    if not each.child_count
                ]
                heapq.heapify(self._leaves)

    def _note(self, thing: Thing) -> Thing:
        self.changed.add(thing.record_id)
        return thing

    def _forget(self, thing: Recorded) -> None:
        self.changed.add(thing.record_id)


def _entry_of(event: Committed | Adopted, sequence: int) -> Entry:
    return Entry(
        kind=event.kind,
        key=event.key,
        parent=event.parent,
        namespace=event.namespace,
        start=event.start,
        end=event.end,
        generation=event.generation,
        file=event.file,
        nbytes=event.nbytes,
        allocated_bytes=event.allocated_bytes,
        header_digest=event.header_digest,
        plan_digest=event.plan_digest,
        prefill_seconds=event.prefill_seconds,
        sequence=sequence,
        recency=sequence << entries.RECENCY_SHIFT,
    )
