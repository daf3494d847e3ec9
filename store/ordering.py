"""The one write ordering. Everything that makes a payload exist is in this file, in this order.

1. reserve: the boundary's bytes are set aside in the ledger; ``Staged`` joins the pending batch;
2. stage: each payload is written under ``staging/<epoch>-<counter>`` and synced, header last;
3. publish: renamed to its final name; the directories are synced, once for the batch;
4. commit: ONE LMDB transaction with ``Staged``, and ``Committed`` for all parts of the boundary.
   This is the commit point: before it the boundary does not exist, after it it is durable;
5. apply and acknowledge. What was replaced or evicted is doomed by then, and only then unlinked.

Steps 1 and 2 run on the writer thread, or on a caller's when staging is full; steps 3 to 5 on the
journal thread. A crash between any two leaves files that no event names, in folders of an epoch
that is not closed: the next opening sweeps them.
"""

import errno
import logging
from collections.abc import Callable, Iterable

from ..journal.backup import FOLDER as BACKUP
from ..journal.errors import CacheOfflineError, CommitUnknownError, JournalDamagedError
from ..journal.events import (
    Abandoned,
    Deleted,
    Event,
    Evicted,
    Missed,
    Record,
    Restored,
    Staged,
)
from ..journal.events import NotStored as NotStoredEvent
from ..journal.words import AbandonReason, FileName, Kind, NotStoredReason
from .boundary import Claim, NotStored, Writing
from .core import Mode, MutableCore
from .facts import commit_events, request_events
from .outcomes import (
    park,
    refusal_by_journal,
    refusal_of,
    refuse,
    remove_unnamed,
    settle_claim,
)
from .reconcile import names_in
from .room import reserve_room
from .stage import stage

log = logging.getLogger("walkback")

# Steps 1 and 2.


def stage_claim(core: MutableCore, claim: Claim) -> None:
    """Reserve and stage a whole boundary, then queue it for the journal thread or refuse it."""
    started = core.clock.monotonic()
    try:
        refusal = reserve_room(core, claim)
        for writing in claim.writings if refusal is None else ():
            if writing.part.nbytes:
                _stage_writing(core, claim, writing)
    except OSError as error:
        refusal = refusal_of(core, error)
    except Exception as error:  # noqa: BLE001 - a claim is always settled, whatever its buffers do
        refusal = NotStored(NotStoredReason.FAILED, f"{type(error).__name__}: {error}")
    except BaseException:
        # Ctrl-C, while a caller writes what waits: it may be somebody else's boundary.
        try:
            refuse(core, claim, NotStored(NotStoredReason.ABORTED, "the writing was interrupted"))
        finally:
            _end_staging(core)
        raise
    with core.lock:
        core.counts.stage_seconds += core.clock.monotonic() - started
        # The journal thread may have died meanwhile, and then nobody would take it.
        refusal = refusal or core.refusal_by_mode()
        if refusal is None:
            core.to_commit.append(claim)
    try:
        if refusal is not None:
            refuse(core, claim, refusal)
    finally:
        _end_staging(core)


def _end_staging(core: MutableCore) -> None:
    with core.lock:
        core.staging_now -= 1
        core.lock.notify_all()


def _stage_writing(core: MutableCore, claim: Claim, writing: Writing) -> None:
    """Stage one payload; after a failed write or sync once more, anew and under a new name."""
    while True:
        with core.lock:
            file = FileName(writing.part.kind, core.epoch, core.next_counter())
            writing.file = file
            core.ride(
                Staged(
                    kind=writing.part.kind,
                    key=writing.part.key,
                    generation=writing.generation,
                    file=file,
                    nbytes=writing.part.nbytes,
                    cause=writing.cause,
                    restored_from=claim.restored_from,
                )
            )
        try:
            writing.staged = stage(
                core.files, file.staging_path, writing.description, writing.tensors
            )
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) or not core.files.is_in_place():
                raise
            # Gone already, unless the disk refused that as well.
            remove_unnamed(core, [file.staging_path])
            with core.lock:
                core.counts.sync_failures_in_a_row += 1
                failures = core.counts.sync_failures_in_a_row
                if failures < 2:
                    writing.file = None
                    core.ride(Abandoned(file=file, reason=AbandonReason.WRITE_FAILED))
            if failures >= 2:
                core.stop_writing(Mode.READING, f"two writes in a row failed: {error}")
                raise
        else:
            with core.lock:
                core.counts.sync_failures_in_a_row = 0
                core.counts.payload_bytes_written += writing.staged.nbytes
            return


