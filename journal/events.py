"""The events: facts that are already true, in the order in which they became so.

Rules:

- an event never asks for anything; ``Evicted`` and ``Quarantined`` are the two that leave work on
  disk, and whoever replays them finishes it;
- fields are positional and append-only: a new field goes last and has a default. A new kind of
  event takes a new tag. A tag is never used again;
- no event holds token ids, text or a request's body. Block keys are keyed hashes.

``journal.codec`` writes them as CBOR arrays, ``journal.state`` folds them.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from .words import AbandonReason, Cause, EvictReason, FileName, Kind, MissReason, NotStoredReason

# A process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An epoch began: one opening of the cache for writing."""

    TAG: ClassVar[int] = 1
    epoch: int
    pid: int
    boot_id: str
    versions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The epoch ended in order. ``files``: name, bytes, inode, mtime_ns of the journal."""

    TAG: ClassVar[int] = 2
    files: tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What an unclean epoch left behind is gone."""

    TAG: ClassVar[int] = 3
    epoch: int
    file_count: int
    nbytes: int


# A payload.


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Bytes are reserved for a payload that is being written.

    ``restored_from`` is the sequence of the endpoint's Committed, if the request resumed from one.
    """

    TAG: ClassVar[int] = 10
    kind: Kind
    key: bytes
    generation: int
    file: FileName
    nbytes: int
    cause: Cause
    restored_from: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What the two events that make an entry say of it.

    ``parent`` is the parent block's key, or the namespace for the first block. ``start`` and
    ``end`` are token positions; a sidecar's are both its boundary. A block without bytes has no
    ``file``.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Payload):
    """A payload is durable under its final name, and from here on it exists."""

    TAG: ClassVar[int] = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """The Committed just before it gave an entry a new generation: the old one's file is doomed."""

    TAG: ClassVar[int] = 12
    kind: Kind
    key: bytes
    generation: int
    file: FileName


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """A Staged payload will not become an entry; its file, if any, is gone or is swept."""

    TAG: ClassVar[int] = 13
    file: FileName
    reason: AbandonReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """The tombstone: the entry is gone from the index and its file is doomed."""

    TAG: ClassVar[int] = 14
    kind: Kind
    key: bytes
    generation: int
    reason: EvictReason
    policy: str
    budget_bytes: int
    need_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """A doomed or quarantined file is off the disk, and its bytes are off the ledger."""

    TAG: ClassVar[int] = 15
    file: FileName
    already_gone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionRefused:
    """A doomed file could not be removed. Its bytes stay charged; it is tried again later."""

    TAG: ClassVar[int] = 16
    file: FileName
    reason: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A payload did not verify: it is out of the index, and its file belongs in ``quarantine/``."""

    TAG: ClassVar[int] = 17
    kind: Kind
    key: bytes
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """An entry's file was not there."""

    TAG: ClassVar[int] = 18
    kind: Kind
    key: bytes
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted(Payload):
    """Reconciling found a verified payload that no event named."""

    TAG: ClassVar[int] = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinstated:
    """A quarantined payload was verified after all, and is an entry again."""

    TAG: ClassVar[int] = 20
    file: FileName


# A request.


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A request resumed. ``matched`` and ``endpoint`` are sequences of Committed events.

    ``tip`` is the first 8 bytes of the key of the last whole block of the prompt.
    """

    TAG: ClassVar[int] = 30
    request: int
    tip: bytes
    block_count: int
    matched: int
    endpoint: int
    endpoint_tokens: int
    prompt_tokens: int
    walkbacks: int
    mixed_plan: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A request had nothing to resume from, and why."""

    TAG: ClassVar[int] = 31
    request: int
    tip: bytes
    block_count: int
    prompt_tokens: int
    walkbacks: int
    reason: MissReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStored:
    """A boundary was not stored, and why. ``repeats`` counts from this reason's last event."""

    TAG: ClassVar[int] = 32
    request: int
    key: bytes
    position: int
    reason: NotStoredReason
    detail: str
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """Restores used these entries: block keys, oldest use first."""

    TAG: ClassVar[int] = 33
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """Prompts have passed these ends of answers: they are the first to go, unless used again.

    Block keys. Where an answer ended, and no prompt that goes on from there stops, the one that
    went on has left a checkpoint of its own behind it.
    """

    TAG: ClassVar[int] = 34
    keys: tuple[bytes, ...]


# The operator.


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSeen:
    """What a namespace's digest was made of, so that a miss can say which field differs."""

    TAG: ClassVar[int] = 40
    namespace: bytes
    fields: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSet:
    """A setting that must outlive the process has a new value."""

    TAG: ClassVar[int] = 41
    name: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A block and its sidecar are no victims until unpinned."""

    TAG: ClassVar[int] = 42
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpinned:
    TAG: ClassVar[int] = 43
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """All entries of a namespace are gone from the index; their files are doomed."""

    TAG: ClassVar[int] = 44
    namespace: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedBad:
    """A well-formed entry gave wrong results: it and all that descends from it are doomed."""

    TAG: ClassVar[int] = 45
    kind: Kind
    key: bytes
    detail: str


# The journal itself.


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """The folded state up to ``watermark`` is written down."""

    TAG: ClassVar[int] = 50
    watermark: int
    record_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSealed:
    """Events ``first`` to ``last`` stand in a file under ``archive/``."""

    TAG: ClassVar[int] = 51
    first: int
    last: int
    allocated_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentDropped:
    """Events ``first`` to ``last`` are no longer kept, or could not be."""

    TAG: ClassVar[int] = 52
    first: int
    last: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """The journal was rolled back, restored or made anew. ``old_*`` is what HEAD remembered."""

    TAG: ClassVar[int] = 53
    old_sequence: int
    old_head: bytes
    cause: str
    # Epochs whose folders may hold files that the journal does not name.
    epochs: tuple[int, ...]


PayloadEvent: TypeAlias = (
    Staged
    | Committed
    | Replaced
    | Abandoned
    | Evicted
    | Deleted
    | DeletionRefused
    | Quarantined
    | Lost
    | Adopted
    | Reinstated
)
RequestEvent: TypeAlias = Restored | Missed | NotStored | Touched | Superseded
OperatorEvent: TypeAlias = NamespaceSeen | SettingSet | Pinned | Unpinned | Purged | ReportedBad
JournalEvent: TypeAlias = Compacted | SegmentSealed | SegmentDropped | Rebuilt
Event: TypeAlias = (
    Opened | Closed | Swept | PayloadEvent | RequestEvent | OperatorEvent | JournalEvent
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An event in its place: sequences have no holes, and ``wall_ns`` is for people only."""

    sequence: int
    wall_ns: int
    epoch: int
    event: Event
