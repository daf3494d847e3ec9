"""Bringing an open cache to rest: waiting for what is under way, and the last commits."""

from ..journal.errors import WalkbackError
from .committer import MutableCommitter
from .core import Mode, MutableCore
from .deletion import MutableJanitor
from .outcomes import remove_unnamed

# A journal this much behind its fold is compacted at close, so that the next opening reads a
# snapshot.
_COMPACT_AT_CLOSE_EVENTS = 256


def wait_for_stores(core: MutableCore) -> None:
    """Return when all that was put is settled, or waits for a parent that nobody stores."""
    with core.lock:
        put = {id(each.claim): each.claim for each in core.overlay.in_flight.values()}
        waiting = [claim for claim in put.values() if claim.is_put]
        while core.mode is not Mode.CLOSED and any(
            not claim.settled.is_set() and claim not in core.awaiting_parent for claim in waiting
        ):
            core.lock.wait(timeout=1.0)


def wait_for_deletions(core: MutableCore, timeout_seconds: float) -> None:
    """Return when every file that may go is gone, or the time is over."""
    deadline = core.clock.monotonic() + timeout_seconds
    with core.lock:
        while (
            core.mode is Mode.WRITING
            and core.clock.monotonic() < deadline
            and (
                core.overlay.victims
                or core.overlay.condemned
                or core.overlay.to_move
                or any(not each.refusals for each in core.state.doomed.values())
            )
        ):
            core.lock.wait(timeout=0.05)


def finish(core: MutableCore, janitor: MutableJanitor, committer: MutableCommitter) -> bool:
    """The last commits, on the closing thread, when no other runs; whether the epoch can be closed.

    An epoch with anything untold or unsynced is left to the sweep of the next opening.
    """
    if core.mode is not Mode.WRITING:
        return False
    try:
        while janitor.run_once():
            committer.commit_now()
        with core.lock:
            core.note_unrecorded_refusals()
        committer.commit_now()
        behind = core.log.sequence - core.log.watermark.sequence
        if behind >= _COMPACT_AT_CLOSE_EVENTS:
            committer.compact()
        remaining, core.leftovers = core.leftovers, set()
        remaining -= {segment.path for segment in core.state.segments.values()}
        remove_unnamed(core, remaining)
        for folder in sorted(core.unsynced):
            core.files.sync_directory(folder)
    except (OSError, WalkbackError) as error:
        core.stop_writing(Mode.READING, str(error))
    is_all_told = not core.overlay.riding and not core.leftovers
    return core.mode is Mode.WRITING and is_all_told
