"""Writing the log: one durable transaction for each append, and what to do when one fails.

A transaction holds the events, and in a compactor's step also the snapshot's records, the new
watermark and the trim. Before it commits, the log on disk must end where this one thinks it does,
no newer epoch may have written, and the file must still be the one that was opened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cbor2

from . import chain
from .codec import encode
from .environment import MutableEnvironment, Transaction, create_environment
from .errors import CacheOfflineError, ForeignJournalError, JournalDamagedError
from .events import Compacted, Event, Record
from .files import Files
from .head import CleanMark, Head, MutableHead
from .log_reader import FORMAT, LogReader, Position, Watermark, watermark_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """One step of the compactor: the records that changed up to ``watermark``, None if gone.

    Events up to ``trimmed``, at most the watermark, leave LMDB.
    """

    watermark: int
    changed: Mapping[bytes, bytes | None]
    trimmed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    position: Position
    records: list[Record]


class MutableLog(LogReader):
    """The log of an open cache. Owned by one thread, which makes every call; it has no lock.

    After a ``CommitUnknownError`` only ``settle``, ``abandon`` and the properties may be used.
    HEAD follows each commit. If it cannot be written, the commit stands all the same, and
    ``head_failure`` says why.
    """

    def __init__(self, files: Files, environment: MutableEnvironment, head: MutableHead) -> None:
        super().__init__(environment)
        self.head_failure: OSError | None = None
        self._files = files
        self._head = head
        self._proposal: _Proposal | None = None

    @classmethod
    def create(cls, files: Files, store_id: bytes) -> None:
        """Durably make an empty log, or leave nothing that looks like one."""
        watermark = Watermark(sequence=0, link=chain.FIRST_LINK, record_count=0, set_hash=0)
        values: dict[bytes, Any] = {
            b"format": FORMAT,
            b"store": store_id,
            b"epoch": 0,
            b"trimmed": [0, chain.FIRST_LINK],
            b"watermark": watermark_fields(watermark),
        }
        create_environment(files, {name: _meta_value(name, each) for name, each in values.items()})

    @classmethod
    def open(cls, files: Files, *, store_id: bytes, head: MutableHead) -> "MutableLog":
        """Open what ``create`` made for this store. ``head`` stays the caller's to close.

        Raises:
            JournalDamagedError: missing, not LMDB's, or its records do not verify.
            FormatError: written by a newer walkback, or by another LMDB.
            OSError: the disk is read-only, full, or failed.
        """
        log = cls(files, MutableEnvironment.open(files), head)
        if log.store_id != store_id:
            log.abandon()
            raise ForeignJournalError(f"{files.root} holds the journal of another cache")
        return log

    @property
    def is_unsettled(self) -> bool:
        """Whether a commit failed such that it may or may not stand."""
        return self._environment.is_unsettled

    @property
    def proposed(self) -> list[Record]:
        """The records of the commit that failed; once settled as standing, they are to be applied.

        They stay until the next append.
        """
        return [] if self._proposal is None else self._proposal.records

    def append(
        self,
        events: Sequence[Event],
        *,
        epoch: int,
        wall_ns: int,
        compaction: Compaction | None = None,
    ) -> list[Record]:
        """Make events durable, all or none, and return them in their places.

        A compaction in the same transaction puts its ``Compacted`` before ``events``. ``wall_ns``
        never runs backwards: the last event's counts if the clock does.

        Raises:
            CacheOfflineError: the directory is gone, or another opening wrote. Nothing is written.
            CommitUnknownError: to be settled first. Anything else: nothing is written.
        """
        self._proposal = None
        if not events and compaction is None:
            return []
        self._head.unmark()

        def put(transaction: Transaction) -> None:
            self._require_the_last_word(transaction, epoch)
            new, added = self._at, list(events)
            if compaction is not None:
                new = self._put_compaction(transaction, compaction)
                count = new.watermark.record_count
                added.insert(0, Compacted(watermark=compaction.watermark, record_count=count))
            wall = max(wall_ns, new.wall_ns)
            self._proposal = self._put_events(
                transaction, added, replace(new, epoch=epoch, wall_ns=wall)
            )
            if epoch != self._at.epoch:
                self._put_meta(transaction, b"epoch", epoch)

        self._environment.write(put)
        return self._accept()

    def settle(self) -> bool:
        """Reopen the journal and say whether the commit that failed stands after all.

        ``OSError`` leaves it unsettled, to be tried again. A journal that ends neither where it did
        nor where the commit would have ended it is a ``JournalDamagedError``.
        """
        proposal = self._proposal
        assert proposal is not None and self.is_unsettled
        self._environment.reopen()
        found = self._read_position()
        if found == proposal.position:
            self._accept()
            return True
        if found == self._at:
            return False
        self.abandon()
        raise JournalDamagedError(
            f"after a failed commit the journal ends at event {found.sequence}, which is neither "
            f"{self._at.sequence} nor {proposal.position.sequence} as it was written"
        )

    def sync_head(self) -> None:
        """Make HEAD durable; a failure is kept in ``head_failure``."""
        try:
            self._head.sync()
        except OSError as error:
            self.head_failure = error

    def close_clean(self) -> None:
        """Close, and leave the mark that spares the next opening a verification.

        An unsettled log, or one whose HEAD cannot be written, is closed without it.
        """
        is_clean = not self.is_unsettled
        self._environment.close()
        try:
            status = self._files.status("journal/data.mdb")
        except OSError as error:
            self.head_failure = error
            return
        if is_clean and status is not None:
            mark = CleanMark(nbytes=status.nbytes, inode=status.inode, mtime_ns=status.mtime_ns)
            self._write_head(mark)
            self.sync_head()

    def abandon(self) -> None:
        """Close without the mark."""
        self._environment.close()

    def file_bytes(self) -> int:
        """The bytes that the journal's files are charged."""
        names = [f"journal/{each}" for each in self._files.names("journal")]
        found = [self._files.status(each) for each in names]
        return sum(each.charge_bytes for each in found if each is not None)

    def _accept(self) -> list[Record]:
        assert self._proposal is not None
        self._at = self._proposal.position
        self._write_head(None)
        return self._proposal.records

    def _write_head(self, clean: CleanMark | None) -> None:
        at = self._at
        try:
            self._head.write(Head(sequence=at.sequence, link=at.link, epoch=at.epoch, clean=clean))
        except OSError as error:
            self.head_failure = error

    def _require_the_last_word(self, transaction: Transaction, epoch: int) -> None:
        stored_epoch: int = self._meta(transaction, b"epoch")
        cursor = transaction.cursor(self._environment.events)
        last = cursor.item() if cursor.last() else None
        at = self._at
        if stored_epoch > epoch or (
            last is not None
            and (last[0], last[1][-chain.LINK_BYTES :])
            != (chain.sequence_key(at.sequence), at.link)
        ):
            raise CacheOfflineError(
                f"{self._files.root} was written by another opening, of epoch {stored_epoch}, "
                f"while this one, of epoch {epoch}, was open"
            )

    def _put_events(
        self, transaction: Transaction, events: Sequence[Event], at: Position
    ) -> _Proposal:
        sequence, link = at.sequence, at.link
        records: list[Record] = []
        for event in events:
            sequence += 1
            record = Record(sequence=sequence, wall_ns=at.wall_ns, epoch=at.epoch, event=event)
            data = encode(record)
            link = chain.link_of(link, data)
            transaction.put(
                chain.sequence_key(sequence), data + link, append=True, db=self._environment.events
            )
            records.append(record)
        return _Proposal(position=replace(at, sequence=sequence, link=link), records=records)

    def _put_compaction(self, transaction: Transaction, compaction: Compaction) -> Position:
        at, snapshot = self._at, self._environment.snapshot
        assert at.watermark.sequence <= compaction.watermark <= at.sequence
        assert at.trimmed <= compaction.trimmed <= compaction.watermark
        record_count, total = at.watermark.record_count, at.watermark.set_hash
        for record_id, value in compaction.changed.items():
            added = None if value is None else chain.with_check(record_id, value)
            if added is None:
                removed = transaction.pop(record_id, db=snapshot)
            else:
                removed = transaction.replace(record_id, added, db=snapshot)
            total = chain.set_hash(total, added=added, removed=removed)
            record_count += (added is not None) - (removed is not None)
        watermark = Watermark(
            sequence=compaction.watermark,
            link=self._link(transaction, compaction.watermark),
            record_count=record_count,
            set_hash=total,
        )
        trimmed_link = self._link(transaction, compaction.trimmed)
        for sequence in range(at.trimmed + 1, compaction.trimmed + 1):
            transaction.delete(chain.sequence_key(sequence), db=self._environment.events)
        self._put_meta(transaction, b"watermark", watermark_fields(watermark))
        self._put_meta(transaction, b"trimmed", [compaction.trimmed, trimmed_link])
        return replace(
            at, watermark=watermark, trimmed=compaction.trimmed, trimmed_link=trimmed_link
        )

    def _link(self, transaction: Transaction, sequence: int) -> bytes:
        link = self._stored_link(transaction, sequence)
        if link is None:
            raise JournalDamagedError(f"event {sequence} is missing")
        return link

    def _put_meta(self, transaction: Transaction, name: bytes, value: Any) -> None:
        transaction.put(name, _meta_value(name, value), db=self._environment.meta)


def _meta_value(name: bytes, value: Any) -> bytes:
    return chain.with_check(name, cbor2.dumps(value))
