"""What a person is told, once, of a disk that takes nothing more, and when it does again."""

from dataclasses import dataclass, field

from ..journal.words import NotStoredReason
from .boundary import NotStored

# Refusals that somebody can do something about, on the disk or in the settings.
_TOLD = {
    NotStoredReason.DISK_FULL: "the disk is full",
    NotStoredReason.FLOOR: "the volume has too little free",
    NotStoredReason.FLOOR_UNREACHABLE: "the volume has too little free, and evicting does not help",
    NotStoredReason.BUDGET: "the budget is too small",
    NotStoredReason.WRITE_FAILED: "the disk refuses writes",
    NotStoredReason.JOURNAL: "the journal takes nothing",
}
# A cache on the brink of its budget is refused something every minute; the metrics count it.
TELL_AGAIN_SECONDS = 600.0


@dataclass(slots=True)
class MutableNotices:
    """Who was told what. The store's lock guards it; what it returns is logged without the lock."""

    # Told and not over yet; and when each reason was told last.
    _troubles: set[NotStoredReason] = field(default_factory=set[NotStoredReason])
    _told_at: dict[NotStoredReason, float] = field(default_factory=dict[NotStoredReason, float])

    def refused(self, refusal: NotStored, now: float) -> str | None:
        """What to tell of a refusal, if it is news. ``now`` in seconds, of any clock."""
        reason = refusal.reason
        last = self._told_at.get(reason)
        is_recent = last is not None and now - last < TELL_AGAIN_SECONDS
        if reason not in _TOLD or reason in self._troubles or is_recent:
            return None
        self._troubles.add(reason)
        self._told_at[reason] = now
        return (
            f"not everything is stored, as {_TOLD[reason]}; requests are served all the same, and "
            f"storing goes on once it can ({reason}: {refusal.detail})"
        )

    def stored(self) -> str | None:
        """What to tell when something was stored, if that is news."""
        if not self._troubles:
            return None
        reasons = ", ".join(sorted(map(str, self._troubles)))
        self._troubles.clear()
        return f"storing goes on (it had stopped: {reasons})"
