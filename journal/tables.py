"""The tables of the folded state, and their records.

A record is an id and a CBOR value. The compactor writes those down that changed; two states are the
same when their records are. What can be derived (child counts, the byte total, the order of the
leaves) is in no record and is made again when records are read.
"""

import heapq
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import Protocol, Self

import cbor2

from . import entries
from .entries import (
    DoomedFile,
    Entry,
    Hole,
    Opening,
    QuarantinedFile,
    Segment,
    StagedFile,
    read_entry,
    read_file_name,
)
from .errors import JournalDamagedError
from .words import FileName, Kind


class Recorded(Protocol):
    @property
    def record_id(self) -> bytes: ...

    def record(self) -> bytes: ...


class Tables:
    """What is live, doomed, quarantined, staged, pinned and set. ``State`` is the only subclass."""

    def __init__(self) -> None:
        self.sequence = 0
        self.epoch = 0
        self.unswept: set[int] = set()
        self.opening: Opening | None = None
        self.blocks: dict[bytes, Entry] = {}
        self.sidecars: dict[bytes, Entry] = {}
        self.holes: dict[bytes, Hole] = {}
        self.staged: dict[FileName, StagedFile] = {}
        self.doomed: dict[FileName, DoomedFile] = {}
        self.quarantined: dict[FileName, QuarantinedFile] = {}
        self.namespaces: dict[bytes, tuple[tuple[str, str], ...]] = {}
        self.settings: dict[str, int] = {}
        self.pins: set[bytes] = set()
        self.segments: dict[int, Segment] = {}
        # Allocated bytes of every file that is named, by the table that names it: running sums.
        self.charges: Counter[bytes] = Counter()
        # Doomed files whose deletion was refused.
        self.refused_count: int = 0
        # Live blocks of each namespace.
        self.population: Counter[bytes] = Counter()
        self.changed: set[bytes] = set()
        # Below each block or namespace: how many live blocks there are of each length, of those
        # that may be tails. A prompt's keys do not tell where tails end, so a lookup asks here.
        self.short: dict[bytes, Counter[int]] = {}
        self._leaves: list[tuple[int, bytes]] = []

    # Questions.

    @property
    def used_bytes(self) -> int:
        """Allocated bytes of every file that is named: live, doomed, quarantined, segments."""
        return self.charges.total()

    def entry(self, kind: Kind, key: bytes) -> Entry | None:
        """The live entry of a kind and key."""
        return (self.blocks if kind is Kind.BLOCK else self.sidecars).get(key)

    def pair(self, key: bytes) -> list[Entry]:
        """The live block of a key and its sidecar, as far as they are there."""
        return [table[key] for table in (self.blocks, self.sidecars) if key in table]

    def short_lengths(self, parent: bytes) -> list[int]:
        """The lengths of the blocks below a block or namespace that may be tails, longest first.

        First blocks of a prompt are there whatever their length: nothing stands before them to
        tell.
        """
        return sorted(self.short.get(parent, ()), reverse=True)

    def coldest_leaves(self) -> Generator[Entry]:
        """The blocks without live descendants, least recently used first.

        Entries that went stale are dropped on the way, which makes this amortised O(log n) a leaf.
        The state must not change until the iterator is closed.
        """
        seen: list[tuple[int, bytes]] = []
        try:
            while self._leaves:
                leaf = heapq.heappop(self._leaves)
                recency, key = leaf
                entry = self.blocks.get(key)
                if entry is None or entry.child_count or entry.recency != recency:
                    continue
                if seen and seen[-1] == leaf:
                    continue
                seen.append(leaf)
                yield entry
        finally:
            for leaf in seen:
                heapq.heappush(self._leaves, leaf)

    def descendants(self, *keys: bytes) -> list[bytes]:
        """The keys of all blocks below any of ``keys``, parents first. O(blocks), for rare events.

        A block below two of them is there twice.
        """
        children: dict[bytes, list[bytes]] = {}
        for below in (*self.blocks.values(), *self.holes.values()):
            children.setdefault(below.parent, []).append(below.key)
        found: list[bytes] = []
        pending = list(keys)
        while pending:
            below = children.get(pending.pop(), [])
            found.extend(below)
            pending.extend(below)
        return [each for each in found if each in self.blocks]

    # Records.

    def take_changed(self) -> set[bytes]:
        """The ids of the records that changed since this was asked last."""
        changed, self.changed = self.changed, set()
        return changed

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Every record, in no order that means anything."""
        for table in (self.blocks, self.sidecars, self.holes):
            yield from _records(table.values())
        for table in (self.staged, self.doomed, self.quarantined):
            yield from _records(table.values())
        yield from _records(self.segments.values())
        for namespace in self.namespaces:
            yield self._known(entries.NAMESPACES + namespace)
        for name in self.settings:
            yield self._known(entries.SETTINGS + name.encode())
        for key in self.pins:
            yield self._known(entries.PINS + key)
        if self.opening is not None:
            yield self._known(entries.OPENING)
            yield self._known(entries.EPOCHS)

    def record(self, record_id: bytes) -> bytes | None:
        """The value of one record, or None if there is no such thing any more."""
        table, rest = record_id[:1], record_id[1:]
        match table:
            case entries.BLOCKS:
                return _value(self.blocks.get(rest))
            case entries.SIDECARS:
                return _value(self.sidecars.get(rest))
            case entries.HOLES:
                return _value(self.holes.get(rest))
            case entries.STAGED:
                return _value(self.staged.get(_file_of(rest)))
            case entries.DOOMED:
                return _value(self.doomed.get(_file_of(rest)))
            case entries.QUARANTINED:
                return _value(self.quarantined.get(_file_of(rest)))
            case entries.SEGMENTS:
                return _value(self.segments.get(int.from_bytes(rest, "big")))
            case entries.NAMESPACES:
                fields = self.namespaces.get(rest)
                return None if fields is None else cbor2.dumps(fields)
            case entries.SETTINGS:
                value = self.settings.get(rest.decode())
                return None if value is None else cbor2.dumps(value)
            case entries.PINS:
                return cbor2.dumps(True) if rest in self.pins else None
            case entries.EPOCHS:
                return cbor2.dumps([self.epoch, *sorted(self.unswept)])
            case entries.OPENING:
                return _value(self.opening)
            case _:
                raise JournalDamagedError(f"a snapshot record of the unknown table {table!r}")

    @classmethod
    def from_records(cls, sequence: int, records: Iterable[tuple[bytes, bytes]]) -> Self:
        """The state that these records were taken from, at ``sequence``."""
        state = cls()
        state.sequence = sequence
        try:
            for record_id, value in records:
                state._read(record_id, value)
        except (cbor2.CBORDecodeError, KeyError, TypeError, ValueError) as error:
            raise JournalDamagedError(f"a snapshot record does not decode: {error}") from error
        state._derive()
        return state

    def _read(self, record_id: bytes, value: bytes) -> None:
        table, rest = record_id[:1], record_id[1:]
        values = cbor2.loads(value)
        match table:
            case entries.BLOCKS:
                self.blocks[rest] = read_entry(values)
            case entries.SIDECARS:
                self.sidecars[rest] = read_entry(values)
            case entries.HOLES:
                key, parent, namespace = values
                self.holes[rest] = Hole(key=key, parent=parent, namespace=namespace)
            case entries.STAGED:
                name, key, generation, nbytes = values
                file = read_file_name(name)
                self.staged[file] = StagedFile(
                    file=file, key=key, generation=generation, nbytes=nbytes
                )
            case entries.DOOMED:
                name, nbytes, allocated_bytes, reason, refusals = values
                file = read_file_name(name)
                self.doomed[file] = DoomedFile(
                    file=file,
                    nbytes=nbytes,
                    allocated_bytes=allocated_bytes,
                    reason=reason,
                    refusals=refusals,
                )
            case entries.QUARANTINED:
                *entry_values, reason = values
                kept = QuarantinedFile(entry=read_entry(entry_values), reason=reason)
                self.quarantined[kept.file] = kept
            case entries.SEGMENTS:
                first, last, allocated_bytes, digest = values
                self.segments[first] = Segment(
                    first=first, last=last, allocated_bytes=allocated_bytes, digest=digest
                )
            case entries.NAMESPACES:
                self.namespaces[rest] = tuple((name, text) for name, text in values)
            case entries.SETTINGS:
                self.settings[rest.decode()] = values
            case entries.PINS:
                self.pins.add(rest)
            case entries.EPOCHS:
                self.epoch, *unswept = values
                self.unswept = set(unswept)
            case entries.OPENING:
                epoch, pid, boot_id, versions, wall_ns = values
                self.opening = Opening(
                    epoch=epoch, pid=pid, boot_id=boot_id, versions=versions, wall_ns=wall_ns
                )
            case _:
                raise JournalDamagedError(f"a snapshot record of the unknown table {table!r}")

    def _derive(self) -> None:
        for below in (*self.blocks.values(), *self.holes.values()):
            above = self.blocks.get(below.parent) or self.holes.get(below.parent)
            if above is not None:
                above.child_count += 1
        for entry in self.blocks.values():
            self._count_short(entry)
        self.population = Counter(entry.namespace for entry in self.blocks.values())
        self._leaves = [
            (entry.recency, entry.key) for entry in self.blocks.values() if not entry.child_count
        ]
        heapq.heapify(self._leaves)
        self.charges = self.sum_of_charges()
        self.refused_count = sum(bool(doomed.refusals) for doomed in self.doomed.values())

    def _count_short(self, entry: Entry) -> None:
        """Count a block that is shorter than the one before it, or that has none before it."""
        above = self.blocks.get(entry.parent)
        length = entry.end - entry.start
        entry.is_short = above is None or length < above.end - above.start
        if entry.is_short:
            self.short.setdefault(entry.parent, Counter())[length] += 1

    def _discount_short(self, entry: Entry) -> None:
        if entry.is_short:
            lengths = self.short[entry.parent]
            lengths[entry.end - entry.start] -= 1
            self.short[entry.parent] = +lengths
            if not self.short[entry.parent]:
                del self.short[entry.parent]

    def sum_of_charges(self) -> Counter[bytes]:
        """``charges``, added up anew."""
        kept = [each.entry for each in self.quarantined.values()]
        charged = {
            entries.BLOCKS: self.blocks.values(),
            entries.SIDECARS: self.sidecars.values(),
            entries.DOOMED: self.doomed.values(),
            entries.QUARANTINED: kept,
            entries.SEGMENTS: self.segments.values(),
        }
        return Counter(
            {
                table: sum(each.allocated_bytes for each in things)
                for table, things in charged.items()
            }
        )

    def _known(self, record_id: bytes) -> tuple[bytes, bytes]:
        value = self.record(record_id)
        assert value is not None
        return record_id, value


def _records(things: Iterable[Recorded]) -> Iterator[tuple[bytes, bytes]]:
    for thing in things:
        yield thing.record_id, thing.record()


def _value(thing: Recorded | None) -> bytes | None:
    return None if thing is None else thing.record()


def _file_of(identity: bytes) -> FileName:
    return FileName(
        Kind(identity[0]),
        int.from_bytes(identity[1:5], "big"),
        int.from_bytes(identity[5:9], "big"),
    )
