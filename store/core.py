"""What the threads of one open cache share, and the lock that guards it."""

import enum
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..journal.events import Abandoned, Event, RequestEvent, Staged
from ..journal.events import NotStored as NotStoredEvent
from ..journal.files import Files
from ..journal.log import MutableLog
from ..journal.state import State
from ..journal.words import MissReason, NotStoredReason
from .boundary import Claim, NotStored
from .histogram import MutableHistogram
from .notices import MutableNotices
from .overlay import MutableOverlay
from .settings import StoreSettings

log = logging.getLogger("walkback")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Where time comes from. ``wall_ns`` is for people; nothing is decided by it."""

    wall_ns: Callable[[], int] = time.time_ns
    monotonic: Callable[[], float] = time.monotonic


# An SSD syncs in one to some tens of milliseconds, a disk that is overloaded in seconds.
COMMIT_SECONDS_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

# Events that wait for a commit; a journal on a full disk takes none.
RIDING_MAX = 10_000


class Mode(enum.Enum):
    """What an open cache still does."""

    WRITING = "writing"
    # Two syncs in a row failed, or the journal did: restores go on, stores do not.
    READING = "reading"
    # The directory is gone: nothing is read, written or recovered.
    OFFLINE = "offline"
    CLOSED = "closed"


@dataclass(slots=True)
class Counts:
    """What happened since the cache was opened."""

    events: Counter[str] = field(default_factory=Counter[str])
    misses: Counter[MissReason] = field(default_factory=Counter[MissReason])
    refusals: Counter[NotStoredReason] = field(default_factory=Counter[NotStoredReason])
    restores: int = 0
    walkbacks: int = 0
    sidecars_read: int = 0
    boundaries_stored: int = 0
    payload_bytes_written: int = 0
    staging_bytes_high_water: int = 0
    inline_writes: int = 0
    backpressure_seconds: float = 0.0
    commit_seconds: MutableHistogram = field(
        default_factory=lambda: MutableHistogram(COMMIT_SECONDS_BOUNDS)
    )
    stage_seconds: float = 0.0
    sync_failures_in_a_row: int = 0
    backups_failed: int = 0


class MutableCore:
    """The log, the folded state, the overlay and the staging queue of one open cache.

    ``lock`` guards everything but ``log``, which the journal thread owns. It is a condition:
    whoever frees memory, frees disk or settles a claim notifies all. It is never held over I/O.
    """

    def __init__(
        self,
        *,
        files: Files,
        log: MutableLog,
        state: State,
        settings: StoreSettings,
        store_id: bytes,
        budget_bytes: int,
        clock: Clock,
    ) -> None:
        self.files = files
        self.log = log
        self.state = state
        self.settings = settings
        self.store_id = store_id
        self.budget_bytes = budget_bytes
        self.clock = clock
        self.lock = threading.Condition()
        self.overlay = MutableOverlay()
        self.counts = Counts()
        self.notices = MutableNotices()
        self.mode = Mode.WRITING
        self.mode_detail = ""
        self.staging_limit_bytes = settings.staging_bytes
        self.staging_bytes = 0
        # Claims whose bytes wait for the writer, oldest first, and those that wait for a commit.
        self.to_stage: deque[Claim] = deque()
        self.to_commit: deque[Claim] = deque()
        # Published claims whose parent another claim is still storing: looked at when one settles.
        self.awaiting_parent: list[Claim] = []
        self.staging_now = 0
        # Allocated bytes of the journal and its backups, read again after each commit.
        self.journal_bytes = 0
        self.floor_unreachable = False
        # Since the last commit that stands: tombstones that cannot be recorded free nothing.
        self.failed_commits = 0
        # The largest boundary stored yet: how far ahead to evict.
        self.boundary_bytes_max = 0
        # Names that could not be removed after a failed store; the epoch is not closed while any
        # is.
        self.leftovers: set[str] = set()
        # Unclean epochs that this opening could not read, and so leaves to the next.
        self.unreadable_epochs: frozenset[int] = frozenset()
        # Whether this opening had to reconcile: the archive then holds what the journal forgot.
        self.is_rebuilt = False
        # Folders that such names were removed from, to be synced before the epoch is closed: a name
        # that came back after a power cut would be named by no event and swept by nobody.
        self.unsynced: set[str] = set()
        self._counter = 0

    @property
    def epoch(self) -> int:
        return self.state.epoch

    @property
    def charged_bytes(self) -> int:
        """All bytes that count against the budget, stores under way included."""
        return self.state.used_bytes + self.overlay.reserved_bytes + self.journal_bytes

    def next_counter(self) -> int:
        """A number that no other payload of this epoch has. Call it with the lock held."""
        self._counter += 1
        return self._counter

    def stop_writing(self, mode: Mode, detail: str) -> None:
        """Refuse stores from now on; the first reason is the one that is kept, and logged."""
        with self.lock:
            is_news = self.mode is Mode.WRITING or (
                mode is not Mode.READING and self.mode is not mode
            )
            if is_news:
                self.mode, self.mode_detail = mode, detail
            self.lock.notify_all()
        if is_news:
            log.warning("nothing is stored any more until the cache is reopened: %s", detail)

    def refusal_by_mode(self) -> NotStored | None:
        """Why no store can be taken now, if so. Call it with the lock held."""
        match self.mode:
            case Mode.WRITING:
                return None
            case Mode.READING:
                return NotStored(NotStoredReason.WRITING_STOPPED, self.mode_detail)
            case Mode.OFFLINE:
                return NotStored(NotStoredReason.OFFLINE, self.mode_detail)
            case Mode.CLOSED:
                return NotStored(NotStoredReason.CLOSED, "the cache is closed")

    def ride(self, event: Event) -> None:
        """Let an event ride with the next commit. Call it with the lock held.

        While a full disk takes no commit, attempts that came to nothing do not fill the memory.
        """
        riding = self.overlay.riding
        if isinstance(event, Abandoned) and len(riding) >= RIDING_MAX:
            for index, earlier in enumerate(riding):
                if isinstance(earlier, Staged) and earlier.file == event.file:
                    del riding[index]
                    return
        riding.append(event)

    def note_request(self, event: RequestEvent) -> None:
        """Let a request event ride; without a journal to take them they are counted only.

        Call it with the lock held.
        """
        if (
            self.mode is Mode.WRITING
            or len(self.overlay.requests) < self.settings.request_events_max
        ):
            self.overlay.requests.append(event)

    def note_unrecorded_refusals(self) -> None:
        """Record what the backoff has kept back, at the close. Call it with the lock held."""
        for reason, (count, _) in self.overlay.refusals.items():
            if count:
                self.overlay.requests.append(
                    NotStoredEvent(
                        request=0,
                        key=b"",
                        position=0,
                        reason=reason,
                        detail="repeated since its last event",
                        repeats=count,
                    )
                )
        self.overlay.refusals.clear()

    def note_not_stored(
        self, refusal: NotStored, *, request: int, key: bytes, position: int
    ) -> None:
        """Count a refusal, and record it if its backoff says so. Call it with the lock held."""
        self.counts.refusals[refusal.reason] += 1
        repeats = self.overlay.refusal_is_due(refusal.reason)
        if repeats is not None:
            self.note_request(
                NotStoredEvent(
                    request=request,
                    key=key[:8],
                    position=position,
                    reason=refusal.reason,
                    detail=refusal.detail[:200],
                    repeats=repeats,
                )
            )
