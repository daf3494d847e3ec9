"""One line in the log for each request: what it had, what it lacked, and what is stored of it."""

import contextlib
import logging
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...journal.words import MissReason
from ..recording import MutableRecording
from ..restoration import Restoration
from .quiet import quietly
from .watch import MutableWatch

log = logging.getLogger("walkback")

# A line waits for the disk, but not for one that hangs.
SETTLE_SECONDS_MAX = 10.0
WAITING_MAX = 64
# What of the prompts before is kept, to say where one parts from them: 16 MB of token ids.
SEEN_PROMPTS_MAX = 64
SEEN_TOKENS_MAX = 1 << 21
_STEP = 1024

# Misses for which it does not matter how the prompt begins.
_WHATEVER_THE_PROMPT = frozenset(MissReason) - {MissReason.UNSEEN, MissReason.NO_CHECKPOINT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is known of a request when it begins, and what of it can be stored."""

    # In words: what it had, and what was left to compute.
    had: str
    # Why nothing of it is stored, or "" if it may be.
    why_unstored: str = ""
    # Whether something of it should have been stored: there is a stop beyond the endpoint.
    is_eligible: bool = True


class MutableTeller:
    """Writes each line when its stores are durable or refused, on a thread of its own."""

    def __init__(self) -> None:
        self.watch = MutableWatch()
        self._lines = ThreadPoolExecutor(1, thread_name_prefix="walkback-lines")
        self._waiting = threading.Semaphore(WAITING_MAX)

    def tell(self, told: Told, recording: MutableRecording | None = None) -> None:
        """Tell of a request whose recording, if it has one, is over. Any thread; never waits."""
        if recording is None or not self._waiting.acquire(blocking=False):
            self._tell(told, recording)
            return
        try:
            self._lines.submit(self._tell_later, told, recording)
        except RuntimeError:
            # Closed meanwhile.
            self._waiting.release()
            self._tell(told, recording)

    def close(self) -> None:
        """Write what waits. The stores that it waits for must be over, or come to be."""
        self._lines.shutdown()

    def _tell_later(self, told: Told, recording: MutableRecording) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._waiting.release)
            # Nobody asks the executor what became of it.
            stack.enter_context(quietly("the line of a request is not written"))
            recording.wait(SETTLE_SECONDS_MAX)
            self._tell(told, recording)

    def _tell(self, told: Told, recording: MutableRecording | None) -> None:
        log.info("%s; %s", told.had, _stored(told, recording))
        if told.is_eligible:
            self._note(told, recording)

    def _note(self, told: Told, recording: MutableRecording | None) -> None:
        if recording is None or told.why_unstored:
            self.watch.note_unstored(told.why_unstored)
        elif recording.stored_count or recording.known_count:
            self.watch.note_stored()
        elif not recording.waiting_count:
            refusals = recording.refusals
            self.watch.note_unstored(refusals[0].reason if refusals else "no stop was reached")


def had(restoration: Restoration, source: str, parting: str) -> str:
    """What a request had, from "memory" or "disk", what it lacked and where it parts."""
    endpoint, uncached = restoration.endpoint, restoration.uncached
    prompt = f"prompt of {endpoint + uncached} tokens: "
    if not endpoint:
        words = [f"{restoration.reason}: {restoration.detail}", *([parting] if parting else [])]
        return f"{prompt}all to compute ({', '.join(words)})"
    words = [f"{endpoint} from {source}", f"{uncached} to compute"]
    if restoration.walkbacks:
        words.append(f"after {restoration.walkbacks} walk-backs")
    return prompt + ", ".join([*words, *([parting] if parting else [])])


def _stored(told: Told, recording: MutableRecording | None) -> str:
    if recording is None or told.why_unstored:
        return f"nothing is stored: {told.why_unstored}"
    counts = {"stored": recording.stored_count, "still on their way": recording.waiting_count}
    words = [
        f"{count} point{'s' if count > 1 else ''} {what}" for what, count in counts.items() if count
    ]
    if recording.refusals:
        last = recording.refusals[-1]
        words.append(f"{len(recording.refusals)} not: {last.reason}, {last.detail}")
    return ", ".join(words) or "nothing new to store"


class MutableSeen:
    """The newest prompts, to say where another parts from them. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompts: deque[tuple[object, array[int]]] = deque()
        self._tokens = 0

    def parting(self, model_key: object, token_ids: Sequence[int]) -> int | None:
        """The first position at which a prompt differs from the one that it is most like.

        None if there is none that goes on differently. The prompt is remembered.
        """
        # What stands for an image has 256 bits.
        prompt = array("q", [each if abs(each) < 1 << 62 else hash(each) for each in token_ids])
        with self._lock:
            others = [other for key, other in self._prompts if key == model_key]
            self._prompts.append((model_key, prompt))
            self._tokens += len(prompt)
            while len(self._prompts) > SEEN_PROMPTS_MAX or self._tokens > SEEN_TOKENS_MAX:
                self._tokens -= len(self._prompts.popleft()[1])
        longest, nearest = max(
            ((_common(prompt, other), -at) for at, other in enumerate(reversed(others))),
            default=(0, 0),
        )
        if not others:
            return None
        other = others[-1 + nearest]
        return None if longest in (len(prompt), len(other)) else longest


def _common(left: "array[int]", right: "array[int]") -> int:
    """How many token ids two prompts begin with alike; most differ within the first step."""
    end = min(len(left), len(right))
    for start in range(0, end, _STEP):
        one, other = left[start : min(start + _STEP, end)], right[start : min(start + _STEP, end)]
        if one != other:
            return start + next(at for at, each in enumerate(one) if each != other[at])
    return end


def parting_words(
    exact: int | None, matched_tokens: int, reason: MissReason | None, block_tokens: int
) -> str:
    """Where a prompt parts from those before: to the token, or to a block of what is on disk."""
    if reason in _WHATEVER_THE_PROMPT:
        return ""
    if exact is not None and exact >= matched_tokens:
        return f"it differs from the nearest at token {exact}"
    if reason is None:
        return ""
    end = matched_tokens + block_tokens
    return f"it differs from what is stored at one of the tokens {matched_tokens} to {end - 1}"
