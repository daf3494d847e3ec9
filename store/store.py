"""The store: one open cache, seen from above. What it decides is in the modules that it names.

Lifecycle of a boundary: ``claim`` (what is missing, and the right to store it), ``reserve``
(memory), then ``put`` (the bytes) or ``cancel``. Lifecycle of a lookup: ``choose`` under a lease,
read, ``release``, then ``note_restored`` or ``note_missed``. A lease that is lost ends by itself.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..journal import invariants
from ..journal.entries import Entry
from ..journal.errors import CacheClosedError
from ..journal.events import Missed, Restored
from ..journal.files import Files
from ..journal.state import State
from ..journal.words import Kind, NotStoredReason
from .boundary import Boundary, Claim, NotStored
from .check import violations_on_disk
from .claims import make_claim
from .committer import MutableCommitter
from .core import Clock, Mode, MutableCore
from .damage import Damage
from .deletion import MutableJanitor
from .lookup import (
    Choice,
    Lease,
    Located,
    View,
    end_dropped_leases,
    lease_choice,
    lease_keys,
    release_lease,
)
from .operator import Operator
from .ordering import stage_claim
from .outcomes import settle_claim
from .recovery import OpenedCache, close_cache, open_cache
from .rest import finish, wait_for_deletions, wait_for_stores
from .room import evict_ahead
from .settings import StoreSettings
from .staging import reserve_memory
from .statistics import Statistics, statistics_of
from .tensors import Tensor
from .writer import MutableWriter

_open_stores: "weakref.WeakSet[MutableStore]" = weakref.WeakSet()


class MutableStore:
    """One open cache. Any thread may call it; its lock is ``core.lock``.

    Three threads work for it: the writer stages, the journal thread commits, the janitor deletes.
    """

    def __init__(self, opened: OpenedCache) -> None:
        self._opened = opened
        self._core: MutableCore = opened.core
        self._pid = os.getpid()
        self._is_closing = False
        self._committer = MutableCommitter(self._core)
        self._janitor = MutableJanitor(self._core)
        self.damage = Damage(self._core, self._committer)
        self.operator = Operator(self._core, self._committer)
        self._writer = MutableWriter(self._core)
        with self._core.lock:
            evict_ahead(self._core)
        self._committer.start()
        self._janitor.start()
        self._writer.start()
        _open_stores.add(self)

    @classmethod
    def open(
        cls,
        path: Path,
        settings: StoreSettings | None = None,
        *,
        versions: str = "",
        clock: Clock | None = None,
        make_files: Callable[[Path], Files] = Files,
    ) -> "MutableStore":
        """Open the cache at ``path``, or make one there; its parent must exist.

        Raises:
            CacheLockedError: another process holds it, named by pid.
            RootRefusedError: the directory cannot be a cache; the message says what to do.
            FormatError: a newer walkback wrote it.
        """
        opened = open_cache(
            path,
            settings or StoreSettings(),
            clock=clock or Clock(),
            versions=versions,
            make_files=make_files,
        )
        return cls(opened)

    # Who it is.

    @property
    def files(self) -> Files:
        return self._core.files

    @property
    def secret(self) -> bytes:
        """What keys this cache's block keys."""
        return self._opened.identity.secret

    @property
    def mode(self) -> Mode:
        return self._core.mode

    @property
    def mode_detail(self) -> str:
        return self._core.mode_detail

    # Storing.

    def claim(
        self,
        boundary: Boundary,
        *,
        request: int,
        producer: str,
        restored_from: int | None = None,
        passed: bytes | None = None,
    ) -> Claim | NotStored:
        """The right to store what is missing of a boundary; empty if nothing is.

        What is stored already, or is being stored by somebody else, is not written again. An entry
        whose file could not be read is replaced. ``passed`` is the block of an answer's end that
        goes first once this boundary is durable.
        """
        with self._core.lock:
            refusal = self._refusal()
            if refusal is None and restored_from in self._core.overlay.bad_sequences:
                refusal = NotStored(
                    NotStoredReason.PARENT, "what the request resumed from was reported bad"
                )
            if refusal is not None:
                self._note_refusal(refusal, boundary, request)
                return refusal
            return make_claim(
                self._core,
                boundary,
                request=request,
                producer=producer,
                restored_from=restored_from,
                passed=passed,
            )

    def reserve(self, claim: Claim) -> None:
        """Set memory aside for the claim's bytes, before they are copied.

        If the bound is reached this writes what waits, on this thread: it takes as long as the disk
        does, and holds no lock meanwhile.
        """
        reserve_memory(self._core, claim, write_inline=self._stage)

    def put(
        self, claim: Claim, tensors: Sequence[Sequence[Tensor]], *, prefill_seconds: float
    ) -> None:
        """Hand the bytes over, one sequence of tensors for each of the claim's writings.

        The buffers must not change until the claim is settled. Returns at once; the outcome is in
        ``claim.settled`` and ``claim.refusal``.
        """
        core = self._core
        pairs = list(zip(claim.writings, tensors, strict=True))
        with core.lock:
            claim.prefill_seconds = float(prefill_seconds)
            for writing, each in pairs:
                writing.tensors = each
                writing.is_handed_over = True
            claim.is_put = True
            if self._is_closing:
                settle_claim(core, claim, NotStored(NotStoredReason.CLOSED, "the cache is closed"))
                return
            core.to_stage.append(claim)
            core.lock.notify_all()

    def cancel(self, claim: Claim, refusal: NotStored) -> None:
        """Give a claim back without bytes, for a reason that the journal is told.

        One that was put goes its way: its bytes are the store's already.
        """
        with self._core.lock:
            if not claim.settled.is_set() and not claim.is_put:
                settle_claim(self._core, claim, refusal)

    def refuse(self, refusal: NotStored, *, request: int, key: bytes, position: int) -> None:
        """Tell the journal why a boundary was not even claimed."""
        with self._core.lock:
            self._core.note_not_stored(refusal, request=request, key=key, position=position)

    def hold(self, keys: tuple[bytes, ...]) -> Lease:
        """Keep these blocks from being victims while a request builds on them."""
        with self._core.lock:
            return lease_keys(self._core, keys)

    # Looking up.

    def choose(
        self, choose: Callable[[View], tuple[Choice, Sequence[Located]]]
    ) -> tuple[Choice, Lease]:
        """Let ``choose`` pick what to read, and lease it in the same critical section."""
        with self._core.lock:
            self.require_open()
            return lease_choice(self._core, choose)

    def release(self, lease: Lease) -> None:
        """End a lease. Releasing twice is harmless."""
        with self._core.lock:
            release_lease(self._core, lease)

    def note_restored(self, event: Restored, *, endpoint: bytes, sidecars_read: int) -> None:
        """Count a restore that was verified, and touch its endpoint."""
        core = self._core
        with core.lock:
            core.counts.restores += 1
            core.counts.walkbacks += event.walkbacks
            core.counts.sidecars_read += sidecars_read
            core.note_request(event)
            core.overlay.touch(endpoint)

    def touch(self, endpoint: bytes) -> None:
        """Note that a prompt resumed where this block ends, without reading it."""
        with self._core.lock:
            self._core.overlay.touch(endpoint)

    def note_missed(self, event: Missed) -> None:
        """Count a miss."""
        core = self._core
        with core.lock:
            core.counts.misses[event.reason] += 1
            core.counts.walkbacks += event.walkbacks
            core.note_request(event)

    # The whole.

    def go_offline(self) -> None:
        """The directory is gone: miss and refuse from now on, and recover nothing."""
        self._core.stop_writing(Mode.OFFLINE, f"{self.files.root} is gone or was replaced")

    def flush(self) -> None:
        """Return when all that was put is durable or refused, and what rode along is committed."""
        wait_for_stores(self._core)
        self._committer.flush()

    def settle_deletions(self, timeout_seconds: float = 30.0) -> None:
        """Wait until every file that may go is gone. For tests and for an orderly check."""
        wait_for_deletions(self._core, timeout_seconds)

    def entries(self, kind: Kind) -> list[Entry]:
        """The live entries of a kind, as they are now. They belong to the state: only look."""
        with self._core.lock:
            table = self._core.state.blocks if kind is Kind.BLOCK else self._core.state.sidecars
            return list(table.values())

    def statistics(self) -> Statistics:
        """What is stored and what happened, at one moment."""
        with self._core.lock:
            end_dropped_leases(self._core)
            return statistics_of(self._core)

    def violations(self) -> Iterator[str]:
        """Every broken invariant, of the state and of the disk. Best asked when nothing runs."""
        core = self._core
        self.require_open()
        with core.lock:
            found = list(invariants.violations(core.state))
            copy = State.from_records(core.state.sequence, list(core.state.records()))
            leftovers = frozenset(core.leftovers)
            in_flight = {
                each.writing.file
                for each in core.overlay.in_flight.values()
                if each.writing.file is not None
            }
        yield from found
        # The disk is looked at without the lock, so a store that is busy meanwhile may show.
        yield from violations_on_disk(copy, core.files, in_flight=in_flight, leftovers=leftovers)

    def close(self) -> None:
        """Store what was put, end the epoch and let go of the directory. Closing twice is harmless.

        What was put before is durable or refused on return, and every thread has ended.
        """
        core = self._core
        if os.getpid() != self._pid:
            return
        with core.lock:
            if self._is_closing:
                return
            self._is_closing = True
            core.lock.notify_all()
        self._writer.stop()
        with core.lock:
            # A caller may be writing inline.
            while core.staging_now:
                core.lock.wait(timeout=1.0)
        self._janitor.stop()
        self._committer.stop()
        _open_stores.discard(self)
        is_clean = finish(core, self._janitor, self._committer)
        try:
            close_cache(self._opened, is_clean=is_clean)
        finally:
            with core.lock:
                core.mode = Mode.CLOSED
                core.lock.notify_all()

    def forget_in_child(self) -> None:
        """What a forked child does: it closes its copy of the lock, and never touches LMDB.

        It must not unlock either, for that would unlock the parent. Its lookups miss.
        """
        self._core.lock = threading.Condition()
        self._core.mode = Mode.CLOSED
        self.files.close()

    def __enter__(self) -> "MutableStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stage(self, claim: Claim) -> None:
        stage_claim(self._core, claim)

    # Under the lock.

    def _refusal(self) -> NotStored | None:
        if self._is_closing or os.getpid() != self._pid:
            return NotStored(NotStoredReason.CLOSED, "the cache is closed")
        return self._core.refusal_by_mode()

    def require_open(self) -> None:
        """CacheClosedError after the close, and in a process that was forked from the opener."""
        if self._is_closing or self._core.mode is Mode.CLOSED or os.getpid() != self._pid:
            raise CacheClosedError("the cache is closed, or was opened before a fork")

    def _note_refusal(self, refusal: NotStored, boundary: Boundary, request: int) -> None:
        self._core.note_not_stored(
            refusal, request=request, key=boundary.parts[-1].key, position=boundary.position
        )


def _close_in_child() -> None:
    for store in list(_open_stores):
        store.forget_in_child()


os.register_at_fork(after_in_child=_close_in_child)
