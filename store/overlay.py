"""What lives only while the process does: in no event, and in no comparison of states."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ..journal.entries import Entry
from ..journal.events import Event, RequestEvent
from ..journal.words import FileName, Kind, NotStoredReason
from .boundary import Claim, Writing

EntryId = tuple[Kind, bytes]


class InFlight(NamedTuple):
    """A payload on its way, and the boundary that it belongs to."""

    writing: Writing
    claim: Claim


@dataclass(slots=True)
class Kept:
    """What one lease keeps: blocks that are no victims, files that stay, buffers in use."""

    keys: tuple[bytes, ...] = ()
    files: tuple[FileName, ...] = ()
    claims: list[Claim] = field(default_factory=list[Claim])
    is_over: bool = False


@dataclass(slots=True)
class MutableOverlay:
    """Reservations, leases, payloads in flight, chosen victims, pending touches.

    The store's lock guards it. Invariants: a reservation is given back exactly once; what is held,
    leased or in flight is no victim; a leased file is not unlinked.
    """

    # Bytes of disk that stores under way will take.
    reserved_bytes: int = 0
    in_flight: dict[EntryId, InFlight] = field(default_factory=dict[EntryId, InFlight])
    victims: set[EntryId] = field(default_factory=set[EntryId])
    # Block keys that are no victims, and files that are not unlinked, with how often each is held.
    held: Counter[bytes] = field(default_factory=Counter[bytes])
    leased: Counter[FileName] = field(default_factory=Counter[FileName])
    # What leases kept that became garbage: appended without the lock, and ended by who has it.
    dropped: deque[Kept] = field(default_factory=deque[Kept])
    # The blocks that were committed last: room for others is not made at their cost.
    just_admitted: frozenset[bytes] = frozenset()
    # Entries whose file could not be read just now: stored again when their boundary comes by.
    suspects: set[EntryId] = field(default_factory=set[EntryId])
    # Sequences of entries that were reported bad: nothing computed from them is stored.
    bad_sequences: set[int] = field(default_factory=set[int])
    # Quarantined files that must give their room back, and those still in their first place.
    condemned: set[FileName] = field(default_factory=set[FileName])
    # Condemned files whose deletion was refused: tried again, and not waited for.
    stuck: set[FileName] = field(default_factory=set[FileName])
    to_move: set[FileName] = field(default_factory=set[FileName])
    # Files that are off the disk, whose Deleted is not applied yet.
    deleted: set[FileName] = field(default_factory=set[FileName])
    # Events that ride with the next commit, and whether that must come soon.
    riding: list[Event] = field(default_factory=list[Event])
    is_urgent: bool = False
    # While an event that drops entries is being committed, no victim is chosen.
    is_exclusive: bool = False
    requests: list[RequestEvent] = field(default_factory=list[RequestEvent])
    touches: dict[bytes, None] = field(default_factory=dict[bytes, None])
    # How often each refusal came since it was last recorded, and when it is recorded next.
    refusals: dict[NotStoredReason, tuple[int, int]] = field(
        default_factory=dict[NotStoredReason, tuple[int, int]]
    )

    def is_protected(self, entry: Entry, pins: set[bytes]) -> bool:
        """Whether an entry must not be chosen as a victim now."""
        return (
            self.held[entry.key] > 0
            or entry.key in pins
            or entry.key in self.just_admitted
            or (entry.file is not None and self.leased[entry.file] > 0)
            or (entry.kind, entry.key) in self.victims
            or (entry.kind, entry.key) in self.in_flight
        )

    def is_condemned(self, file: FileName) -> bool:
        """Whether a quarantined file is on its way out."""
        return file in self.condemned or file in self.stuck or file in self.deleted

    def hold(self, keys: tuple[bytes, ...]) -> None:
        """Keep these blocks and their sidecars from being victims."""
        self.held.update(keys)

    def let_go(self, keys: tuple[bytes, ...]) -> None:
        """Undo one ``hold`` of the same keys."""
        self.held.subtract(keys)
        for key in keys:
            assert self.held[key] >= 0, "a key was let go twice"
            if not self.held[key]:
                del self.held[key]

    def touch(self, key: bytes) -> None:
        """A use of a block, to be recorded with the next commit: once, as of its last."""
        self.touches.pop(key, None)
        self.touches[key] = None

    def forget_backoffs(self) -> None:
        """After a success the next refusal is news again."""
        for reason, (count, _) in self.refusals.items():
            self.refusals[reason] = (count, 1)

    def refusal_is_due(self, reason: NotStoredReason) -> int | None:
        """Count a refusal; how many it stands for if it is to be recorded, else None.

        The first is recorded, then the second, fourth, eighth of its reason: a full disk must not
        fill the journal.
        """
        count, due = self.refusals.get(reason, (0, 1))
        count += 1
        if count < due:
            self.refusals[reason] = (count, due)
            return None
        self.refusals[reason] = (0, due * 2)
        return count
