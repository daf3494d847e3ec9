"""Resuming a prompt: choose, lease, read, verify; and if that fails, the next shorter candidate.

The sidecar is read first, so a bad one costs no block. What did not verify is quarantined, what was
not there is lost, what could not be read just now is left alone and stored again when its boundary
comes by. The caller's objects are not touched: a restore makes new ones or none.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..journal.errors import CacheClosedError, PayloadDamagedError
from ..journal.events import Missed, Restored
from ..journal.words import Kind, MissReason
from ..store.core import Mode
from ..store.lookup import Lease, Located
from ..store.store import MutableStore
from .candidates import Candidate, Match
from .choosing import Lookup, NotResumed, choose
from .reading import Assembly, read_candidate

# Each walk-back removes or refuses an entry, so this only bounds a cache that rots while it is
# read.
WALKBACKS_MAX = 1000


AssemblyT = TypeVar("AssemblyT", bound=Assembly)
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Generic[Made]):
    """A verified restore. ``made`` is what was built from it."""

    made: Made
    endpoint: int
    tip: Located
    # The sequence of the endpoint's Committed, and the plan that led to it.
    sequence: int
    plan_digest: bytes
    # Whether it was captured at the endpoint, and not cut out of what a later stop captured.
    is_at_its_stop: bool
    sidecars: int
    walkbacks: int
    # The end of the whole blocks that matched when it was chosen.
    matched_tokens: int
    mixed_plan: bool
    header_seconds: float
    bytes_seconds: float
    junction: int | None


@dataclass(slots=True)
class _Attempt:
    """What one lookup gathers while it walks back."""

    walkbacks: int = 0
    sidecars: int = 0
    header_seconds: float = 0.0
    bytes_seconds: float = 0.0
    refused: set[bytes] = field(default_factory=set[bytes])
    failure: MissReason | None = None
    detail: str = ""
    matched_tokens: int = 0
    junction: int | None = None


@dataclass(slots=True)
class _Held(Generic[AssemblyT]):
    """A candidate that was read and verified, and the lease that keeps it."""

    found: Match
    candidate: Candidate
    assembly: AssemblyT
    lease: Lease


class MutableResumption(Generic[AssemblyT]):
    """One restore under way: ``read`` on any thread, then ``finish`` on the caller's.

    The two must not overlap. ``cancel`` may come from any thread at any time; a restore that is not
    finished must be cancelled, or its lease stays. The lease is released exactly once: by
    ``finish``, or when ``cancel`` is seen.
    """

    def __init__(
        self,
        store: MutableStore,
        lookup: Lookup,
        *,
        make_assembly: Callable[[int], AssemblyT],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``make_assembly`` gets the endpoint, and runs on the thread that reads."""
        self._store = store
        self._lookup = lookup
        self._make_assembly = make_assembly
        self._clock = clock
        self._attempt = _Attempt()
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._held: _Held[AssemblyT] | None = None
        self._miss: NotResumed | None = None

    def read(self) -> None:
        """Choose, lease and read until a candidate is whole and verified, or none is left."""
        while self._held is None and self._miss is None:
            self._read_next()

    def finish(self, finish: Callable[[AssemblyT], Made]) -> Resumed[Made] | NotResumed:
        """Make something of what was read; the journal is told how it went.

        ``finish`` runs on this thread and may raise PayloadDamagedError for point state that is not
        finite: then the next candidate is read here.
        """
        while True:
            self.read()
            with self._lock:
                held, self._held = self._held, None
            if held is None:
                return self._miss or self._missed(_CANCELLED)
            try:
                made = finish(held.assembly)
            except PayloadDamagedError as error:
                tip = held.candidate.sidecar or held.candidate.blocks[-1]
                _deal_with(self._store, tip, error, self._attempt)
                self._walk_back()
            else:
                return self._resumed(held, made)
            finally:
                self._store.release(held.lease)

    def cancel(self) -> None:
        """Give the restore up: what was read is let go of, what is being read as soon as it can."""
        with self._lock:
            self._is_cancelled = True
            held, self._held = self._held, None
        if held is not None:
            self._store.release(held.lease)

    def _read_next(self) -> None:
        """Take the longest candidate that is left: hold it, refuse it, or end with a miss."""
        store, attempt = self._store, self._attempt
        if self._is_cancelled:
            self._miss = self._missed(_CANCELLED)
            return
        if store.mode is Mode.OFFLINE or attempt.walkbacks > WALKBACKS_MAX:
            if store.mode is Mode.OFFLINE:
                # Whatever could not be read before, this is why.
                attempt.failure = None
            detail = store.mode_detail
            self._miss = self._missed(NotResumed(reason=MissReason.OFFLINE, detail=detail))
            return
        lookup = self._lookup
        try:
            choice, lease = store.choose(lambda view: choose(view, lookup, attempt.refused))
        except CacheClosedError as error:
            self._miss = NotResumed(reason=MissReason.CLOSED, detail=str(error))
            return
        is_kept = False
        try:
            attempt.junction = choice.junction or attempt.junction
            attempt.matched_tokens = max(attempt.matched_tokens, choice.found.matched_tokens)
            if choice.miss is not None:
                self._take_miss(choice.miss)
                return
            candidate = choice.found.candidate
            assert candidate is not None, "what is no miss has a candidate"
            assembly = self._read(candidate)
            if assembly is not None:
                is_kept = self._hold(_Held(choice.found, candidate, assembly, lease))
                return
        finally:
            if not is_kept:
                store.release(lease)
        if not self._is_cancelled:
            self._walk_back()

    def _take_miss(self, miss: NotResumed) -> None:
        """Go on with what else would do; without any this is the end of it."""
        if self._lookup.otherwise is not None:
            self._lookup = self._lookup.otherwise
        else:
            self._miss = self._missed(miss)

    def _hold(self, held: _Held[AssemblyT]) -> bool:
        with self._lock:
            if not self._is_cancelled:
                self._held = held
            return not self._is_cancelled

    def _walk_back(self) -> None:
        self._attempt.walkbacks += 1
        if not self._store.files.is_in_place():
            self._store.go_offline()

    def _read(self, candidate: Candidate) -> AssemblyT | None:
        """Read and verify one candidate; None if it cannot be used, which is then dealt with."""
        attempt = self._attempt
        assembly = self._make_assembly(candidate.endpoint)
        files, layout = self._store.files, self._lookup.layout
        readings = read_candidate(files, layout, candidate, assembly, clock=self._clock)
        with contextlib.closing(readings):
            for reading in readings:
                if self._is_cancelled:
                    return None
                attempt.header_seconds += reading.header_seconds
                attempt.bytes_seconds += reading.bytes_seconds
                if reading.error is not None:
                    _deal_with(self._store, reading.located, reading.error, attempt)
                    return None
                attempt.sidecars += reading.located.kind is Kind.SIDECAR
        return assembly

    def _resumed(self, held: _Held[AssemblyT], made: Made) -> Resumed[Made]:
        lookup, attempt, candidate = self._lookup, self._attempt, held.candidate
        tip = candidate.blocks[-1]
        endpoint = candidate.sidecar or tip
        deepest = held.found.deepest
        assert deepest is not None, "a candidate has a block"
        mixed_plan = any(
            located.plan_digest != lookup.plan_digest_of(located.end)
            for located in (*candidate.blocks, endpoint)
        )
        is_on_grid = lookup.plan.grid.is_on_grid(candidate.endpoint)
        is_tail = tip.end % lookup.chain.block_tokens != 0
        is_at_its_stop = is_on_grid or is_tail or candidate.sidecar is not None
        event = Restored(
            request=lookup.request,
            tip=lookup.chain.tip[:8],
            block_count=len(lookup.chain.links),
            matched=deepest.sequence,
            endpoint=endpoint.sequence,
            endpoint_tokens=candidate.endpoint,
            prompt_tokens=lookup.prompt_tokens,
            walkbacks=attempt.walkbacks,
            mixed_plan=mixed_plan,
        )
        self._store.note_restored(event, endpoint=tip.key, sidecars_read=attempt.sidecars)
        return Resumed(
            made=made,
            endpoint=candidate.endpoint,
            tip=tip,
            sequence=endpoint.sequence,
            plan_digest=endpoint.plan_digest,
            is_at_its_stop=is_at_its_stop,
            sidecars=attempt.sidecars,
            walkbacks=attempt.walkbacks,
            matched_tokens=attempt.matched_tokens,
            mixed_plan=mixed_plan,
            header_seconds=attempt.header_seconds,
            bytes_seconds=attempt.bytes_seconds,
            junction=_beyond(attempt.junction, candidate.endpoint),
        )

    def _missed(self, miss: NotResumed) -> NotResumed:
        lookup, attempt = self._lookup, self._attempt
        is_failure = attempt.failure is not None and miss is not _CANCELLED
        reason = attempt.failure if is_failure and attempt.failure else miss.reason
        detail = attempt.detail if is_failure else miss.detail
        self._store.note_missed(
            Missed(
                request=lookup.request,
                tip=lookup.chain.tip[:8],
                block_count=len(lookup.chain.links),
                prompt_tokens=lookup.prompt_tokens,
                walkbacks=attempt.walkbacks,
                reason=reason,
                detail=detail[:200],
            )
        )
        return NotResumed(
            reason=reason,
            detail=detail,
            walkbacks=attempt.walkbacks,
            matched_tokens=attempt.matched_tokens,
            junction=_beyond(attempt.junction, 0),
        )


