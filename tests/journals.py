"""Journals for tests: events that can be true, files that stop or fail at a step, open logs."""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from walkback.journal.events import (
    Committed,
    Deleted,
    Event,
    Evicted,
    Missed,
    NamespaceSeen,
    Opened,
    Staged,
    Touched,
)
from walkback.journal.files import Files, Transaction
from walkback.journal.head import MutableHead
from walkback.journal.log import MutableLog
from walkback.journal.state import State
from walkback.journal.words import Cause, EvictReason, FileName, Kind, MissReason

STORE_ID = b"store-id-16bytes"
NAMESPACE = bytes(32)


class Crash(BaseException):
    """The process died here: nothing in the product may catch it."""


class StoppingFiles(Files):
    """Dies before the step with index ``stop_at``, after half of it if the step is a write.

    ``steps`` holds the names of the steps taken. After the crash every step dies.
    """

    def __init__(self, root: Path, stop_at: int | None = None) -> None:
        super().__init__(root)
        self.stop_at = stop_at
        self.steps: list[str] = []

    def _step(self, name: str) -> None:
        if self.stop_at is not None and len(self.steps) >= self.stop_at:
            raise Crash(name)
        self.steps.append(name)

    def make_directory(self, name: str) -> None:
        self._step(f"make {name}")
        super().make_directory(name)

    def remove_directory(self, name: str) -> None:
        self._step(f"remove {name}")
        super().remove_directory(name)

    def sync_directory(self, name: str) -> None:
        self._step(f"sync directory {name}")
        super().sync_directory(name)

    def create(self, name: str) -> int:
        self._step(f"create {name}")
        return super().create(name)

    def write(self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        try:
            self._step("write")
        except Crash:
            content = b"".join(buffers)
            super().write(descriptor, [content[: len(content) // 2]], offset)
            raise
        super().write(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        self._step("sync")
        super().sync(descriptor)

    def rename(self, old: str, new: str) -> None:
        self._step(f"rename {old} {new}")
        super().rename(old, new)

    def unlink(self, name: str) -> None:
        self._step(f"unlink {name}")
        super().unlink(name)

    def commit(self, transaction: Transaction) -> None:
        self._step("commit")
        super().commit(transaction)


@dataclass
class Journal:
    """An open log with what belongs to it, and the state that its events give."""

    files: Files
    head: MutableHead
    log: MutableLog
    state: State

    def append(self, *events: Event, epoch: int = 1, wall_ns: int = 1000) -> None:
        for record in self.log.append(events, epoch=epoch, wall_ns=wall_ns):
            self.state.apply(record)

    def records(self) -> dict[bytes, bytes]:
        return dict(self.state.records())


def make_journal(root: Path) -> None:
    """A new journal, closed."""
    root.mkdir(exist_ok=True)
    files = Files(root)
    MutableLog.create(files, STORE_ID)
    files.close()


@contextlib.contextmanager
def open_journal(root: Path, files: Files | None = None) -> Generator[Journal]:
    """An open journal, abandoned at the end if the test did not close it."""
    files = files or Files(root)
    head = MutableHead(files)
    log = MutableLog.open(files, store_id=STORE_ID, head=head)
    try:
        yield Journal(files, head, log, log.load())
    finally:
        log.abandon()
        head.close()
        files.close()


def opened(epoch: int = 1) -> Opened:
    return Opened(epoch=epoch, pid=1, boot_id="boot", versions="1")


def missed(request: int) -> Missed:
    return Missed(
        request=request,
        tip=b"t" * 8,
        block_count=1,
        prompt_tokens=300,
        walkbacks=0,
        reason=MissReason.UNSEEN,
        detail="",
    )


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(number: int, parent: bytes = NAMESPACE) -> list[Event]:
    """The events of one block that was stored."""
    file = FileName(Kind.BLOCK, 1, number)
    return [
        Staged(
            kind=Kind.BLOCK,
            key=key(number),
            generation=0,
            file=file,
            nbytes=4000,
            cause=Cause.PREFILL,
            restored_from=None,
        ),
        Committed(
            kind=Kind.BLOCK,
            key=key(number),
            parent=parent,
            namespace=NAMESPACE,
            start=0,
            end=256,
            generation=0,
            file=file,
            nbytes=4000,
            allocated_bytes=4096,
            header_digest=bytes(32),
            plan_digest=bytes(16),
            prefill_seconds=0.25,
        ),
    ]


def evicted(number: int) -> list[Event]:
    """The events of one block that was evicted and deleted."""
    gone = Evicted(
        kind=Kind.BLOCK,
        key=key(number),
        generation=0,
        reason=EvictReason.BUDGET,
        policy="lru",
        budget_bytes=0,
        need_bytes=0,
    )
    return [gone, Deleted(file=FileName(Kind.BLOCK, 1, number), already_gone=False)]


def story(count: int) -> Iterator[list[Event]]:
    """Batches of events, as a busy cache would append them, about ``count`` events in all."""
    yield [opened(), NamespaceSeen(namespace=NAMESPACE, fields=(("weights", "ab"),))]
    total, number = 2, 1
    while total < count:
        batch = stored(number)
        if number % 3 == 0:
            batch += [Touched(keys=(key(number), key(number - 1))), missed(number)]
        if number % 5 == 0:
            batch += evicted(number - 1)
        yield batch
        total += len(batch)
        number += 1
