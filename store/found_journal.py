"""Which journal an opening goes on with: the one that is there, a backup of it, or a new one."""

from dataclasses import dataclass

from ..journal.backup import restore_backup
from ..journal.environment import FOLDER, remove_folder
from ..journal.errors import ForeignJournalError, JournalDamagedError, RootRefusedError
from ..journal.files import Files
from ..journal.head import MutableHead
from ..journal.log import MutableLog
from ..journal.state import State
from ..journal.verify import verify_in_child
from ..journal.words import Kind
from .reconcile import is_of_another_cache
from .root import Owner, StoreIdentity, needs_verification


@dataclass(slots=True)
class FoundJournal:
    """The log and its fold."""

    log: MutableLog
    state: State
    # Why the journal may not know all payloads, or None if it does.
    cause: str | None


def find_journal(
    files: Files,
    identity: StoreIdentity,
    head: MutableHead,
    previous: Owner | None,
    owner: Owner,
) -> FoundJournal:
    """The log and its fold: as it is, or from a backup, or new."""
    cause: str | None = None
    if files.status(FOLDER) is None:
        # A new cache has no HEAD and no payloads; anything else has lost its journal.
        if head.value is not None or any(files.names(kind.folder) for kind in Kind):
            cause = "the journal was missing"
            _require_own_payloads(files, identity)
            restore_backup(files)
    elif needs_verification(files, head.value, previous=previous, owner=owner):
        cause = verify_in_child(files.root)
        if cause is not None:
            _replace_journal(files)
    if files.status(FOLDER) is None:
        MutableLog.create(files, identity.store_id)
    try:
        log, state = _load(files, identity, head)
    except JournalDamagedError as error:
        cause = str(error)
        _replace_journal(files)
        if files.status(FOLDER) is None:
            MutableLog.create(files, identity.store_id)
        log, state = _load(files, identity, head)
    if cause is None and head.value is not None and log.is_behind(head.value):
        cause = f"the journal ends at event {log.sequence}, and HEAD saw {head.value.sequence}"
    return FoundJournal(log, state, cause)


def _require_own_payloads(files: Files, identity: StoreIdentity) -> None:
    """Without a journal only the payloads can tell that STORE is another cache's."""
    if is_of_another_cache(files, identity.store_id):
        raise RootRefusedError(
            f"the payloads in {files.root} are of another cache than its STORE, and its journal is "
            "missing. Put their STORE back, or start with an empty directory."
        )


def _replace_journal(files: Files) -> None:
    """Put the newest good backup in the journal's place; without one, put the journal aside."""
    if restore_backup(files) is None:
        remove_folder(files, "journal.bad")
        files.rename(FOLDER, "journal.bad")
        files.sync_directory("")


def _load(files: Files, identity: StoreIdentity, head: MutableHead) -> tuple[MutableLog, State]:
    try:
        log = MutableLog.open(files, store_id=identity.store_id, head=head)
    except ForeignJournalError as error:
        # With the wrong STORE every payload would look like another cache's, and be swept.
        raise RootRefusedError(
            f"{error}, by its STORE. Put back the one of the two that is not this cache's; nothing "
            "is touched until then."
        ) from error
    try:
        return log, log.load()
    except BaseException:
        log.abandon()
        raise
