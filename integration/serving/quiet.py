"""What keeps failures of ours from mlx-lm: a guard, and a recording behind it."""

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

from ..recording import MutableRecording
from .in_flight import Prefill

log = logging.getLogger("walkback")


def quietly(consequence: str) -> contextlib.AbstractContextManager[None, bool]:
    """An exception in the body ends the body, and is a line in the log that says what follows."""
    # That it swallows exceptions is what a type checker must know of it.
    return cast("contextlib.AbstractContextManager[None, bool]", _guard(consequence))


@contextlib.contextmanager
def _guard(consequence: str) -> Generator[None]:
    try:
        yield
    except Exception:
        log.exception("%s", consequence)


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
            with quietly("others may wait for what is there"):
                self._prefill.reach(position)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tell what was decoded."""
        self._try(lambda: self._recording.extend(token_ids))

    def finish(self) -> None:
        """End the recording. Twice is harmless."""
        if self._is_over:
            return
        self._is_over = True
        with quietly("a recording was not ended; what it keeps goes with it"):
            self._recording.finish()
        with quietly("the end of a recording was not told"):
            self.at_end(self._recording)
        if self._prefill is not None:
            with quietly("others may wait for what will not come"):
                self._prefill.end()

    def _try(self, step: Callable[[], object]) -> None:
        if self._is_over:
            return
        is_done = False
        with quietly("a recording failed; nothing more of its request is stored"):
            step()
            is_done = True
        if not is_done:
            self.finish()
