"""A recording that cannot hurt the request that it records."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..recording import MutableRecording
from .in_flight import Prefill

log = logging.getLogger("walkback")


class QuietRecording:
    """A recording whose failures are lines in the log. One owner, as the recording's.

    It is over once anything in it has failed: what it would store next might not go on from what is
    stored. What was captured before is kept, and the request goes on.
    """

    def __init__(self, recording: MutableRecording, prefill: Prefill | None = None) -> None:
        """``prefill`` is told of the stops: whoever waits for one may resume there."""
        self._recording = recording
        self._prefill = prefill
        self._is_over = False
        # Called with the recording once it is over.
        self.at_end: Callable[[MutableRecording], None] = lambda _: None

    def stop(self, position: int, make_cache: Callable[[], Sequence[Any]]) -> None:
        """Store the boundary at ``position``, where the cache that ``make_cache`` gives stands."""
        self._try(lambda: self._recording.stop(position, make_cache()))
        if self._prefill is not None:
            self._prefill.reach(position)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tell what was decoded."""
        self._try(lambda: self._recording.extend(token_ids))

    def finish(self) -> None:
        """End the recording. Twice is harmless."""
        if self._is_over:
            return
        self._is_over = True
        for step in (self._recording.finish, lambda: self.at_end(self._recording)):
            try:
                step()
            except Exception:
                log.exception("the end of a recording failed")
        if self._prefill is not None:
            self._prefill.end()

    def _try(self, step: Callable[[], object]) -> None:
        if self._is_over:
            return
        try:
            step()
        except Exception:
            log.exception("a recording failed; nothing more of its request is stored")
            self.finish()