# Steps 3 to 5.


def commit_batch(
    core: MutableCore, claims: list[Claim], build: Callable[[], list[Event]] | None = None
) -> str | None:
    """Publish and commit what is staged, with whatever rides along.

    ``build`` makes events that drop or change entries from the state as it is at the commit. It is
    called with the lock held, and while its events are on their way nothing else is decided.
    Returns why nothing was committed, or None.
    """
    assert not (claims and build), "what drops entries is committed alone"
    claims = _publish(core, claims)
    with core.lock:
        # What drops entries is committed alone: nothing that waits goes with it.
        accepted, orphaned = _admit(core, claims) if claims else ([], [])
    for claim in orphaned:
        refuse(core, claim, NotStored(NotStoredReason.PARENT, "the block before it is not stored"))
    with core.lock:
        riding, core.overlay.riding = core.overlay.riding, []
        core.overlay.is_urgent = False
        core.overlay.is_exclusive = build is not None
        # What requests saw comes before what was stored of them.
        events = [
            *request_events(core),
            *riding,
            *(build() if build is not None else ()),
            *commit_events(core, accepted),
        ]
    try:
        return _commit(core, accepted, riding, events) if events else None
    finally:
        with core.lock:
            core.overlay.is_exclusive = False
            core.lock.notify_all()


def _commit(
    core: MutableCore, accepted: list[Claim], riding: list[Event], events: list[Event]
) -> str | None:
    started = core.clock.monotonic()
    with core.lock:
        stopped = core.refusal_by_mode()
    if stopped is not None:
        # The commit before this one, of the same round, may be in doubt: nothing is added to it.
        _give_up(core, accepted, riding, events, stopped)
        return stopped.detail
    refusal = NotStored(NotStoredReason.JOURNAL, "")
    try:
        records = core.log.append(events, epoch=core.epoch, wall_ns=core.clock.wall_ns())
    except CommitUnknownError as error:
        records, refusal = settled(core, error), refusal_by_journal(error)
    except CacheOfflineError as error:
        core.stop_writing(Mode.OFFLINE, str(error))
        records, refusal = None, refusal_by_journal(error)
    except JournalDamagedError as error:
        core.stop_writing(Mode.READING, str(error))
        records, refusal = None, refusal_by_journal(error)
    except OSError as error:
        # Nothing was written: a full disk may have room again at the next boundary.
        records, refusal = None, refusal_by_journal(error)
    if records is None:
        with core.lock:
            core.failed_commits += 1
        _give_up(core, accepted, riding, events, refusal)
        return refusal.detail
    measure_journal(core)
    with core.lock:
        core.counts.commit_seconds.note(core.clock.monotonic() - started)
        core.failed_commits = 0
        apply_records(core, records)
        if accepted:
            parts = (part for claim in accepted for part in claim.boundary.parts)
            core.overlay.just_admitted = frozenset(part.key for part in parts)
        for claim in accepted:
            settle_claim(core, claim, None)
        notice = core.notices.stored() if accepted else None
        core.lock.notify_all()
    if notice is not None:
        log.info("%s", notice)
    return None


def measure_journal(core: MutableCore) -> None:
    """Charge what the journal and its backups take now; what cannot be read stays as it was."""
    files = core.files
    try:
        backups = [files.status(f"{BACKUP}/{name}") for name in names_in(files, BACKUP)]
        nbytes = core.log.file_bytes()
    except OSError:
        return
    with core.lock:
        core.journal_bytes = nbytes + sum(each.charge_bytes for each in backups if each)


def apply_records(core: MutableCore, records: Iterable[Record]) -> None:
    """Fold durable events in, and drop what the overlay knew of them. Needs the lock."""
    for record in records:
        core.state.apply(record)
        event = record.event
        core.counts.events[type(event).__name__] += 1
        if isinstance(event, Evicted):
            core.overlay.victims.discard((event.kind, event.key))
        elif isinstance(event, Deleted):
            # Only now are its bytes off the ledger: until then they count as on their way.
            for files in (core.overlay.deleted, core.overlay.condemned, core.overlay.stuck):
                files.discard(event.file)


