"""The compactor: writes the folded state down, and moves the events that it covers out of LMDB.

One step, one transaction. In order:

1. ``gather``: the records that changed since the last step, under the lock of the state's owner;
2. the events to trim are sealed in a segment, which is synced and renamed;
3. the transaction: changed records, watermark, trim, ``Compacted`` and ``SegmentSealed``.
   This is the commit point;
4. HEAD is synced.

A crash before 3 leaves a segment that no event names and the next step replaces. If a segment
cannot be written the trim goes on and the gap is an event: a full disk must not make the journal
grow. LMDB keeps the newest ``retain_events`` and never loses an event after the watermark.
"""

from .archive import discard_segment, seal_segment
from .errors import JournalDamagedError
from .events import Event, Record, SegmentDropped
from .files import Files
from .log import Compaction, MutableLog
from .state import State

# 50,000 events keep data.mdb at 11 MB, and replay in about a third of a second.
RETAIN_EVENTS = 50_000

# The worst step that trimmed 5,000 events took 11 ms besides its flushes.
STEP_EVENTS = 10_000


class MutableCompactor:
    """The compactor of one log. Owned by the log's thread; only ``gather`` reads the state.

    What was gathered is kept until a step has committed it, so a failed step loses nothing.
    """

    def __init__(
        self,
        log: MutableLog,
        files: Files,
        *,
        retain_events: int = RETAIN_EVENTS,
        step_events: int = STEP_EVENTS,
    ) -> None:
        self._log = log
        self._files = files
        self._retain_events = retain_events
        self._step_events = step_events
        self._watermark = log.watermark.sequence
        self._changed: dict[bytes, bytes | None] = {}

    def gather(self, state: State) -> None:
        """Take the changed records out of the state, as they are at its sequence. No I/O."""
        for record_id in state.take_changed():
            self._changed[record_id] = state.record(record_id)
        self._watermark = state.sequence

    def step(self, *, epoch: int, wall_ns: int) -> list[Record]:
        """Commit what was gathered, trim at most ``step_events``, and return the new records.

        Returns nothing, and writes nothing, if there is nothing to do. Errors are the log's; after
        a ``CommitUnknownError`` the log's ``proposed`` are the records if the commit stands.
        """
        log = self._log
        if self._trim_end() == log.first_sequence and not self._changed:
            return []
        trimmed = self._trim_end() - 1
        events = self._seal(log.first_sequence, trimmed) if trimmed >= log.first_sequence else []
        records = log.append(
            events,
            epoch=epoch,
            wall_ns=wall_ns,
            compaction=Compaction(
                watermark=self._watermark, changed=self._changed, trimmed=trimmed
            ),
        )
        self._changed = {}
        log.sync_head()
        return records

    def _trim_end(self) -> int:
        """The first event that stays."""
        first = self._log.first_sequence
        kept_from = min(self._watermark, self._log.sequence - self._retain_events) + 1
        return max(first, min(kept_from, first + self._step_events))

    def _seal(self, first: int, last: int) -> list[Event]:
        log = self._log
        # A chain that does not verify stops the step: a damaged journal is not archived.
        stored = list(log.read_stored(first, last))
        previous = log.link_at(first - 1)
        if previous is None:
            raise JournalDamagedError(f"event {first - 1} is missing")
        try:
            return [
                seal_segment(
                    self._files,
                    store_id=log.store_id,
                    first=first,
                    last=last,
                    previous=previous,
                    stored=stored,
                )
            ]
        except OSError as error:
            discard_segment(self._files, first)
            return [SegmentDropped(first=first, last=last, reason=f"not written: {error.strerror}")]
