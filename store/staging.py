"""Bounded memory between the thread that captures and the disk.

A capture is taken only after its bytes are reserved. When the bound is reached, the caller writes
the oldest waiting boundary itself: memory stays bounded, and no boundary is ever dropped for want
of it. A boundary larger than the bound passes when it is alone.
"""

from collections.abc import Callable

from .boundary import Claim
from .core import MutableCore


def reserve_memory(
    core: MutableCore, claim: Claim, *, write_inline: Callable[[Claim], None]
) -> None:
    """Set ``claim.nbytes`` of memory aside, writing what waits on this thread if need be."""
    started = core.clock.monotonic()
    waited = False
    while True:
        with core.lock:
            if not core.staging_bytes or (
                core.staging_bytes + claim.nbytes <= core.staging_limit_bytes
            ):
                claim.staging_bytes = claim.nbytes
                core.staging_bytes += claim.nbytes
                core.counts.staging_bytes_high_water = max(
                    core.counts.staging_bytes_high_water, core.staging_bytes
                )
                if waited:
                    core.counts.backpressure_seconds += core.clock.monotonic() - started
                return
            waited = True
            oldest = core.to_stage.popleft() if core.to_stage else None
            if oldest is None:
                core.lock.wait(timeout=1.0)
                continue
            core.staging_now += 1
            core.counts.inline_writes += 1
        write_inline(oldest)


def release_memory(core: MutableCore, claim: Claim) -> None:
    """Give the memory of a settled or parked claim back once no reader needs it. Needs the lock."""
    if claim.readers or not (claim.settled.is_set() or claim.is_parked):
        return
    for writing in claim.writings:
        writing.tensors = ()
    core.staging_bytes -= claim.staging_bytes
    claim.staging_bytes = 0
    core.lock.notify_all()
