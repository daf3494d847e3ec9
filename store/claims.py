"""Claiming a boundary: what of it is missing, and the exclusive right to store that."""

from ..journal.words import Cause, Kind
from .boundary import Boundary, Claim, Part, Writing
from .core import MutableCore
from .overlay import InFlight
from .payload import Description


def make_claim(
    core: MutableCore,
    boundary: Boundary,
    *,
    request: int,
    producer: str,
    restored_from: int | None,
    passed: bytes | None,
) -> Claim:
    """Claim the parts that are neither stored nor being stored. Needs the lock.

    The parts, and the block that they continue, are no victims until the claim is settled. A claim
    without parts is settled already.
    """
    writings = tuple(
        _writing(core, boundary, part, producer)
        for part in boundary.parts
        if _is_missing(core, part)
    )
    keys = {writing.part.key for writing in writings}
    keys |= {writing.part.parent for writing in writings} - {boundary.namespace}
    claim = Claim(
        boundary=boundary,
        request=request,
        writings=writings,
        restored_from=restored_from,
        held=tuple(sorted(keys)),
        passed=passed,
    )
    if claim.is_empty:
        claim.settled.set()
        return claim
    core.overlay.hold(claim.held)
    for writing in writings:
        identity = (writing.part.kind, writing.part.key)
        core.overlay.in_flight[identity] = InFlight(writing, claim)
    return claim


def _is_missing(core: MutableCore, part: Part) -> bool:
    identity = (part.kind, part.key)
    overlay = core.overlay
    if identity in overlay.in_flight:
        return False
    live = core.state.entry(*identity) is not None and identity not in overlay.victims
    return not live or identity in overlay.suspects


def _writing(core: MutableCore, boundary: Boundary, part: Part, producer: str) -> Writing:
    older = core.state.entry(part.kind, part.key)
    block_is_live = part.key in core.state.blocks
    if older is not None:
        cause = Cause.REPLACEMENT
    elif part.kind is Kind.SIDECAR and block_is_live:
        cause = Cause.REPAIR
    else:
        cause = Cause.PREFILL
    generation = 1 if older is None else older.generation + 1
    return Writing(
        part=part,
        generation=generation,
        cause=cause,
        description=Description(
            kind=part.kind,
            key=part.key,
            parent=part.parent,
            namespace=boundary.namespace,
            layout_digest=boundary.layout_digest,
            plan_digest=boundary.plan_digest,
            start=part.start,
            end=part.end,
            generation=generation,
            store_id=core.store_id,
            producer=producer,
            tensors=part.tensors,
        ),
    )
