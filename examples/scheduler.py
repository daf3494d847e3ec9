"""A continuous-batching scheduler on walkback's facade, to read in one sitting and to start from.

Rows join and leave while others decode. A prompt is restored ahead on walkback's reader threads,
prefilled alone, a chunk between two decode steps, and stored at its stops; then its row joins the
batch. Prefilling one row at a time is simple, and right for every architecture: several corrupt
the recurrent state of a short row that is padded to a longer one's length. Decoding pads nothing
but KV, which is masked.

``python examples/scheduler.py`` runs it on a tiny hybrid model.
"""

# mlx-lm's caches and mlx's stubs leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false

import queue
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

import walkback

# An idle scheduler looks this often whether a request was aborted while the disk is read.
IDLE_SECONDS = 0.01


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt and its answer so far. Any thread may look at it, ``abort`` it, await ``done``."""

    prompt: list[int]
    tokens_max: int
    turn_ends: tuple[int, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    answer: list[int] = field(default_factory=list[int])
    endpoint: int | None = None
    is_aborted: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    # The scheduler's own: what is read for it, then what it resumes from and how far it has come.
    pending: walkback.PendingRestore | None = None
    restoration: Any = None
    position: int = 0

    def abort(self) -> None:
        """The scheduler drops it before its next step."""
        self.is_aborted = True


class Scheduler:
    """Serves requests on one bound model. ``submit`` on any thread, the rest on the model's own.

    What the model raises goes through ``step``; ``reset`` is the way back from there.
    """

    def __init__(
        self, bound: walkback.BoundModel, *, rows_max: int = 4, ahead_max: int = 2
    ) -> None:
        """``ahead_max`` prompts are restored ahead; each holds the memory of its prefix."""
        self._bound, self._rows_max, self._ahead_max = bound, rows_max, ahead_max
        self._arrivals: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._waiting: list[Request] = []
        # At most one prefills; the rows of the batch decode.
        self._prefilling: list[Request] = []
        self._rows: list[Request] = []
        self._batch: list[Any] = []

    def submit(self, prompt: Sequence[int], tokens_max: int, **options: Any) -> Request:
        """Queue a prompt; ``options`` are the other fields of a Request."""
        request = Request(prompt=list(prompt), tokens_max=tokens_max, **options)
        self._arrivals.put(request)
        return request

    def run(self) -> None:
        """Step until every request is done."""
        while self.step():
            pass

    def step(self) -> bool:
        """One chunk of prefill and one token for each row; whether anything is left to do."""
        while not self._arrivals.empty():
            self._waiting.append(self._arrivals.get())
        self._drop_aborted()
        for request in self._waiting[: self._ahead_max]:
            if request.pending is None:
                request.pending = self._bound.start_restore(
                    request.prompt, turn_ends=request.turn_ends, headroom_tokens=request.tokens_max
                )
        if not self._prefilling and len(self._rows) < self._rows_max:
            self._admit()
        for request in list(self._prefilling):
            self._prefill(request)
        if self._rows:
            self._decode()
        return bool(self._waiting or self._prefilling or self._rows)

    def reset(self) -> None:
        """Give every request up, and return when walkback uses none of their memory any more."""
        computing = [*self._prefilling, *self._rows]
        for request in (*self._waiting, *computing):
            request.abort()
        self._drop_aborted()
        for request in computing:
            request.restoration.recording.abort()

    def _drop_aborted(self) -> None:
        for request in [each for each in self._waiting if each.is_aborted]:
            if request.pending is not None:
                request.pending.cancel()
            self._waiting.remove(request)
            request.done.set()
        for request in [each for each in self._prefilling if each.is_aborted]:
            self._prefilling.remove(request)
            self._end(request)
        self._leave([each for each in self._rows if each.is_aborted])

    def _admit(self) -> None:
        """Let the first request that has been read prefill; if nothing decodes, wait a little."""
        for request in self._waiting[: self._ahead_max]:
            pending = request.pending
            if pending and (pending.is_ready or (not self._rows and pending.wait(IDLE_SECONDS))):
                self._waiting.remove(request)
                self._prefilling.append(request)
                request.restoration = pending.finish()
                request.endpoint = request.position = request.restoration.endpoint
                return

    def _prefill(self, request: Request) -> None:
        """Compute one chunk, and store where it stops; the last token is left to the batch."""
        start, last, kv = request.position, len(request.prompt) - 1, request.restoration.cache
        stops = [stop for stop in request.restoration.stops if stop > start]
        end = min([*stops[:1], last, start + self._bound.grid.checkpoint_tokens])
        if end > start:
            self._bound.model(mx.array([request.prompt[start:end]]), cache=kv)
            mx.eval([leaf.state for leaf in kv])
            request.position = end
            if end in stops:
                # A refusal needs no care here: it is counted, journalled, and changes no answer.
                request.restoration.recording.stop(end, kv)
        if request.position == last:
            joining = [leaf.merge([leaf]) for leaf in kv]
            for leaf, other in zip(self._batch, joining, strict=False):
                leaf.extend(other)
            self._batch = self._batch or joining
            # The batch has a copy; this one would keep its memory until the answer is over.
            kv.clear()
            self._prefilling.remove(request)
            self._rows.append(request)

    def _decode(self) -> None:
        """One token for each row, chosen as mlx-lm chooses it without a sampler."""
        tokens = mx.array([[(row.answer or row.prompt)[-1]] for row in self._rows])
        logits = self._bound.model(tokens, cache=self._batch)[:, -1, :]
        chosen: Any = mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)
        mx.eval(chosen, [leaf.state for leaf in self._batch])
        over: list[Request] = []
        for index, (row, token) in enumerate(zip(self._rows, chosen.tolist(), strict=True)):
            row.answer.append(token)
            if len(row.answer) >= row.tokens_max or token in row.stop_tokens:
                # For the next turn; the last token was never computed on.
                fed, recording = row.answer[:-1], row.restoration.recording
                recording.extend(fed)
                kv = [leaf.extract(index) for leaf in self._batch]
                recording.stop(len(row.prompt) + len(fed), kv)
                over.append(row)
        self._leave(over)

    def _leave(self, leaving: Sequence[Request]) -> None:
        keep = [at for at, row in enumerate(self._rows) if row not in leaving]
        if leaving and keep:
            for leaf in self._batch:
                leaf.filter(mx.array(keep))
        self._rows = [self._rows[at] for at in keep]
        self._batch = self._batch if keep else []
        for row in leaving:
            self._end(row)

    def _end(self, request: Request) -> None:
        """What was captured goes on being stored: it is a copy, and good whoever asks for it."""
        request.restoration.recording.finish()
        request.done.set()


def main() -> None:
    """Serve prompts that share a beginning; then open the cache again and go on."""
    from walkback.integration.tiny import TINY_QWEN3_5, build_tiny_model

    model = build_tiny_model(TINY_QWEN3_5)
    shared = [7 * n % 512 for n in range(600)]
    with tempfile.TemporaryDirectory() as directory:
        for opening in ("a new cache", "the same cache, opened again"):
            print(opening)
            with walkback.open_cache(
                Path(directory) / "prefixes", free_floor_bytes=0, checkpoint_tokens=256
            ) as cache:
                scheduler = Scheduler(cache.bind(model))
                requests = [scheduler.submit(shared, 8)]
                scheduler.run()
                requests += [scheduler.submit([*shared, n, n + 1], 8) for n in range(4)]
                scheduler.run()
                for request in requests:
                    print(f"  {len(request.prompt)} tokens, resumed at {request.endpoint}:", end="")
                    print("", *request.answer)


if __name__ == "__main__":
    main()
