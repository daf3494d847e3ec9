"""The prompts that this server computes right now, and how long one waits for another.

Two requests with one prefix that come together would both compute it. The second waits on its own
thread until the first has captured the last stop that both have, which is readable at once, and
resumes there. Had it joined instead, the two would have shared the machine on the way to that stop.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

# However slow the machine has been, a request is served after this.
WAIT_SECONDS_MAX = 60.0


class Prefill:
    """One prompt on its way. ``begin``, ``reach`` and ``end`` belong to whoever computes it."""

    def __init__(
        self,
        prefills: "MutablePrefills",
        model_key: Any,
        token_ids: Sequence[int],
        stops: Sequence[int],
    ) -> None:
        self.model_key = model_key
        self.token_ids = token_ids
        # Where it can be resumed once it has come there.
        self.stops = stops
        # Before it has begun, what there is to resume it from.
        self.position = 0
        self.began: float | None = None
        self._prefills = prefills

    def begin(self, position: int) -> None:
        """It is computed from ``position`` on."""
        self._prefills.begin(self, position)

    def reach(self, position: int) -> None:
        """What can be captured at ``position`` has been. Positions of its answer do not count."""
        self._prefills.reach(self, position)

    def end(self) -> None:
        """Nothing more will come of it. Twice is harmless."""
        self._prefills.end(self)


class _Shared(NamedTuple):
    """Two positions on one prompt, 0 if there is none."""

    reached: int
    coming: int


class MutablePrefills:
    """All prompts under way, and the speed of those before. Any thread; one lock of its own.

    Invariant: only what is under way is waited for, and what waits is not: so there is no ring.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._under_way: list[Prefill] = []
        self._waiting_count = 0
        # Of the newest stops, each counting half of the one behind it.
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def waiting_count(self) -> int:
        """How many requests wait for another's prefill."""
        with self._changed:
            return self._waiting_count

    def enter(
        self,
        model_key: Any,
        token_ids: Sequence[int],
        stops: Sequence[int],
        *,
        restorable: Callable[[], int],
        wait_seconds_max: float,
    ) -> Prefill:
        """The prefill of a prompt, under way, after waiting for others as long as that pays.

        That is no longer than computing the difference would take: from what is ``restorable``, in
        tokens, to the last stop that another is yet to reach on this prompt. Whoever gets it must
        end it.
        """
        prefill = Prefill(self, model_key, token_ids, stops)
        started = self._clock()
        with self._changed:
            is_shared = wait_seconds_max > 0 and self._shared(prefill).coming > 0
        depth = restorable() if is_shared else 0
        with self._changed:
            self._waiting_count += 1
            while True:
                shared = self._shared(prefill)
                prefill.position = max(depth, prefill.position, shared.reached)
                worth = min(self._seconds_for(shared.coming - depth), wait_seconds_max)
                left = started + worth - self._clock()
                if shared.coming <= prefill.position or left <= 0:
                    break
                self._changed.wait(left)
            self._waiting_count -= 1
            self._under_way.append(prefill)
        return prefill

    def begin(self, prefill: Prefill, position: int) -> None:
        with self._changed:
            prefill.position, prefill.began = position, self._clock()
            self._changed.notify_all()

    def reach(self, prefill: Prefill, position: int) -> None:
        with self._changed:
            if prefill.began is None or position not in prefill.stops:
                return
            now = self._clock()
            self._tokens = self._tokens / 2 + position - prefill.position
            self._seconds = self._seconds / 2 + now - prefill.began
            prefill.position, prefill.began = position, now
            self._changed.notify_all()

    def end(self, prefill: Prefill) -> None:
        with self._changed:
            if prefill in self._under_way:
                self._under_way.remove(prefill)
                self._changed.notify_all()

    def _seconds_for(self, tokens: int) -> float:
        """What computing so many takes; for ever while nothing was computed yet."""
        return tokens * self._seconds / self._tokens if self._tokens else float("inf")

    def _shared(self, prefill: Prefill) -> _Shared:
        """The last stop on this prompt that others have reached, and that they are yet to."""
        reached = coming = 0
        for other in self._under_way:
            if other.model_key == prefill.model_key:
                for stop in _shared_stops(other, prefill.token_ids):
                    if stop <= other.position:
                        reached = max(reached, stop)
                    else:
                        coming = max(coming, stop)
        return _Shared(reached, coming)


def _shared_stops(other: Prefill, token_ids: Sequence[int]) -> Iterator[int]:
    """The stops of a prefill up to which it has these token ids.

    One token of a prompt is always left to compute, so a stop at its end is of no use to it.
    """
    for start, stop in pairwise((0, *other.stops)):
        if stop >= len(token_ids) or other.token_ids[start:stop] != token_ids[start:stop]:
            return
        yield stop
