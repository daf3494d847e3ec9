"""How a claim ends, and everything that is given back when it does."""

import contextlib
import errno
import logging
from collections.abc import Iterable

from ..journal.events import Abandoned
from ..journal.words import AbandonReason, NotStoredReason
from .boundary import Claim, NotStored
from .core import Mode, MutableCore
from .staging import release_memory

log = logging.getLogger("walkback")


def settle_claim(core: MutableCore, claim: Claim, refusal: NotStored | None) -> None:
    """Tell a claim's outcome, once, and give back all that was set aside. Needs the lock."""
    assert not claim.settled.is_set(), "a claim is settled once"
    claim.refusal = refusal
    for writing in claim.writings:
        del core.overlay.in_flight[writing.part.kind, writing.part.key]
        if refusal is not None and writing.file is not None:
            core.ride(Abandoned(file=writing.file, reason=_abandon_reason(refusal)))
        elif refusal is None:
            core.overlay.suspects.discard((writing.part.kind, writing.part.key))
    core.overlay.reserved_bytes -= claim.reserved_bytes
    core.to_commit.extend(core.awaiting_parent)
    core.awaiting_parent.clear()
    core.overlay.let_go(claim.held)
    if refusal is None:
        core.counts.boundaries_stored += bool(claim.writings)
        core.overlay.forget_backoffs()
        core.boundary_bytes_max = max(core.boundary_bytes_max, claim.reserved_bytes)
    else:
        core.note_not_stored(
            refusal,
            request=claim.request,
            key=claim.boundary.parts[-1].key,
            position=claim.boundary.position,
        )
    claim.settled.set()
    release_memory(core, claim)
    core.lock.notify_all()


def park(core: MutableCore, claim: Claim) -> None:
    """Give the memory of a claim that waits for its parent back: the parent may be waiting for it.

    Until it is committed no lookup sees it. Needs the lock.
    """
    claim.is_parked = True
    for writing in claim.writings:
        writing.is_handed_over = False
    release_memory(core, claim)


def refuse_waiting(core: MutableCore) -> None:
    """Refuse, at the close, what waits for parents that nobody stores any more."""
    with core.lock:
        waiting, core.awaiting_parent = core.awaiting_parent, []
    for claim in waiting:
        refuse(core, claim, NotStored(NotStoredReason.PARENT, "the block before it is not stored"))


def refuse(core: MutableCore, claim: Claim, refusal: NotStored) -> None:
    """Remove what a claim left and settle it, whatever the removal meets."""
    try:
        _unlink_files_of(core, claim)
    finally:
        with core.lock:
            settle_claim(core, claim, refusal)
            # Of a cache that has stopped writing that was said already.
            is_told = core.mode is not Mode.WRITING
            notice = None if is_told else core.notices.refused(refusal, core.clock.monotonic())
    if notice is not None:
        log.warning("%s", notice)


def remove_unnamed(core: MutableCore, paths: Iterable[str]) -> None:
    """Unlink files that no event names; what cannot go now is kept in mind for the close."""
    for path in paths:
        try:
            with contextlib.suppress(FileNotFoundError):
                core.files.unlink(path)
        except OSError:
            core.leftovers.add(path)
        else:
            core.unsynced.add(path.rpartition("/")[0])


def _unlink_files_of(core: MutableCore, claim: Claim) -> None:
    files = [writing.file for writing in claim.writings if writing.file is not None]
    remove_unnamed(core, [path for file in files for path in (file.staging_path, file.path)])


def refusal_of(core: MutableCore, error: OSError) -> NotStored:
    if not core.files.is_in_place():
        core.stop_writing(Mode.OFFLINE, f"{core.files.root} is gone or was replaced: {error}")
        return NotStored(NotStoredReason.OFFLINE, str(error))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NotStored(NotStoredReason.DISK_FULL, str(error))
    return NotStored(NotStoredReason.WRITE_FAILED, str(error))


def refusal_by_journal(error: Exception) -> NotStored:
    for each in (error, error.__cause__):
        # LMDB's errors have a code where the system's have a number.
        code = each.errno if isinstance(each, OSError) else getattr(each, "code", 0)
        if code in (errno.ENOSPC, errno.EDQUOT):
            return NotStored(NotStoredReason.DISK_FULL, str(error))
    return NotStored(NotStoredReason.JOURNAL, str(error))


def _abandon_reason(refusal: NotStored) -> AbandonReason:
    match refusal.reason:
        case NotStoredReason.PARENT:
            return AbandonReason.PARENT
        case NotStoredReason.JOURNAL:
            return AbandonReason.JOURNAL
        case _:
            return AbandonReason.WRITE_FAILED
