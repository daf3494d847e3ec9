"""The journal thread: it owns the log, groups what waits into one transaction, and compacts."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..journal.archive import FOLDER as ARCHIVE
from ..journal.archive import segment_path
from ..journal.backup import write_backup
from ..journal.compactor import MutableCompactor
from ..journal.entries import Segment
from ..journal.errors import (
    CacheClosedError,
    CacheOfflineError,
    CommitUnknownError,
    NotRecordedError,
    WalkbackError,
)
from ..journal.events import Event, SegmentDropped
from .boundary import Claim
from .core import Mode, MutableCore
from .lookup import end_dropped_leases
from .ordering import apply_records, commit_batch, measure_journal, settled
from .outcomes import refuse_waiting, remove_unnamed, settle_claim
from .room import evict_ahead

# History may take a sixteenth of the budget: 110 bytes an event, some million events in 2 GB.
ARCHIVE_SHARE = 16


@dataclass(slots=True)
class _Change:
    """Events to be built at the commit and committed alone, and whoever waits for them."""

    build: Callable[[], list[Event]]
    failure: str | None = None
    done: threading.Event = field(default_factory=threading.Event)


class MutableCommitter:
    """The queue before the log. One thread of its own commits; any thread may ask."""

    def __init__(self, core: MutableCore) -> None:
        self._core = core
        self._compactor = MutableCompactor(
            core.log, core.files, retain_events=core.settings.journal_events_kept
        )
        self._compacted_at = core.log.watermark.sequence
        self._changes: list[_Change] = []
        self._is_stopping = False
        self._flush_asked = 0
        self._flushed = 0
        self._last_flush = core.clock.monotonic()
        self._thread = threading.Thread(target=self._run, name="walkback-journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def change(self, build: Callable[[], list[Event]]) -> None:
        """Commit the events that ``build`` makes of the state then; durable on return.

        ``build`` runs on the journal thread with the store's lock held. Raises CacheClosedError if
        the cache does not write any more, NotRecordedError if the journal failed just now.
        """
        change = _Change(build)
        with self._core.lock:
            if self._is_stopping or self._core.mode is not Mode.WRITING:
                raise CacheClosedError(
                    f"the cache takes no changes: {self._core.mode_detail or 'it is closed'}"
                )
            self._changes.append(change)
            self._core.lock.notify_all()
        change.done.wait()
        if change.failure is not None:
            raise NotRecordedError(f"nothing was changed: {change.failure}")

    def flush(self) -> None:
        """Return when all that rides or waits at the call is committed, or has been refused."""
        with self._core.lock:
            if self._is_stopping:
                return
            self._flush_asked += 1
            asked = self._flush_asked
            self._core.lock.notify_all()
            while self._flushed < asked and self._thread.is_alive():
                self._core.lock.wait(timeout=1.0)

    def stop(self) -> None:
        """Commit what waits, then end the thread. The caller owns the log afterwards."""
        with self._core.lock:
            self._is_stopping = True
            self._core.lock.notify_all()
        self._thread.join()
        refuse_waiting(self._core)

    def commit_now(self) -> None:
        """Commit what waits on the calling thread, which must own the log: after ``stop``."""
        claims = list(self._core.to_commit)
        self._core.to_commit.clear()
        self._commit(claims, [])

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - a dead thread must not look like a slow one
            self._core.stop_writing(Mode.READING, f"the journal thread died: {error!r}")
            self._refuse_everything()

    def _refuse_everything(self) -> None:
        with self._core.lock:
            refusal = self._core.refusal_by_mode()
            assert refusal is not None
            while self._core.to_commit or self._core.awaiting_parent:
                self._core.to_commit.extend(self._core.awaiting_parent)
                self._core.awaiting_parent.clear()
                claim = self._core.to_commit.popleft()
                if not claim.settled.is_set():
                    settle_claim(self._core, claim, refusal)
            for change in self._changes:
                change.failure = refusal.detail
                change.done.set()

    def _loop(self) -> None:
        while True:
            with self._core.lock:
                while not self._is_stopping and not self._has_work():
                    self._core.lock.wait(timeout=1.0)
                changes, self._changes = self._changes, []
                claims = list(self._core.to_commit)
                self._core.to_commit.clear()
                asked = self._flush_asked
                is_last = self._is_stopping
            try:
                self._commit(claims, changes)
            except BaseException:
                # Whoever waits for these must not wait for a thread that is about to die.
                with self._core.lock:
                    self._core.to_commit.extend(
                        each for each in claims if not each.settled.is_set()
                    )
                    self._changes += [each for each in changes if not each.done.is_set()]
                raise
            with self._core.lock:
                self._last_flush = self._core.clock.monotonic()
                self._flushed = asked
                self._core.lock.notify_all()
                if is_last and not self._core.to_commit and not self._changes:
                    return

    def _has_work(self) -> bool:
        core, overlay = self._core, self._core.overlay
        end_dropped_leases(core)
        if self._changes or core.to_commit or self._flush_asked > self._flushed:
            return True
        if core.mode is not Mode.WRITING:
            return False
        waiting = len(overlay.requests) + len(overlay.touches)
        age = core.clock.monotonic() - self._last_flush
        return (
            overlay.is_urgent
            or waiting >= core.settings.request_events_max
            or (bool(waiting or overlay.riding) and age >= core.settings.request_events_seconds)
        )

    def _commit(self, claims: list[Claim], changes: list[_Change]) -> None:
        core = self._core
        with core.lock:
            refusal = core.refusal_by_mode()
            if refusal is not None:
                for claim in claims:
                    settle_claim(core, claim, refusal)
        if refusal is None:
            commit_batch(core, claims)
            for change in changes:
                change.failure = commit_batch(core, [], change.build)
            self._compact_if_due()
            with core.lock:
                evict_ahead(core)
        for change in changes:
            if refusal is not None:
                change.failure = refusal.detail
            change.done.set()

    def _compact_if_due(self) -> None:
        core = self._core
        due = self._compacted_at + core.settings.compact_every_events
        if core.mode is Mode.WRITING and core.log.sequence >= due:
            self.compact()
            self._trim_archive()

    def _trim_archive(self) -> None:
        """Drop the oldest sealed segments beyond a share of the budget: they cannot be evicted."""
        core = self._core
        with core.lock:
            segments = [core.state.segments[first] for first in sorted(core.state.segments)]
            over = sum(each.allocated_bytes for each in segments)
            over -= core.budget_bytes // ARCHIVE_SHARE
            dropped: list[Segment] = []
            while over > 0 and segments:
                dropped.append(segments.pop(0))
                over -= dropped[-1].allocated_bytes
        events = [
            SegmentDropped(first=each.first, last=each.last, reason="budget") for each in dropped
        ]
        if events and commit_batch(core, [], lambda: [*events]) is None:
            remove_unnamed(core, [each.path for each in dropped])

    def compact(self) -> None:
        """One step of the compactor and a backup, on the thread that owns the log.

        Nothing, if a commit just before it has stopped the writing.
        """
        core = self._core
        with core.lock:
            if core.mode is not Mode.WRITING:
                return
            self._compactor.gather(core.state)
        self._compacted_at = core.log.sequence
        try:
            records = self._compactor.step(epoch=core.epoch, wall_ns=core.clock.wall_ns())
        except CommitUnknownError as error:
            records = settled(core, error) or []
        except OSError:
            # What was gathered is kept: a full disk may have room at the next try.
            self._leave_segment_to_the_close()
            return
        except CacheOfflineError as error:
            core.stop_writing(Mode.OFFLINE, str(error))
            return
        except WalkbackError as error:
            self._leave_segment_to_the_close()
            core.stop_writing(Mode.READING, f"the journal could not be compacted: {error}")
            return
        with core.lock:
            apply_records(core, records)
            if any(isinstance(record.event, SegmentDropped) for record in records):
                # What there was of it is unlinked, but not durably.
                core.unsynced.add(ARCHIVE)
        if records:
            self._back_up()
            measure_journal(core)
        else:
            self._leave_segment_to_the_close()

    def _leave_segment_to_the_close(self) -> None:
        """Have the segment removed that the step sealed in vain, unless the next one seals it."""
        path = segment_path(self._core.log.first_sequence)
        self._core.leftovers |= {path, f"{path}.new"}

    def _back_up(self) -> None:
        core = self._core
        try:
            write_backup(core.log, core.files)
        except (OSError, WalkbackError):
            # The older backups stand; the next step makes another try.
            with core.lock:
                core.counts.backups_failed += 1
