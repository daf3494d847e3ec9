"""Ways to break how a cache reads, verifies and minds what stands around it."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, cast

import pytest

from walkback.journal import chain
from walkback.journal.errors import JournalDamagedError
from walkback.journal.events import Event
from walkback.journal.files import Files
from walkback.journal.log import MutableLog
from walkback.journal.log_reader import LogReader
from walkback.journal.words import MissReason
from walkback.restore import reader
from walkback.restore import walkback as restoring
from walkback.store import deletion, found_journal, reconcile, root, verify
from walkback.store.damage import Damage
from walkback.store.store import MutableStore

# Reading.


def data_not_verified(patch: pytest.MonkeyPatch) -> None:
    def read_data(payload: Any, buffers: Iterable[memoryview], **_: Any) -> float:
        payload.files.read(payload.descriptor, list(buffers), payload.header.data_offset)
        return 0.0

    patch.setattr(verify.OpenPayload, "read_data", read_data)


def headers_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A payload is believed that another commit wrote."""
    real = verify.opened

    def opened(files: Files, path: str, *, nbytes: int | None, expected: Any) -> Any:
        return real(files, path, nbytes=nbytes, expected=None)

    def compare(found: Any, expected: Any) -> None:
        pass

    patch.setattr(reader, "opened", opened)
    patch.setattr(reader, "_compare", compare)


def _core_of(resumption: Any) -> Any:
    store = cast(MutableStore, getattr(resumption, "_store"))  # noqa: B009 - private
    return vars(store)["_core"]


def touched_before_verified(patch: pytest.MonkeyPatch) -> None:
    real = vars(restoring.MutableResumption)["_read"]

    def read(resumption: Any, candidate: Any) -> Any:
        _core_of(resumption).overlay.touches[candidate.blocks[-1].key] = None
        return real(resumption, candidate)

    patch.setattr(restoring.MutableResumption, "_read", read)


def hit_before_verified(patch: pytest.MonkeyPatch) -> None:
    real = vars(restoring.MutableResumption)["_read"]

    def read(resumption: Any, candidate: Any) -> Any:
        counts = _core_of(resumption).counts
        counts.restores += 1
        found = real(resumption, candidate)
        counts.restores -= found is not None
        return found

    patch.setattr(restoring.MutableResumption, "_read", read)


def loss_not_told(patch: pytest.MonkeyPatch) -> None:
    def lose(damage: Damage, *what: Any) -> None:
        pass

    patch.setattr(Damage, "lose", lose)


def read_error_is_damage(patch: pytest.MonkeyPatch) -> None:
    """What cannot be read just now is quarantined."""

    def deal(store: MutableStore, located: Any, error: Exception, attempt: Any) -> None:
        attempt.detail = str(error)
        attempt.refused.add(located.key)
        attempt.failure = MissReason.DAMAGED
        store.damage.quarantine(located, str(error))

    patch.setattr(restoring, "_deal_with", deal)


# The journal.


def links_not_checked(patch: pytest.MonkeyPatch) -> None:
    def linked(entries: Sequence[tuple[bytes, bytes]], **_: Any) -> Generator[bytes]:
        return (stored for _, stored in entries)

    def without_check(name: bytes, stored: bytes) -> bytes:
        return stored[: -chain.LINK_BYTES]

    patch.setattr(chain, "linked", linked)
    patch.setattr(chain, "without_check", without_check)


def rolled_back_journal_trusted(patch: pytest.MonkeyPatch) -> None:
    """What the journal does not name is swept, although HEAD knows that it named more."""

    def is_behind(log: LogReader, head: Any) -> bool:
        return False

    patch.setattr(LogReader, "is_behind", is_behind)


def journal_not_verified_first(patch: pytest.MonkeyPatch) -> None:
    def needs_verification(*what: Any, **more: Any) -> bool:
        return False

    patch.setattr(found_journal, "needs_verification", needs_verification)


def reconciled_without_lost(patch: pytest.MonkeyPatch) -> None:
    def lost(*what: Any) -> Iterable[Event]:
        return ()

    patch.setattr(reconcile, "_lost", lost)


def store_not_checked(patch: pytest.MonkeyPatch) -> None:
    class Anything(bytes):
        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            return True

    real = vars(root)["_check_of"]

    def check_of(*fields: Any) -> bytes:
        return Anything(real(*fields))

    patch.setattr(root, "_check_of", check_of)


# What stands around it.


def deleted_by_path(patch: pytest.MonkeyPatch) -> None:
    """Deletion goes by the path, and looks at nothing."""

    def unlink(files: Files, path: str) -> None:
        (files.root / path).unlink()

    def remove(files: Files, path: str, nbytes: int | None) -> bool:
        try:
            unlink(files, path)
        except FileNotFoundError:
            return False
        return True

    patch.setattr(deletion, "_remove", remove)
    patch.setattr(Files, "unlink", unlink)


def place_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    def is_in_place(files: Files) -> bool:
        return True

    patch.setattr(Files, "is_in_place", is_in_place)


def links_followed(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def folder(files: Files, name: str) -> Generator[int]:
        found = os.dup(files.descriptor)
        try:
            if name:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=found)
                os.close(found)
                found = below
            yield found
        finally:
            os.close(found)

    patch.setattr(Files, "_folder", folder)


def child_unlocks(patch: pytest.MonkeyPatch) -> None:
    real: Callable[[MutableStore], None] = MutableStore.forget_in_child

    def forget(store: MutableStore) -> None:
        fcntl.flock(store.files.descriptor, fcntl.LOCK_UN)
        real(store)

    patch.setattr(MutableStore, "forget_in_child", forget)


def child_keeps_the_store(patch: pytest.MonkeyPatch) -> None:
    def forget(store: MutableStore) -> None:
        pass

    patch.setattr(MutableStore, "forget_in_child", forget)


def no_lock(patch: pytest.MonkeyPatch) -> None:
    def try_lock(files: Files) -> bool:
        return True

    patch.setattr(Files, "try_lock", try_lock)


def time_must_not_step_back(patch: pytest.MonkeyPatch) -> None:
    real = MutableLog.append

    def append(log: MutableLog, events: Sequence[Event], *, wall_ns: int, **rest: Any) -> Any:
        if wall_ns < vars(log)["_at"].wall_ns:
            raise JournalDamagedError("the clock ran backwards")
        return real(log, events, wall_ns=wall_ns, **rest)

    patch.setattr(MutableLog, "append", append)
