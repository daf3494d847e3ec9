"""What the folded state is made of, each thing with its record: an id and a CBOR value.

Records are how the compactor writes the state down, one by one as they change, and how two states
are compared. The first byte of an id names the table.
"""

from dataclasses import dataclass
from typing import Any

import cbor2

from .words import FileName, Kind

# One byte a table. Part of the snapshot's format.
BLOCKS = b"b"
SIDECARS = b"s"
HOLES = b"h"
STAGED = b"t"
DOOMED = b"d"
QUARANTINED = b"q"
NAMESPACES = b"n"
SETTINGS = b"o"
PINS = b"p"
SEGMENTS = b"a"
EPOCHS = b"e"
OPENING = b"w"

# Room in a recency for the uses that one Touched lists.
RECENCY_SHIFT = 16

# What was superseded has a recency that is less by this, and so less than that of any other.
SUPERSEDED = 1 << 62

# Read twice for each entry of a snapshot. Calling ``Kind`` instead made loading a fifth slower.
_KIND_OF_NUMBER = {kind.value: kind for kind in Kind}

_TABLE_OF_KIND = {Kind.BLOCK: BLOCKS, Kind.SIDECAR: SIDECARS}


@dataclass(slots=True, kw_only=True)
class Entry:
    """One live payload. ``State`` owns it: only ``apply`` changes ``recency`` and ``child_count``.

    ``recency`` is the sequence of the last use, shifted to leave room for the uses that one
    ``Touched`` lists, so it is total within a kind; it is negative once the entry is superseded,
    until it is used again. ``child_count`` counts the blocks and holes directly below a block;
    ``is_short`` is set on a block that ``Tables.short`` counts. Both are derived and not part of
    the record.
    """

    kind: Kind
    key: bytes
    parent: bytes
    namespace: bytes
    start: int
    end: int
    generation: int
    file: FileName | None
    nbytes: int
    allocated_bytes: int
    header_digest: bytes
    plan_digest: bytes
    prefill_seconds: float
    sequence: int
    recency: int
    child_count: int = 0
    is_short: bool = False

    @property
    def table(self) -> bytes:
        return _TABLE_OF_KIND[self.kind]

    @property
    def record_id(self) -> bytes:
        return self.table + self.key

    @property
    def last_use(self) -> int:
        """The sequence of the event that used it last."""
        return self.recency % SUPERSEDED >> RECENCY_SHIFT

    def values(self) -> list[Any]:
        return [
            self.kind,
            self.key,
            self.parent,
            self.namespace,
            self.start,
            self.end,
            self.generation,
            self.file,
            self.nbytes,
            self.allocated_bytes,
            self.header_digest,
            self.plan_digest,
            self.prefill_seconds,
            self.sequence,
            self.recency,
        ]

    def record(self) -> bytes:
        return cbor2.dumps(self.values())


@dataclass(slots=True, kw_only=True)
class Hole:
    """A block that was lost or quarantined while blocks below it still stand."""

    key: bytes
    parent: bytes
    namespace: bytes
    child_count: int = 0

    @property
    def record_id(self) -> bytes:
        return HOLES + self.key

    def record(self) -> bytes:
        return cbor2.dumps([self.key, self.parent, self.namespace])


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """A payload that was being written when the last event was."""

    file: FileName
    key: bytes
    generation: int
    nbytes: int

    @property
    def record_id(self) -> bytes:
        return STAGED + file_id(self.file)

    def record(self) -> bytes:
        return cbor2.dumps([self.file, self.key, self.generation, self.nbytes])


@dataclass(frozen=True, slots=True, kw_only=True)
class DoomedFile:
    """A file that an event has dropped and that still stands, or may."""

    file: FileName
    nbytes: int
    allocated_bytes: int
    reason: str
    refusals: int = 0

    @property
    def record_id(self) -> bytes:
        return DOOMED + file_id(self.file)

    def record(self) -> bytes:
        return cbor2.dumps(
            [self.file, self.nbytes, self.allocated_bytes, self.reason, self.refusals]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedFile:
    """A payload that did not verify, with the entry that it was."""

    entry: Entry
    reason: str

    @property
    def file(self) -> FileName:
        assert self.entry.file is not None
        return self.entry.file

    @property
    def record_id(self) -> bytes:
        return QUARANTINED + file_id(self.file)

    def record(self) -> bytes:
        return cbor2.dumps([*self.entry.values(), self.reason])


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A sealed segment of old events under ``archive/``."""

    first: int
    last: int
    allocated_bytes: int
    digest: bytes

    @property
    def record_id(self) -> bytes:
        return SEGMENTS + self.first.to_bytes(8, "big")

    @property
    def path(self) -> str:
        return f"archive/{self.first:016x}"

    def record(self) -> bytes:
        return cbor2.dumps([self.first, self.last, self.allocated_bytes, self.digest])


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Who opened the cache last."""

    epoch: int
    pid: int
    boot_id: str
    versions: str
    wall_ns: int

    record_id = OPENING

    def record(self) -> bytes:
        return cbor2.dumps([self.epoch, self.pid, self.boot_id, self.versions, self.wall_ns])


def file_id(file: FileName) -> bytes:
    """A file's name as 9 bytes."""
    return bytes([file.kind]) + file.epoch.to_bytes(4, "big") + file.counter.to_bytes(4, "big")


def read_file_name(value: Any) -> FileName:
    kind, epoch, counter = value
    return FileName(_KIND_OF_NUMBER[kind], epoch, counter)


def read_entry(values: list[Any]) -> Entry:
    """The entry whose ``values`` these are; KeyError or ValueError if they are none's."""
    (
        kind,
        key,
        parent,
        namespace,
        start,
        end,
        generation,
        file,
        nbytes,
        allocated_bytes,
        header_digest,
        plan_digest,
        prefill_seconds,
        sequence,
        recency,
    ) = values
    return Entry(
        kind=_KIND_OF_NUMBER[kind],
        key=key,
        parent=parent,
        namespace=namespace,
        start=start,
        end=end,
        generation=generation,
        file=None if file is None else read_file_name(file),
        nbytes=nbytes,
        allocated_bytes=allocated_bytes,
        header_digest=header_digest,
        plan_digest=plan_digest,
        prefill_seconds=prefill_seconds,
        sequence=sequence,
        recency=recency,
    )
