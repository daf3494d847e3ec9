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
from collections.abc import Iterable, Sequence
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

    def abort(self) -> None:
        """The scheduler drops it before its next step."""
        self.is_aborted = True


@dataclass(eq=False)
class Row:
    """A request that has its cache: it prefills, or stands in the batch."""

    request: Request
    restoration: walkback.Restoration
    position: int

    @property
    def next_token(self) -> int:
        return (self.request.answer or self.request.prompt)[-1]


class Scheduler:
    """Serves requests on one bound model. ``submit`` on any thread, the rest on the model's own.

    What the model raises goes through ``step``; ``reset`` is the way back from there.
    """

    def __init__(
        self, bound: walkback.BoundModel, *, rows_max: int = 4, ahead_max: int = 2
    ) -> None:
        """``ahead_max`` prompts are restored ahead; each holds the memory of its prefix."""
        self._bound = bound
        self._rows_max, self._ahead_max = rows_max, ahead_max
        self._arrivals: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._waiting: dict[Request, walkback.PendingRestore | None] = {}
        self._prefilling: Row | None = None
        self._rows: list[Row] = []
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
            self._waiting[self._arrivals.get()] = None
        self._drop_aborted()
        self._restore_ahead()
        if self._prefilling is None:
            self._prefilling = self._next_row()
        if self._prefilling is not None:
            self._prefill(self._prefilling)
        if self._rows:
            self._decode()
        return bool(self._waiting or self._prefilling or self._rows)

    def reset(self) -> None:
        """Give every request up, and return when walkback uses none of their memory any more."""
        rows = [*self._rows, *([self._prefilling] if self._prefilling else [])]
        for request in [*self._waiting, *(row.request for row in rows)]:
            request.abort()
        self._drop_aborted()
        for row in rows:
            row.restoration.recording.abort()

    def _drop_aborted(self) -> None:
        for request in [each for each in self._waiting if each.is_aborted]:
            pending = self._waiting.pop(request)
            if pending is not None:
                pending.cancel()
            request.done.set()
        row = self._prefilling
        if row is not None and row.request.is_aborted:
            self._prefilling = None
            self._end(row)
        self._leave([row for row in self._rows if row.request.is_aborted])

    def _restore_ahead(self) -> None:
        """Let the first prompts of the queue be read while others compute."""
        for request in list(self._waiting)[: self._ahead_max]:
            if self._waiting[request] is None:
                self._waiting[request] = self._bound.start_restore(
                    request.prompt, turn_ends=request.turn_ends, headroom_tokens=request.tokens_max
                )

    def _next_row(self) -> Row | None:
        """The first waiting request that has been read, if there is room for a row."""
        if len(self._rows) == self._rows_max:
            return None
        for request, pending in self._waiting.items():
            if pending is not None and (pending.is_ready or self._is_idle(pending)):
                del self._waiting[request]
                restoration = pending.finish()
                request.endpoint = restoration.endpoint
                return Row(request, restoration, restoration.endpoint)
        return None

    def _is_idle(self, pending: walkback.PendingRestore) -> bool:
        """With nothing to decode, wait for the disk a little; whether it has answered."""
        return not self._rows and pending.wait(IDLE_SECONDS)

    def _prefill(self, row: Row) -> None:
        """Compute one chunk, and store where it stops; the last token is left to the batch."""
        prompt, restoration = row.request.prompt, row.restoration
        stops = [stop for stop in restoration.stops if stop > row.position]
        last = len(prompt) - 1
        end = min([*stops[:1], last, row.position + self._bound.grid.checkpoint_tokens])
        if end > row.position:
            self._bound.model(mx.array([prompt[row.position : end]]), cache=restoration.cache)
            mx.eval([leaf.state for leaf in restoration.cache])
            row.position = end
            if end in stops:
                # A refusal needs no care here: it is counted, journalled, and changes no answer.
                restoration.recording.stop(end, restoration.cache)
        if row.position == last:
            self._prefilling = None
            self._join(row)

    def _join(self, row: Row) -> None:
        joining = [leaf.merge([leaf]) for leaf in row.restoration.cache]
        if self._batch:
            for leaf, other in zip(self._batch, joining, strict=True):
                leaf.extend(other)
        else:
            self._batch = joining
        # The batch has a copy; this one would keep its memory until the answer is over.
        row.restoration.cache.clear()
        self._rows.append(row)

    def _decode(self) -> None:
        """One token for each row, chosen as mlx-lm chooses it without a sampler."""
        tokens = mx.array([[row.next_token] for row in self._rows])
        logits = self._bound.model(tokens, cache=self._batch)[:, -1, :]
        chosen: Any = mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)
        mx.eval(chosen, [leaf.state for leaf in self._batch])
        over: list[Row] = []
        for row, token in zip(self._rows, chosen.tolist(), strict=True):
            row.request.answer.append(token)
            is_last = len(row.request.answer) >= row.request.tokens_max
            if is_last or token in row.request.stop_tokens:
                self._store_answer(row)
                over.append(row)
        self._leave(over)

    def _store_answer(self, row: Row) -> None:
        """Store where the answer ends, for the next turn. Its last token was never computed on."""
        decoded, recording = row.request.answer[:-1], row.restoration.recording
        index = self._rows.index(row)
        recording.extend(decoded)
        position = len(row.request.prompt) + len(decoded)
        recording.stop(position, [leaf.extract(index) for leaf in self._batch])

    def _leave(self, leaving: Iterable[Row]) -> None:
        for row in leaving:
            index = self._rows.index(row)
            keep = mx.array([at for at in range(len(self._rows)) if at != index])
            del self._rows[index]
            if self._rows:
                for leaf in self._batch:
                    leaf.filter(keep)
            self._end(row)
        if not self._rows:
            self._batch = []

    def _end(self, row: Row) -> None:
        """What was captured goes on being stored: it is a copy, and good whoever asks for it."""
        row.restoration.recording.finish()
        row.request.done.set()


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
