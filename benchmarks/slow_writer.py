"""``walkback serve`` with a writer that takes its time: what is captured has to wait."""

import sys
import time
from typing import Any

from walkback.integration.serving.server import serve
from walkback.store import ordering

SECONDS_PER_MIB = 0.1

_stage = ordering.stage


def _slowly(files: Any, path: str, description: Any, tensors: Any) -> Any:
    staged = _stage(files, path, description, tensors)
    time.sleep(SECONDS_PER_MIB * staged.nbytes / (1 << 20))
    return staged


if __name__ == "__main__":
    ordering.stage = _slowly
    serve(sys.argv[1:])
