"""Resuming a prompt: choose, lease, read, verify; and if that fails, the next shorter candidate.

The sidecar is read first, so a bad one costs no block. What did not verify is quarantined, what was
not there is lost, what could not be read just now is left alone and stored again when its boundary
comes by. The caller's objects are not touched: a restore makes new ones or none.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..journal.errors import CacheClosedError, PayloadDamagedError
from ..journal.events import Missed, Restored
from ..journal.words import Kind, MissReason
from ..store.core import Mode
from ..store.lookup import Located, View
from ..store.store import MutableStore
from .candidates import Candidate, Match, match
from .identity import BlockLink, difference
from .layout import Layout
from .plan import Grid, plan_digests
from .reading import Assembly, read_candidate

# Each walk-back removes or refuses an entry, so this only bounds a cache that rots while it is
# read.
WALKBACKS_MAX = 1000


AssemblyT = TypeVar("AssemblyT", bound=Assembly)
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A prompt that wants to resume: its chain, and what its payloads must look like."""

    request: int
    namespace: bytes
    fields: tuple[tuple[str, str], ...]
    layout: Layout
    grid: Grid
    chain: tuple[BlockLink, ...]
    prompt_tokens: int

    @property
    def tip(self) -> bytes:
        return self.chain[-1].key if self.chain else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Generic[Made]):
    """A verified restore. ``made`` is what was built from it."""

    made: Made
    endpoint: int
    tip: Located
    # The sequence of the endpoint's Committed, and the plan that led to it.
    sequence: int
    plan_digest: bytes
    sidecars: int
    walkbacks: int
    mixed_plan: bool
    header_seconds: float
    bytes_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NotResumed:
    """A miss with its reason."""

    reason: MissReason
    detail: str
    walkbacks: int = 0


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


def resume(
    store: MutableStore,
    lookup: Lookup,
    *,
    make_assembly: Callable[[int], AssemblyT],
    finish: Callable[[AssemblyT], Made],
    clock: Callable[[], float] = time.perf_counter,
) -> Resumed[Made] | NotResumed:
    """Restore the newest valid point of a prompt, or say why there is none; the journal is told.

    ``make_assembly`` gets the endpoint. ``finish`` runs on this thread and may raise
    PayloadDamagedError for point state that is not finite.
    """
    attempt = _Attempt()
    while store.mode is not Mode.OFFLINE and attempt.walkbacks <= WALKBACKS_MAX:
        try:
            (found, miss), lease = store.choose(
                lambda view: _choose(view, lookup, frozenset(attempt.refused))
            )
        except CacheClosedError as error:
            return NotResumed(reason=MissReason.CLOSED, detail=str(error))
        try:
            candidate = found.candidate
            if candidate is None:
                return _missed(store, lookup, attempt, miss)
            made = _restore(store, lookup, candidate, attempt, make_assembly, finish, clock)
        finally:
            store.release(lease)
        if made is not None:
            return _resumed(store, lookup, found, candidate, attempt, made[0])
        attempt.walkbacks += 1
        if not store.files.is_in_place():
            store.go_offline()
    if store.mode is Mode.OFFLINE:
        # Whatever could not be read before, this is why.
        attempt.failure = None
    offline = NotResumed(reason=MissReason.OFFLINE, detail=store.mode_detail)
    return _missed(store, lookup, attempt, offline)


def _choose(
    view: View, lookup: Lookup, refused: frozenset[bytes]
) -> tuple[tuple[Match, NotResumed], Sequence[Located]]:
    found = match(
        view,
        lookup.chain,
        prompt_tokens=lookup.prompt_tokens,
        needs_sidecar=lookup.layout.has_point_state,
        refused=refused,
    )
    candidate = found.candidate
    if candidate is None:
        return (found, _why(view, lookup, found)), ()
    located = [*candidate.blocks, *([candidate.sidecar] if candidate.sidecar else [])]
    return (found, NotResumed(reason=MissReason.FAILED, detail="")), located


