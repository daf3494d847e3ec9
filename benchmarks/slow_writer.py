"""``walkback serve`` with a writer that begins only when no more may wait for it."""

import sys
import time

from walkback.integration.serving.server import serve
from walkback.store import writer
from walkback.store.boundary import Claim
from walkback.store.core import MutableCore

# After so long nothing more is captured: the prompt is prefilled, and what waits is written.
QUIET_SECONDS = 30.0

_stage_claim = writer.stage_claim


def _late(core: MutableCore, claim: Claim) -> None:
    waiting, since = 0, time.monotonic()
    while time.monotonic() - since < QUIET_SECONDS:
        with core.lock:
            now, limit = core.staging_bytes, core.staging_limit_bytes
        if now + claim.nbytes > limit:
            break
        if now != waiting:
            waiting, since = now, time.monotonic()
        time.sleep(0.01)
    else:
        writer.stage_claim = _stage_claim
    _stage_claim(core, claim)


if __name__ == "__main__":
    writer.stage_claim = _late
    serve(sys.argv[1:])
