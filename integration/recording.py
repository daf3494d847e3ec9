"""Recording the stops of one request while it prefills, and where its answer ends."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..journal.errors import UnsupportedLayoutError
from ..journal.words import Kind, NotStoredReason
from ..restore.identity import BlockLink, Chain
from ..restore.images import is_inside
from ..restore.layout import Layout
from ..restore.plan import Plan, plan_after, plan_after_decoding
from ..store.boundary import Boundary, Claim, NotStored, Part
from ..store.lookup import Lease
from ..store.store import MutableStore
from ..store.tensors import Tensor
from .capture import Captured, CaptureRefusedError, capture
from .leaves import PositionsDisagreeError

log = logging.getLogger("walkback")

_REASONS = {
    "position": NotStoredReason.POSITION,
    "layout": NotStoredReason.LAYOUT,
    "non_finite": NotStoredReason.NON_FINITE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterForm:
    """What the cache is from ``start`` on: its boundaries stand in a namespace of their own."""

    start: int
    namespace: bytes
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What one recording needs to know of its model, its prompt and where it resumed."""

    store: MutableStore
    namespace: bytes
    # None if the model's cache has leaves that are not stored; ``unsupported`` says which.
    layout: Layout | None
    unsupported: str
    plan: Plan
    producer: str
    request: int
    chain: Chain
    endpoint: int
    # Where the request resumed: behind ``endpoint`` if memory has more than the store.
    resumed_at: int
    plan_digest: bytes
    restored_from: int | None
    # What keeps the block that this recording goes on from; it is the recording's to release.
    held: Lease | None
    later: LaterForm | None = None