def _why(view: View, lookup: Lookup, found: Match) -> NotResumed:
    """Why nothing of a prompt can be restored."""
    if lookup.prompt_tokens <= lookup.grid.block_tokens or not lookup.chain:
        detail = f"a prompt of {lookup.prompt_tokens} tokens has no whole block before its last"
        return NotResumed(reason=MissReason.TOO_SHORT, detail=detail)
    if found.blocks:
        detail = f"{found.blocks[-1].end} tokens match, but no checkpoint stands among them"
        return NotResumed(reason=MissReason.NO_CHECKPOINT, detail=detail)
    if not view.block_count():
        return NotResumed(reason=MissReason.EMPTY, detail="nothing is stored")
    others = {
        namespace: fields
        for namespace, fields in view.namespaces().items()
        if namespace != lookup.namespace and view.block_count(namespace)
    }
    if not view.block_count(lookup.namespace) and others:
        nearest = min((difference(lookup.fields, each) for each in others.values()), key=len)
        detail = f"what is stored differs in {', '.join(nearest)}"
        return NotResumed(reason=MissReason.OTHER_NAMESPACE, detail=detail)
    return NotResumed(reason=MissReason.UNSEEN, detail="no stored prompt begins like this one")


def _restore(
    store: MutableStore,
    lookup: Lookup,
    candidate: Candidate,
    attempt: _Attempt,
    make_assembly: Callable[[int], AssemblyT],
    finish: Callable[[AssemblyT], Made],
    clock: Callable[[], float],
) -> tuple[Made] | None:
    """Read and verify one candidate; None if it cannot be used, which is then dealt with."""
    assembly = make_assembly(candidate.endpoint)
    readings = read_candidate(store.files, lookup.layout, candidate, assembly, clock=clock)
    with contextlib.closing(readings):
        for reading in readings:
            attempt.header_seconds += reading.header_seconds
            attempt.bytes_seconds += reading.bytes_seconds
            if reading.error is not None:
                _deal_with(store, reading.located, reading.error, attempt)
                return None
            attempt.sidecars += reading.located.kind is Kind.SIDECAR
    try:
        return (finish(assembly),)
    except PayloadDamagedError as error:
        _deal_with(store, candidate.sidecar or candidate.blocks[-1], error, attempt)
        return None


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


def _resumed(
    store: MutableStore,
    lookup: Lookup,
    found: Match,
    candidate: Candidate,
    attempt: _Attempt,
    made: Made,
) -> Resumed[Made]:
    tip = candidate.blocks[-1]
    endpoint = candidate.sidecar or tip
    plan = dict(plan_digests(lookup.grid, lookup.grid.stop_of(candidate.endpoint)))
    mixed_plan = any(
        located.plan_digest != plan[lookup.grid.stop_of(located.end)]
        for located in (*candidate.blocks, endpoint)
    )
    event = Restored(
        request=lookup.request,
        tip=lookup.tip[:8],
        block_count=len(lookup.chain),
        matched=found.blocks[-1].sequence,
        endpoint=endpoint.sequence,
        endpoint_tokens=candidate.endpoint,
        prompt_tokens=lookup.prompt_tokens,
        walkbacks=attempt.walkbacks,
        mixed_plan=mixed_plan,
    )
    store.note_restored(event, endpoint=tip.key, sidecars_read=attempt.sidecars)
    return Resumed(
        made=made,
        endpoint=candidate.endpoint,
        tip=tip,
        sequence=endpoint.sequence,
        plan_digest=endpoint.plan_digest,
        sidecars=attempt.sidecars,
        walkbacks=attempt.walkbacks,
        mixed_plan=mixed_plan,
        header_seconds=attempt.header_seconds,
        bytes_seconds=attempt.bytes_seconds,
    )


def _missed(store: MutableStore, lookup: Lookup, attempt: _Attempt, miss: NotResumed) -> NotResumed:
    reason = attempt.failure or miss.reason
    detail = attempt.detail if attempt.failure else miss.detail
    store.note_missed(
        Missed(
            request=lookup.request,
            tip=lookup.tip[:8],
            block_count=len(lookup.chain),
            prompt_tokens=lookup.prompt_tokens,
            walkbacks=attempt.walkbacks,
            reason=reason,
            detail=detail[:200],
        )
    )
    return NotResumed(reason=reason, detail=detail, walkbacks=attempt.walkbacks)