_CANCELLED = NotResumed(reason=MissReason.ABORTED, detail="the restore was cancelled")


def resume(
    store: MutableStore,
    lookup: Lookup,
    *,
    make_assembly: Callable[[int], AssemblyT],
    finish: Callable[[AssemblyT], Made],
    clock: Callable[[], float] = time.perf_counter,
) -> Resumed[Made] | NotResumed:
    """Restore the newest valid point of a prompt, or say why there is none, all on this thread."""
    resumption = MutableResumption(store, lookup, make_assembly=make_assembly, clock=clock)
    return resumption.finish(finish)


def _beyond(junction: int | None, endpoint: int) -> int | None:
    return junction if junction is not None and junction > endpoint else None


def _deal_with(
    store: MutableStore,
    located: Located,
    error: PayloadDamagedError | OSError,
    attempt: _Attempt,
) -> None:
    """Say what became of an entry that could not be used, so that it is not offered again."""
    attempt.detail = str(error)
    attempt.refused.add(located.key)
    if isinstance(error, PayloadDamagedError):
        attempt.failure = MissReason.DAMAGED
        store.damage.quarantine(located, str(error))
    elif isinstance(error, FileNotFoundError) and store.files.is_in_place():
        attempt.failure = MissReason.DAMAGED
        store.damage.lose(located, "its file is not there")
    else:
        attempt.failure = MissReason.READ_ERROR
        store.damage.suspect(located)
