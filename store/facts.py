"""The events of a batch, made from what is about to be committed."""

from ..journal.entries import RECENCY_SHIFT
from ..journal.events import Committed, Event, Replaced, Superseded, Touched
from .boundary import Claim, Writing
from .core import MutableCore

# A recency has room for the place of a key in one Touched.
TOUCHED_KEYS_MAX = 1 << RECENCY_SHIFT


def commit_events(core: MutableCore, claims: list[Claim]) -> list[Event]:
    """What makes these claims exist: parents before children, whichever claim has them."""
    events: list[Event] = []
    pairs = [(claim, writing) for claim in claims for writing in claim.writings]
    for claim, writing in sorted(pairs, key=lambda pair: (pair[1].part.end, pair[1].part.kind)):
        events.append(_committed(claim, writing))
        older = core.state.entry(writing.part.kind, writing.part.key)
        if (
            older is not None
            and older.file is not None
            and (older.kind, older.key) not in core.overlay.victims
        ):
            events.append(
                Replaced(
                    kind=older.kind,
                    key=older.key,
                    generation=older.generation,
                    file=older.file,
                )
            )
    if passed := tuple(each.passed for each in claims if each.passed is not None):
        events.append(Superseded(keys=passed))
    return events


def _committed(claim: Claim, writing: Writing) -> Committed:
    part, staged = writing.part, writing.staged
    return Committed(
        kind=part.kind,
        key=part.key,
        parent=part.parent,
        namespace=claim.boundary.namespace,
        start=part.start,
        end=part.end,
        generation=writing.generation,
        file=writing.file,
        nbytes=0 if staged is None else staged.nbytes,
        allocated_bytes=0 if staged is None else staged.charge_bytes,
        header_digest=b"" if staged is None else staged.header_digest,
        plan_digest=claim.boundary.plan_digest,
        prefill_seconds=claim.prefill_seconds,
    )


def request_events(core: MutableCore) -> list[Event]:
    """The request events and touches that waited for a commit. Needs the lock."""
    requests, core.overlay.requests = core.overlay.requests, []
    touches, core.overlay.touches = core.overlay.touches, {}
    events: list[Event] = [*requests]
    keys = tuple(touches)
    for first in range(0, len(keys), TOUCHED_KEYS_MAX):
        events.append(Touched(keys=keys[first : first + TOUCHED_KEYS_MAX]))
    return events
