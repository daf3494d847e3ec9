"""A restore under way, and what it gives: read on a thread of its own, made on its caller's."""

import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..journal.errors import CacheClosedError
from ..journal.events import Missed
from ..journal.words import MissReason
from ..restore.choosing import NotResumed, StoredPrefix, stored_prefix
from ..restore.identity import Chain
from ..restore.images import ImageSpan, is_inside
from ..restore.materialise import MutableAssembly
from ..restore.plan import Grid, Plan, plan_after, plan_of_unknown_stops, plan_start
from ..restore.walkback import MutableResumption, Resumed
from ..store.lookup import Lease
from .forms import Binding, lookup_of
from .recording import MutableRecording, Recorded

log = logging.getLogger("walkback")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """What a prompt resumes from. ``cache`` stands at ``endpoint``; it is fresh if that is 0.

    ``cache`` belongs to the caller. ``uncached`` token ids are left to prefill, at least one;
    prefill is to pause at ``stops`` and tell ``recording``.
    """

    cache: list[Any]
    endpoint: int
    uncached: int
    stops: tuple[int, ...]
    # Why there is nothing to resume from, and in words; None and "" after a restore.
    reason: MissReason | None
    detail: str
    sidecars: int
    walkbacks: int
    # How many of the prompt's first tokens stand in whole blocks on disk, restorable or not.
    matched_tokens: int
    mixed_plan: bool
    header_seconds: float
    bytes_seconds: float
    recording: MutableRecording


class _Made(NamedTuple):
    """A restored cache, and what keeps the block that its recording goes on from."""

    cache: list[Any]
    held: Lease


