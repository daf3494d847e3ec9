"""What an audit finds: what is wrong and what to do about it, and notes on what is no fault."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from blake3 import blake3

from ..journal import invariants
from ..journal.archive import read_segment
from ..journal.backup import FOLDER as BACKUP
from ..journal.errors import JournalDamagedError
from ..journal.events import DeletionRefused
from ..journal.files import Files
from ..journal.state import State
from ..journal.words import FileName, Kind
from .audit import Audit, Gap, SealedSegment
from .check import damaged_payloads, violations
from .reconcile import NUMBER, named_files, names_in

_CHUNK_BYTES = 1 << 20


class Area(enum.StrEnum):
    """What a finding is about."""

    JOURNAL = "journal"
    STATE = "state"
    FILES = "files"
    PAYLOAD = "payload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it should be, and what to do about it."""

    area: Area
    text: str
    remedy: str


def findings(audit: Audit) -> Iterator[Finding]:
    """Everything that is wrong with journal, state and file names. Opens no payload."""
    yield from journal_findings(audit)
    if audit.state is None:
        return
    broken = list(invariants.violations(audit.state))
    for text in broken:
        remedy = "this is a defect of walkback: report it, and give the server a new directory"
        yield Finding(area=Area.STATE, text=text, remedy=remedy)
    if audit.rollback is not None:
        # The opening will reconcile; until then a file that no event names may be an entry's.
        return
    for text in islice(violations(audit.state, audit.files), len(broken), None):
        yield _finding(Area.FILES, text)


def journal_findings(audit: Audit) -> Iterator[Finding]:
    """What is wrong with the journal and its sealed segments."""
    damage = audit.damage or _chain_damage(audit)
    if damage is not None:
        yield Finding(area=Area.JOURNAL, text=damage, remedy=_remedy_of_damage(audit))
    elif audit.rollback is not None:
        yield Finding(
            area=Area.JOURNAL,
            text=f"the journal was rolled back: {audit.rollback}",
            remedy="open the cache: every payload that verifies is adopted, and what is lost noted",
        )
    for segment in audit.segments():
        text = _segment_damage(audit.files, segment)
        if text is not None:
            yield Finding(
                area=Area.JOURNAL,
                text=text,
                remedy="put the file back from a copy if its history matters; no entry depends on "
                "it",
            )


def payload_findings(audit: Audit) -> Iterator[Finding]:
    """Every live payload whose bytes do not verify. Reads all of them."""
    if audit.state is not None and audit.rollback is None:
        for text in damaged_payloads(audit.state, audit.files):
            yield _finding(Area.PAYLOAD, text)


def notes(audit: Audit) -> Iterator[str]:
    """What the next opening will do, and what restores go without, as sentences."""
    state = audit.state
    if state is None:
        return
    if audit.rollback is not None:
        yield "the payloads were not compared with a journal that was rolled back"
        return
    if audit.log is None:
        yield "there is no journal yet: the cache was made and never used"
    elif audit.head is None and audit.log.sequence:
        yield "HEAD is missing, so a journal that was rolled back would not show"
    for epoch in sorted(state.unswept):
        yield _note_of_epoch(audit.files, state, epoch)
    yield from _notes_of_deletions(audit, state)
    for kept in state.quarantined.values():
        place = kept.file.quarantine_path
        if audit.files.status(place) is None:
            in_place = audit.files.status(kept.file.path) is not None
            place = f"still {kept.file.path}" if in_place else "its file is gone"
        yield (
            f"{kept.entry.kind.word} {kept.entry.key.hex()[:16]} is quarantined ({place}): "
            f"{kept.reason}"
        )
    for hole in state.holes.values():
        yield (
            f"block {hole.key.hex()[:16]} is a hole: what is below it cannot be restored until "
            "it is stored again"
        )


def _note_of_epoch(files: Files, state: State, epoch: int) -> str:
    named = set(named_files(state))
    paths = [
        f"staging/{name}" for name in names_in(files, "staging") if name.startswith(f"{epoch:08x}-")
    ]
    for kind in Kind:
        folder = f"{kind.folder}/{epoch:08x}"
        paths += [
            f"{folder}/{name}"
            for name in names_in(files, folder)
            if NUMBER.fullmatch(name) and FileName(kind, epoch, int(name, 16)) not in named
        ]
    found = [status for path in paths if (status := files.status(path)) is not None]
    nbytes = sum(status.charge_bytes for status in found)
    staged = sum(file.epoch == epoch for file in state.staged)
    return (
        f"epoch {epoch} was not closed: the next opening sweeps {len(found)} files of {nbytes} "
        f"bytes, and {staged} staged payloads are abandoned"
    )


def _notes_of_deletions(audit: Audit, state: State) -> Iterator[str]:
    refused = {file: doomed for file, doomed in state.doomed.items() if doomed.refusals}
    reasons = dict.fromkeys(refused, "the reason is no longer in the journal")
    for record in audit.records() if refused else ():
        if isinstance(record, Gap):
            continue
        if isinstance(record.event, DeletionRefused) and record.event.file in refused:
            reasons[record.event.file] = record.event.reason
    for file, doomed in refused.items():
        yield (
            f"{file.path} was refused deletion {doomed.refusals} times and stays charged "
            f"({doomed.allocated_bytes} bytes): {reasons[file]}"
        )
    waiting = [doomed for file, doomed in state.doomed.items() if file not in refused]
    if waiting:
        nbytes = sum(doomed.allocated_bytes for doomed in waiting)
        yield f"{len(waiting)} doomed files of {nbytes} bytes wait for the next opening to go"


def _chain_damage(audit: Audit) -> str | None:
    """What is wrong with the events in LMDB: the state needs only those after the snapshot."""
    if audit.log is None or audit.is_verified:
        return None
    try:
        for _ in audit.log.read(audit.log.first_sequence):
            pass
    except JournalDamagedError as error:
        return str(error)
    return None


def _segment_damage(files: Files, segment: SealedSegment) -> str | None:
    try:
        if segment.digest is None:
            for _ in read_segment(files, segment.path):
                pass
            return None
        found = _digest_of(files, segment.path)
    except FileNotFoundError:
        return f"{segment.path} is missing, with events {segment.first} to {segment.last}"
    except OSError as error:
        return f"{segment.path} cannot be read: {error.strerror}"
    except JournalDamagedError as error:
        return str(error)
    return None if found == segment.digest else f"{segment.path} is not the file that was sealed"


def _remedy_of_damage(audit: Audit) -> str:
    backups = [name for name in names_in(audit.files, BACKUP) if name.endswith(".mdb")]
    source = (
        f"the newest of {len(backups)} backups that verifies" if backups else "an empty journal"
    )
    return (
        f"open the cache: it goes on from {source}, adopts every payload that verifies, and keeps "
        "the damaged journal as journal.bad"
    )


def _finding(area: Area, sentence: str) -> Finding:
    """The sentences of ``store.check`` say what is wrong, a colon, and what becomes of it."""
    text, _, remedy = sentence.rpartition(": ")
    if not text:
        text, remedy = sentence, "look at the disk, then check again"
    return Finding(area=area, text=text, remedy=remedy)


def _digest_of(files: Files, path: str) -> bytes:
    descriptor = files.open(path)
    try:
        digest = blake3()
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        offset = 0
        while count := files.read(descriptor, [buffer], offset):
            digest.update(buffer[:count])
            offset += count
    finally:
        files.close_file(descriptor)
    return digest.digest()