class MutableRecording:
    """Stores the boundaries of one request as prefill reaches them.

    One owner: the thread that prefills. ``stop`` captures there and then, and hands bytes to the
    store's writer; it blocks only when the staging bound is reached. A boundary that is not stored
    is a ``NotStored`` value with a reason, also in the journal; the request goes on.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._chain = recorded.chain
        self._position = recorded.endpoint
        self._plan_digest = recorded.plan_digest
        resumed_at = recorded.resumed_at
        passes = recorded.plan.passes(resumed_at)
        self._passed = recorded.chain.ending_at(resumed_at).key if passes else None
        self._last_time = time.monotonic()
        self._held = recorded.held
        # What was claimed and neither put nor given back yet.
        self._claimed: Claim | None = None
        self._claims: list[Claim] = []
        self._is_over = False
        self.refusals: list[NotStored] = []
        # Boundaries that are durable, and those that were there already.
        self.stored_count = 0
        self.known_count = 0

    @property
    def position(self) -> int:
        """The last boundary that was captured, or that the request resumed from."""
        return self._position

    def stop(self, position: int, cache: Sequence[Any]) -> NotStored | None:
        """Store the boundary at ``position``, where the cache stands now; None if it is on its way.

        ``position`` is beyond the last one, not beyond the token ids that are known, and not inside
        an image. Off the grid of blocks a tail is stored under it.
        """
        later = self._recorded.later
        if later is not None and position >= later.start:
            self._take_on(later)
        refusal = self._refusal_of(position)
        if refusal is None:
            refusal = self._store(position, cache)
        if refusal is not None:
            self.refusals.append(refusal)
        # What a stop costs is not prefill.
        self._last_time = time.monotonic()
        return refusal

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tell what was decoded: the token ids that went into the cache behind the known ones."""
        if self._recorded.layout is not None:
            self._chain = self._chain.longer(token_ids)

    def finish(self) -> None:
        """End the recording. What was captured goes on being stored. Twice is harmless."""
        self._is_over = True
        self._give_back(NotStored(NotStoredReason.ABORTED, "the recording is over"))
        self._hold(())

    def abort(self) -> None:
        """End the recording and wait until the store has let go of every buffer."""
        self.finish()
        self.wait()

    def wait(self, timeout_seconds: float | None = None) -> list[NotStored]:
        """Wait until every boundary is durable or refused, or that long; the refusals."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for claim in self._claims:
            claim.settled.wait(None if deadline is None else max(deadline - time.monotonic(), 0))
        self._drop_settled()
        return list(self.refusals)

    @property
    def waiting_count(self) -> int:
        """Boundaries that were neither durable nor refused when that was last looked at."""
        return len(self._claims)

    def _take_on(self, later: LaterForm) -> None:
        """Begin anew in the namespace of another form: the next stop stores every block in it."""
        self._recorded = dataclasses.replace(
            self._recorded, namespace=later.namespace, layout=later.layout, later=None
        )
        self._chain = self._chain.under(later.namespace)
        self._position = 0
        self._hold(())

    def _refusal_of(self, position: int) -> NotStored | None:
        recorded = self._recorded
        if recorded.layout is None:
            refusal = NotStored(NotStoredReason.UNSUPPORTED_LAYOUT, recorded.unsupported)
        elif self._is_over:
            refusal = NotStored(NotStoredReason.ABORTED, "the recording is over")
        elif position <= self._position:
            refusal = NotStored(
                NotStoredReason.OFF_GRID,
                f"a stop at {position} does not go on from {self._position}",
            )
        elif position > self._chain.token_count:
            detail = f"{position} is beyond the {self._chain.token_count} tokens that are known"
            refusal = NotStored(NotStoredReason.OFF_GRID, detail)
        elif is_inside(self._chain.images, position):
            refusal = NotStored(NotStoredReason.INSIDE_IMAGE, f"{position} is inside an image")
        else:
            return None
        recorded.store.refuse(refusal, request=recorded.request, key=b"", position=position)
        return refusal

    def _store(self, position: int, cache: Sequence[Any]) -> NotStored | None:
        recorded = self._recorded
        store, layout = recorded.store, recorded.layout
        assert layout is not None
        prefill_seconds = time.monotonic() - self._last_time
        prompt_tokens = recorded.plan.prompt_tokens
        if position <= prompt_tokens:
            self._plan_digest = plan_after(self._plan_digest, position)
        else:
            self._plan_digest = plan_after_decoding(self._plan_digest, prompt_tokens, position)
        links = self._chain.between(self._position, position)
        if is_end := recorded.plan.keeps_state_at(position):
            links += self._tail(position)
        boundary = self._boundary(layout, position, links, with_state=is_end)
        self._position = position
        if not boundary.parts:
            self.known_count += 1
            return None
        claim = store.claim(
            boundary,
            request=recorded.request,
            producer=recorded.producer,
            restored_from=recorded.restored_from,
            # What decoding has reached is no stop of this prompt's: asked again, it resumes there.
            passed=self._passed if is_end and position <= prompt_tokens else None,
        )
        if isinstance(claim, NotStored):
            return claim
        if claim.is_empty:
            self.known_count += 1
            self._hold_tip()
            return None
        self._claimed = claim
        try:
            store.reserve(claim)
            captured = _capture(cache, layout, position, claim)
            store.put(claim, _in_order(claim, captured), prefill_seconds=prefill_seconds)
        except CaptureRefusedError as error:
            refusal = NotStored(_REASONS[error.reason], str(error))
        except (PositionsDisagreeError, UnsupportedLayoutError) as error:
            refusal = NotStored(NotStoredReason.POSITION, str(error))
        except Exception as error:
            # The request goes on, whatever is wrong with the cache that it was given.
            log.exception("a capture failed; its boundary is not stored")
            refusal = NotStored(NotStoredReason.FAILED, f"{type(error).__name__}: {error}")
        except BaseException:
            self._give_back(NotStored(NotStoredReason.ABORTED, "the capture was interrupted"))
            raise
        else:
            self._claimed = None
            self._drop_settled()
            self._claims.append(claim)
            self._hold_tip()
            return None
        self._give_back(refusal)
        return refusal

    def _give_back(self, refusal: NotStored) -> None:
        """Cancel what is claimed. If that fails it is done again when the recording ends."""
        if self._claimed is not None:
            self._recorded.store.cancel(self._claimed, refusal)
            self._claimed = None

    def _tail(self, position: int) -> list[BlockLink]:
        return [self._chain.ending_at(position)] if position % self._chain.block_tokens else []

    def _boundary(
        self, layout: Layout, position: int, links: Sequence[BlockLink], *, with_state: bool
    ) -> Boundary:
        recorded = self._recorded
        parts = [
            Part(
                kind=Kind.BLOCK,
                key=link.key,
                parent=link.parent,
                start=link.start,
                end=link.end,
                tensors=layout.block_specs(link.start, link.end),
            )
            for link in links
        ]
        if layout.has_point_state and with_state:
            tip = self._chain.ending_at(position)
            parts.append(
                Part(
                    kind=Kind.SIDECAR,
                    key=tip.key,
                    parent=tip.parent,
                    start=position,
                    end=position,
                    tensors=layout.point_specs(),
                )
            )
        return Boundary(
            namespace=recorded.namespace,
            layout_digest=layout.digest(),
            plan_digest=self._plan_digest,
            position=position,
            parts=tuple(parts),
        )

    def _drop_settled(self) -> None:
        """Let go of the claims whose outcome is known, and keep their refusals."""
        waiting: list[Claim] = []
        for claim in self._claims:
            if not claim.settled.is_set():
                waiting.append(claim)
            elif claim.refusal is not None:
                self.refusals.append(claim.refusal)
            else:
                self.stored_count += 1
        self._claims = waiting

    def _hold_tip(self) -> None:
        """Keep what the next boundary will continue from being evicted before it is claimed."""
        full = self._position // self._chain.block_tokens * self._chain.block_tokens
        self._hold((self._chain.ending_at(full).key,) if full else ())

    def _hold(self, keys: tuple[bytes, ...]) -> None:
        store = self._recorded.store
        before, self._held = self._held, store.hold(keys) if keys else None
        if before is not None:
            store.release(before)


def _capture(cache: Sequence[Any], layout: Layout, position: int, claim: Claim) -> Captured:
    blocks = [each.part for each in claim.writings if each.part.kind is Kind.BLOCK]
    return capture(
        cache,
        layout,
        position=position,
        ranges=[(part.start, part.end) for part in blocks],
        with_point=len(blocks) < len(claim.writings),
    )


def _in_order(claim: Claim, captured: Captured) -> list[Sequence[Tensor]]:
    blocks = iter(captured.blocks)
    return [
        next(blocks) if writing.part.kind is Kind.BLOCK else captured.point
        for writing in claim.writings
    ]
