"""Reading the log: events in their order, the snapshot, and the few records that join them.

    events     sequence, big-endian      the event's bytes, then its link of 16 bytes
    snapshot   id of a record            the record's value, then its check of 16 bytes
    meta       a name                    CBOR, then its check: format, store, epoch,
                                         trimmed [sequence, link],
                                         watermark [sequence, link, record count, set hash]

Events up to ``trimmed`` have left LMDB. The snapshot is the folded state at the watermark, which
is never before ``trimmed``; so snapshot and the events after it always give the state.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import cbor2

from . import chain
from .environment import FOLDER, MutableEnvironment, Transaction
from .errors import FormatError, JournalDamagedError
from .events import Record
from .files import Files
from .head import Head
from .state import State

FORMAT = 1

# Records read in one read transaction. A few hundred KiB, and no transaction outlives it.
_BATCH_RECORDS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """What the snapshot is: the state at ``sequence``, in ``record_count`` records."""

    sequence: int
    link: bytes
    record_count: int
    set_hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the log ends, and where its parts begin. Changes as a whole, after a commit."""

    sequence: int
    link: bytes
    wall_ns: int
    epoch: int
    trimmed: int
    trimmed_link: bytes
    watermark: Watermark


def watermark_fields(watermark: Watermark) -> list[Any]:
    """What is stored of a watermark."""
    total = watermark.set_hash.to_bytes(chain.LINK_BYTES, "big")
    return [watermark.sequence, watermark.link, watermark.record_count, total]


def _watermark_of(fields: list[Any]) -> Watermark:
    sequence, link, record_count, total = fields
    return Watermark(
        sequence=sequence,
        link=link,
        record_count=record_count,
        set_hash=int.from_bytes(total, "big"),
    )


