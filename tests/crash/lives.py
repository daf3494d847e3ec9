"""The lives of a cache: processes that are the same in every run, and those that come after."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import pytest

from walkback.journal import backup
from walkback.journal.files import Files
from walkback.journal.verify import damage_of
from walkback.store import found_journal, recovery
from walkback.store.core import Clock
from walkback.store.deletion import MutableJanitor
from walkback.store.root import Owner, make_identity
from walkback.store.settings import StoreSettings
from walkback.store.store import MutableStore

from .recording import ActingFiles
from .world import SETTINGS, Legal, payload_files, require_sound

STORE_ID_AND_SECRET_BYTE = b"s"


@contextlib.contextmanager
def steady() -> Generator[None]:
    """What is random in a process, or differs from one to the next, is the same in each."""
    with pytest.MonkeyPatch.context() as patch:
        same = partial(make_identity, randomness=lambda count: STORE_ID_AND_SECRET_BYTE * count)
        patch.setattr(recovery, "make_identity", same)
        patch.setattr(recovery, "this_process", lambda: Owner(pid=1, boot_id="this"))
        yield


@contextlib.contextmanager
def deletions_in_turn() -> Generator[None]:
    """The janitor works only while it is waited for, so that a trace is the same in every run."""
    real_settle, real_has_work = MutableStore.settle_deletions, vars(MutableJanitor)["_has_work"]
    is_waited_for = False

    def settle_deletions(store: MutableStore, timeout_seconds: float = 30.0) -> None:
        nonlocal is_waited_for
        is_waited_for = True
        core, janitor = vars(store)["_core"], vars(store)["_janitor"]
        with core.lock:
            core.lock.notify_all()
            # Also for the next try of what was refused, which nobody else waits for.
            core.lock.wait_for(lambda: not real_has_work(janitor), timeout_seconds)
        real_settle(store, timeout_seconds)
        is_waited_for = False

    def has_work(janitor: MutableJanitor) -> bool:
        return is_waited_for and real_has_work(janitor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MutableStore, "settle_deletions", settle_deletions)
        patch.setattr(MutableJanitor, "_has_work", has_work)
        yield


def open_store(
    root: Path,
    make_files: Callable[[Path], Files] = ActingFiles,
    settings: StoreSettings = SETTINGS,
    monotonic: Callable[[], float] = time.monotonic,
) -> MutableStore:
    """Open a store whose events do not tell the time."""
    return MutableStore.open(
        root, settings, clock=Clock(wall_ns=lambda: 1, monotonic=monotonic), make_files=make_files
    )


NOT_AFTER_A_CRASH = {"Lost", "Quarantined", "Adopted", "Rebuilt", "Reinstated"}


class UnsyncedFiles(Files):
    """Files of an image: nobody pulls its plug, so nothing need be synced."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, name: str) -> None:
        pass


@contextlib.contextmanager
def another_life(*, is_verified: bool) -> Generator[None]:
    """Open what a crash left, quickly: no flush reaches a disk, and damage is looked for here.

    The journal is verified as after another boot, in this process.
    """
    real_open: Any = lmdb.open

    def unsynced_open(*args: Any, **settings: Any) -> Any:
        return real_open(*args, **{"sync": False, **settings})

    def verify_here(root: Path, folder: str = "journal") -> str | None:
        files = Files(root)
        try:
            return damage_of(files, folder)
        finally:
            files.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmdb, "open", unsynced_open)
        patch.setattr(found_journal, "verify_in_child", verify_here)
        patch.setattr(backup, "verify_in_child", verify_here)
        if is_verified:
            patch.setattr(recovery, "this_process", lambda: Owner(pid=1, boot_id="another"))
        yield


def require_recovery(root: Path, legal: Legal, *, is_verified: bool, is_repeated: bool) -> None:
    """Open what a crash left at ``root``: it is sound. Opened again, nothing is new."""
    with another_life(is_verified=is_verified):
        with open_store(root, UnsyncedFiles) as store:
            found = require_sound(store, root, legal)
            events = store.statistics().events
            assert not NOT_AFTER_A_CRASH & events.keys(), events
        if not is_repeated:
            return
        files = payload_files(root)
        with open_store(root, UnsyncedFiles) as store:
            assert require_sound(store, root, [found]) == found
            assert store.statistics().events.keys() <= {"Opened", "Compacted", "SegmentSealed"}
        assert payload_files(root) == files


@contextlib.contextmanager
def scratch_directory() -> Generator[Path]:
    """A directory for thousands of images: in memory where the system has such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name).resolve()