def _publish(core: MutableCore, claims: list[Claim]) -> list[Claim]:
    """Rename what is staged, sync the directories once; the claims for which that worked."""
    published: list[Claim] = []
    folders: set[str] = set()
    for claim in claims:
        if claim.is_published:
            published.append(claim)
            continue
        files = [writing.file for writing in claim.writings if writing.file is not None]
        try:
            for file in files:
                core.files.rename(file.staging_path, file.path)
        except OSError as error:
            refuse(core, claim, refusal_of(core, error))
        else:
            claim.is_published = True
            published.append(claim)
            folders |= {file.path.rpartition("/")[0] for file in files}
    if not folders:
        return published
    try:
        for folder in ("staging", *sorted(folders)):
            core.files.sync_directory(folder)
    except OSError as error:
        # Which names are durable is unknown, so none of them may be named by an event.
        refusal = refusal_of(core, error)
        core.stop_writing(Mode.READING, f"a directory did not sync: {error}")
        for claim in published:
            refuse(core, claim, refusal)
        return []
    return published


def _admit(core: MutableCore, claims: list[Claim]) -> tuple[list[Claim], list[Claim]]:
    """The claims whose parents stand, or will in this batch, and those without. Needs the lock.

    One whose parent is still being stored by another claim waits until that one comes by. Two may
    need blocks of each other, where one stores what the other found missing in between: so those
    that wait are looked at with each that comes, and go together.
    """
    claims = [*core.awaiting_parent, *claims]
    core.awaiting_parent.clear()
    orphaned = [claim for claim in claims if claim.is_tainted]
    accepted = [claim for claim in claims if not claim.is_tainted]
    short: dict[int, set[bytes]] = {}
    while found := _without_parents(core, accepted):
        short |= found
        accepted = [claim for claim in accepted if id(claim) not in found]
    for claim in claims:
        if id(claim) not in short:
            continue
        if all((Kind.BLOCK, key) in core.overlay.in_flight for key in short[id(claim)]):
            core.awaiting_parent.append(claim)
            park(core, claim)
        else:
            orphaned.append(claim)
    return accepted, orphaned


def _without_parents(core: MutableCore, claims: list[Claim]) -> dict[int, set[bytes]]:
    """Which of these claims need blocks that neither stand nor are stored by one of them."""
    # A sidecar has its block's key, and must not pass for it.
    arriving = {
        writing.part.key
        for claim in claims
        for writing in claim.writings
        if writing.part.kind is Kind.BLOCK
    }
    found: dict[int, set[bytes]] = {}
    for claim in claims:
        above = {
            writing.part.key if writing.part.kind is Kind.SIDECAR else writing.part.parent
            for writing in claim.writings
        }
        missing = {
            key
            for key in above - arriving - {claim.boundary.namespace}
            if key not in core.state.blocks or (Kind.BLOCK, key) in core.overlay.victims
        }
        if missing:
            found[id(claim)] = missing
    return found


def settled(core: MutableCore, error: CommitUnknownError) -> list[Record] | None:
    """The records of a commit of unknown outcome, if it turns out to stand."""
    try:
        return core.log.proposed if core.log.settle() else None
    except (OSError, JournalDamagedError, CacheOfflineError) as worse:
        core.stop_writing(Mode.READING, f"the journal did not reopen after {error}: {worse}")
        return None


def _give_up(
    core: MutableCore,
    claims: list[Claim],
    riding: list[Event],
    events: list[Event],
    refusal: NotStored,
) -> None:
    """Refuse a batch that did not commit; its files go only if that is certain."""
    with core.lock:
        refusal = core.refusal_by_mode() or refusal
        core.overlay.riding = [*riding, *core.overlay.riding]
        # What requests told is kept for the next commit; a full disk must not fill the memory.
        requests = [each for each in events if isinstance(each, Restored | Missed | NotStoredEvent)]
        requests += core.overlay.requests
        core.overlay.requests = requests[: core.settings.request_events_max - 1]
    for claim in claims:
        if core.log.is_unsettled:
            # Its files may be named by the journal after all: the next opening will know.
            with core.lock:
                settle_claim(core, claim, refusal)
        else:
            refuse(core, claim, refusal)