class PendingRestore:
    """A restore that reads while its caller does something else.

    ``is_ready`` and ``cancel`` may be asked on any thread. ``finish`` belongs to the thread that
    owns the model's arrays, and comes once; a restore that is not finished must be cancelled.
    Nothing that the disk holds or does raises here.
    """

    def __init__(
        self,
        binding: Binding,
        chain: Chain,
        *,
        turn_ends: Iterable[int],
        request: int,
        headroom_tokens: int,
        beyond: int,
        readers: Executor | None,
    ) -> None:
        """Begin. Without ``readers`` it is ``finish`` that reads, on its own thread."""
        self._binding = binding
        self._chain = chain
        self._make_plan = functools.partial(
            Plan,
            binding.grid,
            chain.token_count,
            tuple(turn_ends),
            images=chain.images,
            turning_point=binding.turning_point,
        )
        self._request = request
        self._resumption: MutableResumption[MutableAssembly] | None = None
        self._reading: Future[None] | None = None
        # What is held for a recording that is not made yet. Only ``finish`` and ``adopt`` touch it.
        self._held: Lease | None = None
        layout = binding.layout
        if layout is None:
            return
        capacity_tokens = chain.token_count + headroom_tokens
        self._resumption = MutableResumption(
            binding.store,
            lookup_of(
                binding,
                layout,
                chain,
                self._make_plan(),
                request=request,
                beyond=beyond,
            ),
            make_assembly=lambda endpoint: MutableAssembly(
                binding.at(endpoint).layout or layout,
                endpoint=endpoint,
                capacity_tokens=capacity_tokens,
            ),
        )
        if readers is not None:
            try:
                self._reading = readers.submit(self._resumption.read)
            except RuntimeError as error:
                log.debug("no reader takes a restore any more: %s", error)

    @property
    def is_ready(self) -> bool:
        """Whether ``finish`` would wait for no disk."""
        return self._resumption is None or (self._reading is not None and self._reading.done())

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it is ready; whether it is."""
        if self._reading is not None and not self._reading.done():
            with contextlib.suppress(NotYetError, CancelledError):
                self._reading.exception(timeout_seconds)
        return self.is_ready

    def cancel(self) -> None:
        """Give it up: what is leased is let go of, now or when a reader has come that far."""
        if self._resumption is not None:
            self._resumption.cancel()

    def finish(self) -> Restoration:
        """Cache objects at the endpoint, or fresh ones and the reason; waits for its readers."""
        try:
            return self._restoration_of(self._outcome())
        except BaseException:
            self._let_go()
            raise

    def _restoration_of(self, outcome: Resumed[_Made] | NotResumed) -> Restoration:
        resumed = outcome if isinstance(outcome, Resumed) else None
        endpoint = 0 if resumed is None else resumed.endpoint
        if resumed is not None:
            uncached = self._chain.token_count - endpoint
            self._binding.depths.note(endpoint=endpoint, uncached=uncached)
        plan = self._make_plan(junction=outcome.junction)
        return Restoration(
            cache=self._binding.make_cache() if resumed is None else resumed.made.cache,
            endpoint=endpoint,
            uncached=self._chain.token_count - endpoint,
            stops=plan.stops_after(endpoint),
            reason=None if isinstance(outcome, Resumed) else outcome.reason,
            detail="" if isinstance(outcome, Resumed) else outcome.detail,
            sidecars=0 if resumed is None else resumed.sidecars,
            walkbacks=outcome.walkbacks,
            matched_tokens=outcome.matched_tokens,
            mixed_plan=resumed is not None and resumed.mixed_plan,
            header_seconds=0.0 if resumed is None else resumed.header_seconds,
            bytes_seconds=0.0 if resumed is None else resumed.bytes_seconds,
            recording=self._recording(
                plan,
                self._binding.at(endpoint),
                endpoint=endpoint,
                resumed_at=endpoint,
                plan_digest=_plan_digest(self._binding.grid, resumed),
                restored_from=None if resumed is None else resumed.sequence or None,
                held=None if resumed is None else resumed.made.held,
            ),
        )

    def adopt(self, cache: list[Any], endpoint: int) -> Restoration:
        """Go on with a cache of the caller's own that stands at ``endpoint``; nothing is read.

        Instead of ``finish``. What is missing on disk of the prefix is stored with the next stop.
        ValueError for an endpoint inside an image.
        """
        self.cancel()
        if is_inside(self._chain.images, endpoint):
            raise ValueError(f"{endpoint} is inside an image")
        try:
            return self._adopted(cache, endpoint)
        except BaseException:
            self._let_go()
            raise

    def _adopted(self, cache: list[Any], endpoint: int) -> Restoration:
        plan = self._make_plan()
        form = self._binding.at(endpoint)
        prefix = self._stored(self._chain_in(form), endpoint)
        self._held = prefix.held
        return Restoration(
            cache=cache,
            endpoint=endpoint,
            uncached=self._chain.token_count - endpoint,
            stops=plan.stops_after(endpoint),
            reason=None,
            detail="",
            sidecars=0,
            walkbacks=0,
            matched_tokens=prefix.end,
            mixed_plan=prefix.plan_digest != plan.digest_of(endpoint),
            header_seconds=0.0,
            bytes_seconds=0.0,
            recording=self._recording(
                plan,
                form,
                endpoint=prefix.end,
                resumed_at=endpoint,
                plan_digest=prefix.plan_digest or plan_of_unknown_stops(endpoint),
                restored_from=prefix.sequence,
                held=prefix.held,
            ),
        )

    def _chain_in(self, form: Binding) -> Chain:
        return self._chain if form is self._binding else self._chain.under(form.namespace)

    def _stored(self, chain: Chain, endpoint: int) -> StoredPrefix:
        if not endpoint:
            return _NOTHING_STORED
        layout = self._binding.layout
        needs_sidecar = layout is not None and layout.has_point_state
        try:
            return stored_prefix(self._binding.store, chain, endpoint, needs_sidecar=needs_sidecar)
        except CacheClosedError:
            return _NOTHING_STORED

    def _outcome(self) -> Resumed[_Made] | NotResumed:
        if self._resumption is None:
            return self._failed(self._binding.unsupported, MissReason.UNSUPPORTED_LAYOUT)
        try:
            if self._reading is not None and not self._reading.cancelled():
                self._reading.result()
            return self._resumption.finish(self._make)
        except Exception as error:
            # The one place that catches broadly: whatever went wrong, the request prefills.
            log.exception("a restore failed; the prompt is prefilled from its start")
            self._resumption.cancel()
            self._let_go()
            return self._failed(f"{type(error).__name__}: {error}", MissReason.FAILED)

    def _make(self, assembly: MutableAssembly) -> _Made:
        assembly.hand_over()
        form = self._binding.at(assembly.endpoint)
        cache = assembly.finish(form.make_cache)
        # While the lease still stands: what the recording continues must not go in between.
        key = self._chain_in(form).ending_at(assembly.endpoint).key
        self._held = self._binding.store.hold((key,))
        return _Made(cache, self._held)

    def _let_go(self) -> None:
        """Of what no recording has got."""
        held, self._held = self._held, None
        if held is not None:
            self._binding.store.release(held)

    def _recording(
        self,
        plan: Plan,
        form: Binding,
        *,
        endpoint: int,
        resumed_at: int,
        plan_digest: bytes,
        restored_from: int | None,
        held: Lease | None,
    ) -> MutableRecording:
        recording = MutableRecording(
            Recorded(
                store=form.store,
                namespace=form.namespace,
                layout=form.layout,
                unsupported=form.unsupported,
                plan=plan,
                producer=form.producer,
                request=self._request,
                chain=self._chain_in(form),
                endpoint=endpoint,
                resumed_at=resumed_at,
                plan_digest=plan_digest,
                restored_from=restored_from,
                held=held,
                later=form.later_form(),
            )
        )
        self._held = None
        return recording

    def _failed(self, detail: str, reason: MissReason) -> NotResumed:
        """A miss that no entry is to blame for; the journal is told as of any other."""
        chain = self._chain
        self._binding.store.note_missed(
            Missed(
                request=self._request,
                tip=chain.tip[:8],
                block_count=len(chain.links),
                prompt_tokens=chain.token_count,
                walkbacks=0,
                reason=reason,
                detail=detail[:200],
            )
        )
        return NotResumed(reason=reason, detail=detail)


_NOTHING_STORED = StoredPrefix(end=0, plan_digest=None, sequence=None, held=None)


def chain_of(binding: Binding, token_ids: Sequence[int], images: Iterable[ImageSpan] = ()) -> Chain:
    """The blocks of a prompt with their keys in this cache."""
    return Chain(
        token_ids,
        namespace=binding.namespace,
        secret=binding.store.secret,
        block_tokens=binding.grid.block_tokens,
        images=images,
    )


def _plan_digest(grid: Grid, resumed: Resumed[_Made] | None) -> bytes:
    """The digest of the plan that the rest of the prompt continues."""
    if resumed is None:
        return plan_start(grid)
    if resumed.is_at_its_stop:
        return resumed.plan_digest
    # Cut before the stop at which it was captured: from here on the chunks are not those of the
    # stored plan.
    return plan_after(resumed.plan_digest, resumed.endpoint)
