"""Opening a cache to look only: nothing on its disk changes, and nothing is recovered.

The lock is held meanwhile, so what is seen is one moment of a cache at rest. What the next opening
would mend is a finding here, or a note if it is its ordinary work.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ..journal.archive import FOLDER as ARCHIVE
from ..journal.archive import read_segment
from ..journal.environment import FOLDER
from ..journal.errors import JournalDamagedError, RootRefusedError
from ..journal.events import Record
from ..journal.files import Files
from ..journal.head import Head, read_head
from ..journal.log_reader import LogReader
from ..journal.state import State
from ..journal.verify import damaged_structure_of, verify_in_child
from .reconcile import names_in, payloads_on_disk
from .root import (
    StoreIdentity,
    load_identity,
    lock_root,
    needs_verification,
    read_owner,
    this_process,
)

_SEGMENT = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Events that cannot be shown. ``last`` is None if nobody knows how many there were."""

    first: int
    last: int | None
    reason: str
    is_damage: bool


class SealedSegment(NamedTuple):
    first: int
    last: int | None
    digest: bytes | None
    path: str


class Audit:
    """A cache at rest, locked and only read. Owned by one thread; close it, or use ``with``.

    ``state`` is None if the journal does not verify; ``damage`` then says why. ``log`` is None if
    there is no journal that is safe to open.
    """

    def __init__(self, files: Files, *, always_verify: bool) -> None:
        self.files = files
        self.log: LogReader | None = None
        self.state: State | None = None
        self.damage: str | None = None
        identity = load_identity(files)
        if identity is None:
            raise RootRefusedError(f"{files.root} is not a cache: it holds no STORE")
        self.identity: StoreIdentity = identity
        self.head: Head | None = read_head(files)
        self.is_verified = False
        try:
            self._open_journal(always_verify=always_verify)
        except JournalDamagedError as error:
            self.state, self.damage = None, str(error)
        except BaseException:
            self._close_log()
            raise

    @classmethod
    def open(cls, path: Path) -> "Audit":
        """Open the cache at ``path``; its journal is verified first if its last words are unsure.

        Raises what ``lock_root`` and ``load_identity`` raise, and FormatError. ``OSError`` passes.
        """
        return cls._open(path, always_verify=False)

    @classmethod
    def open_verified(cls, path: Path) -> "Audit":
        """As ``open``, but a child verifies the whole journal first, whatever its last words."""
        return cls._open(path, always_verify=True)

    def close(self) -> None:
        """Let go of the cache. Closing twice is harmless."""
        self._close_log()
        self.files.close()

    def __enter__(self) -> "Audit":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The history.

    def records(self, first: int = 1) -> Iterator[Record | Gap]:
        """The events from ``first`` on, sealed segments included; what is not there is a gap."""
        expected = first
        reason: str | None = None
        for segment in self.segments():
            if segment.last is not None and segment.last < first:
                continue
            if segment.first > expected:
                yield _gap(expected, segment.first - 1, reason)
                expected = segment.first
            reason = None
            try:
                for record in read_segment(self.files, segment.path, digest=segment.digest):
                    if record.sequence >= expected:
                        yield record
                        expected = record.sequence + 1
            except FileNotFoundError:
                reason = f"{segment.path} is missing"
            except OSError as error:
                reason = f"{segment.path} cannot be read: {error.strerror}"
            except JournalDamagedError as error:
                reason = str(error)
        if self.log is None:
            if self.damage is not None:
                yield _gap(expected, self.head.sequence if self.head else None, self.damage)
            return
        if self.log.first_sequence > expected:
            yield _gap(expected, self.log.first_sequence - 1, reason)
            expected = self.log.first_sequence
        if expected > self.log.sequence:
            return
        try:
            for record in self.log.read(expected):
                yield record
                expected = record.sequence + 1
        except JournalDamagedError as error:
            yield _gap(expected, self.log.sequence, str(error))

    def segments(self) -> list[SealedSegment]:
        """The sealed segments that events name, or without a state all that there are."""
        if self.state is not None:
            return [
                SealedSegment(first, segment.last, segment.digest, segment.path)
                for first, segment in sorted(self.state.segments.items())
            ]
        return [
            SealedSegment(int(name, 16), None, None, f"{ARCHIVE}/{name}")
            for name in names_in(self.files, ARCHIVE)
            if _SEGMENT.fullmatch(name)
        ]

    @cached_property
    def rollback(self) -> str | None:
        """Why the journal is older than the payloads, if so. The state is then not the truth."""
        if self.state is None:
            return None
        if self.log is not None and self.head is not None and self.log.is_behind(self.head):
            return f"it ends at event {self.log.sequence}, and HEAD saw {self.head.sequence}"
        newest = max((file.epoch for file in payloads_on_disk(self.files)), default=0)
        if newest > self.state.epoch:
            return f"it knows epoch {self.state.epoch}, and there are payloads of epoch {newest}"
        return None

    # The journal.

    @classmethod
    def _open(cls, path: Path, *, always_verify: bool) -> "Audit":
        files = lock_root(path, is_new_allowed=False)
        try:
            return cls(files, always_verify=always_verify)
        except BaseException:
            files.close()
            raise

    def _open_journal(self, *, always_verify: bool) -> None:
        files, head = self.files, self.head
        if files.status(FOLDER) is None:
            if head is not None or any(True for _ in payloads_on_disk(files)):
                self.damage = "the journal is missing"
            else:
                self.state = State()
            return
        owner = this_process()
        if always_verify or needs_verification(
            files, head, previous=read_owner(files), owner=owner
        ):
            if files.status(f"{FOLDER}/data.mdb") is None:
                raise JournalDamagedError(f"{FOLDER}/data.mdb is missing")
            self.damage = verify_in_child(files.root)
            if self.damage is not None and (
                always_verify or damaged_structure_of(files) is not None
            ):
                # What LMDB does with a damaged file may end the process that asks.
                return
            self.is_verified = self.damage is None
        self.log = LogReader.open_to_read(files)
        if self.log.store_id != self.identity.store_id:
            self._close_log()
            raise JournalDamagedError(f"{files.root} holds the journal of another cache")
        self.state = self.log.load()

    def _close_log(self) -> None:
        log, self.log = self.log, None
        if log is not None:
            log.close()


def _gap(first: int, last: int | None, reason: str | None) -> Gap:
    """A gap, by damage if there is a reason; else these events were dropped on purpose."""
    return Gap(
        first=first,
        last=last,
        reason=reason or "they are no longer kept",
        is_damage=reason is not None,
    )