class LogReader:
    """A log that is only read. Owned by one thread; not thread-safe.

    Whatever does not verify is a ``JournalDamagedError``.
    """

    def __init__(self, environment: MutableEnvironment) -> None:
        self._environment = environment
        try:
            self._at = self._read_position()
        except BaseException:
            environment.close()
            raise

    @classmethod
    def open_to_read(cls, files: Files, folder: str = FOLDER) -> "LogReader":
        """Open without changing a byte of the folder."""
        return cls(MutableEnvironment.open_to_read(files, folder))

    @property
    def store_id(self) -> bytes:
        """The cache that the log was made for."""
        with self._environment.read() as transaction:
            return self._meta(transaction, b"store")

    @property
    def sequence(self) -> int:
        """The last event's, 0 if there is none."""
        return self._at.sequence

    @property
    def link(self) -> bytes:
        """The last event's."""
        return self._at.link

    @property
    def epoch(self) -> int:
        """The epoch that committed last."""
        return self._at.epoch

    @property
    def first_sequence(self) -> int:
        """The oldest event in LMDB, or the next one if there is none."""
        return self._at.trimmed + 1

    @property
    def watermark(self) -> Watermark:
        return self._at.watermark

    def link_at(self, sequence: int) -> bytes | None:
        """The link of an event, 16 zero bytes for 0; None if it has left LMDB or is not there."""
        with self._environment.read() as transaction:
            return self._stored_link(transaction, sequence)

    def is_behind(self, head: Head) -> bool:
        """Whether the log was rolled back: HEAD knows an event that is not in it."""
        if head.sequence < self._at.trimmed:
            return False
        return self.link_at(head.sequence) != head.link

    def read(self, first: int, last: int | None = None) -> Iterator[Record]:
        """The events from ``first`` to ``last``, both included, each one verified.

        Reads a batch at a time, so the caller may append in between; it may not compact.
        """
        for sequence, stored in enumerate(self.read_stored(first, last), first):
            yield chain.record_of(stored, sequence)

    def read_stored(self, first: int, last: int | None = None) -> Iterator[bytes]:
        """As ``read``, but the bytes of each event with its link, verified and not decoded."""
        last = self.sequence if last is None else last
        assert self.first_sequence <= first and last <= self.sequence
        previous = self.link_at(first - 1)
        if previous is None:
            raise JournalDamagedError(f"event {first - 1} is missing")
        while first <= last:
            count = min(_BATCH_RECORDS, last - first + 1)
            with self._environment.read() as transaction:
                cursor = transaction.cursor(self._environment.events)
                cursor.set_range(chain.sequence_key(first))
                entries = list(islice(cursor.iternext(), count))
            yield from chain.linked(entries, first=first, previous=previous)
            if len(entries) < count:
                raise JournalDamagedError(f"event {first + len(entries)} is missing")
            previous = entries[-1][1][-chain.LINK_BYTES :]
            first += count

    def load(self) -> State:
        """The folded state at ``sequence``: the snapshot and the events after it, all verified."""
        watermark = self.watermark
        if self.link_at(watermark.sequence) != watermark.link:
            raise JournalDamagedError(
                f"the snapshot was taken at another event {watermark.sequence} than this one"
            )
        with self._environment.read() as transaction:
            state = State.from_records(watermark.sequence, self._snapshot(transaction))
        for record in self.read(watermark.sequence + 1):
            state.apply(record)
        return state

    def copy_to(self, descriptor: int) -> None:
        """Write a compacted copy of the whole log to a descriptor, not synced."""
        self._environment.copy_to(descriptor)

    def close(self) -> None:
        """Closing twice is harmless."""
        self._environment.close()

    def _snapshot(self, transaction: Transaction) -> Iterator[tuple[bytes, bytes]]:
        record_count = total = 0
        for record_id, stored in transaction.cursor(self._environment.snapshot):
            yield record_id, chain.without_check(record_id, stored)
            total += int.from_bytes(stored[-chain.LINK_BYTES :], "big")
            record_count += 1
        if (record_count, total % chain.SET_HASH_MODULUS) != (
            self.watermark.record_count,
            self.watermark.set_hash,
        ):
            raise JournalDamagedError(
                f"the snapshot has {record_count} records that are not the "
                f"{self.watermark.record_count} that were written"
            )

    def _stored_link(self, transaction: Transaction, sequence: int) -> bytes | None:
        if sequence == self._at.trimmed:
            return self._at.trimmed_link
        stored = transaction.get(chain.sequence_key(sequence), db=self._environment.events)
        return None if stored is None else stored[-chain.LINK_BYTES :]

    def _read_position(self) -> Position:
        with self._environment.read() as transaction:
            if self._meta(transaction, b"format") != FORMAT:
                raise FormatError(
                    "the journal was written by a newer walkback. Upgrade, or use another directory"
                )
            trimmed, trimmed_link = self._meta(transaction, b"trimmed")
            watermark = _watermark_of(self._meta(transaction, b"watermark"))
            epoch = self._meta(transaction, b"epoch")
            cursor = transaction.cursor(self._environment.events)
            end = cursor.item() if cursor.last() else None
            before = cursor.value()[-chain.LINK_BYTES :] if cursor.prev() else trimmed_link
        sequence, end_link, wall_ns = trimmed, trimmed_link, 0
        if end is not None:
            sequence = chain.sequence_of(end[0])
            stored = next(chain.linked([end], first=sequence, previous=before))
            end_link = stored[-chain.LINK_BYTES :]
            wall_ns = chain.record_of(stored, sequence).wall_ns
        if not trimmed <= watermark.sequence <= sequence:
            raise JournalDamagedError(
                f"the journal ends at event {sequence}, before its snapshot's {watermark.sequence}"
            )
        return Position(
            sequence=sequence,
            link=end_link,
            wall_ns=wall_ns,
            epoch=epoch,
            trimmed=trimmed,
            trimmed_link=trimmed_link,
            watermark=watermark,
        )

    def _meta(self, transaction: Transaction, name: bytes) -> Any:
        stored = transaction.get(name, db=self._environment.meta)
        if stored is None:
            raise JournalDamagedError(f"the journal has no record of its {name.decode()}")
        return cbor2.loads(chain.without_check(name, stored))
