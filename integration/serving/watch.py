"""A watch over what is stored: a cache that stores nothing says so, once and loudly."""

import logging
import threading
from collections import Counter

log = logging.getLogger("walkback")

PROMPTS_MAX = 10


class MutableWatch:
    """Counts the prompts of which nothing was stored though it could have been. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unstored = 0
        self._has_stored = False
        self._why: Counter[str] = Counter()

    @property
    def unstored(self) -> int:
        """How many such prompts came since something was stored."""
        with self._lock:
            return self._unstored

    def note_stored(self) -> None:
        """Something of a prompt was stored, or is already there."""
        with self._lock:
            self._has_stored = True
            self._unstored = 0

    def note_unstored(self, why: str) -> None:
        """Nothing of a prompt was stored."""
        with self._lock:
            self._unstored += 1
            self._why[why] += 1
            if self._has_stored or self._unstored != PROMPTS_MAX:
                return
            ((reason, count),) = self._why.most_common(1)
        log.warning(
            "NOTHING IS BEING STORED: of %d prompts not one; the reason of %d was: %s",
            PROMPTS_MAX,
            count,
            reason,
        )
