"""mlx-lm's batch generator, made to pause at the stops of each row's plan and to record them."""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportPrivateUsage=false

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from mlx_lm.generate import BatchGenerator

from .quiet import QuietRecording, quietly
from .rows import adopted, can_be_adopted, row_of, unpadded
from .session import MutableSession, Prepared

_FAILED = "a recording failed; nothing more of its request is stored"


@dataclass(slots=True, kw_only=True)
class _Row:
    """One request in the batch. Positions count from the start of its prompt."""

    recording: QuietRecording
    # Where the generator's own progress begins to count.
    endpoint: int
    stops: frozenset[int]
    # The ends of segments that the server asked for; all others are ours, and hidden from it.
    segment_ends: frozenset[int]
    # How many token ids the recording knows.
    known_tokens: int


class RecordingBatchGenerator(BatchGenerator):
    """Every row pauses at its stops, which are stored, and so are its answer's end and grid stops.

    One owner: the generation thread. Recording never raises; without a recording a row goes as
    upstream's do.
    """

    def __init__(self, session: MutableSession, model: Any, **options: Any) -> None:
        self._session = session
        self._rows: dict[int, _Row] = {}
        bound_to = session.bound_to
        if bound_to is not None:
            options["prefill_step_size"] = bound_to.bound.grid.checkpoint_tokens
            if not (bound_to.is_padding_safe or session.options.unsafe_batching):
                options["prefill_batch_size"] = 1
        super().__init__(model, **options)

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int] | None = None,
        caches: list[Any] | None = None,
        all_tokens: list[list[int]] | None = None,
        *rest: Any,
        **options: Any,
    ) -> list[int]:
        """As upstream's, cut once more at the stops of the request that is being served."""
        row = None
        with quietly("a request is not recorded"):
            row, segments = self._row_for(segments)
        uids: list[int] = super().insert_segments(
            segments, max_tokens, caches, all_tokens, *rest, **options
        )
        if row is not None:
            self._rows[uids[0]] = row
            return uids
        with quietly("a request was not given up"):
            self._session.put(None)
        return uids

    def _row_for(self, segments: list[list[list[int]]]) -> tuple[_Row | None, Any]:
        """The row of the request that is being served, if it is recorded, and its segments."""
        prepared = self._session.take()
        row = None if prepared is None or len(segments) != 1 else _row_of(segments[0], prepared)
        if row is not None:
            return row, [_cut(segments[0], row)]
        if prepared is not None:
            prepared.cancel()
        return None, segments

    def remove(self, uids: list[int], return_prompt_caches: bool = False) -> Any:
        for row in [self._rows.pop(uid) for uid in uids if uid in self._rows]:
            row.recording.finish()
        return super().remove(uids, return_prompt_caches)

    def close(self) -> None:
        # Upstream calls it from its destructor too, even if its constructor failed.
        for row in getattr(self, "_rows", {}).values():
            row.recording.finish()
        super().close()

    def _make_batch(self, n: int) -> Any:
        """As upstream's; a single restored row keeps its buffers, and with them its headroom.

        A row from its start goes without a mask, as restored ones do: kernels are chosen by it.
        """
        sequence = self._unprocessed_sequences[0]
        row = None
        if n == 1:
            with quietly("a restored row is copied into its batch"):
                row = adopted(sequence[3]) if can_be_adopted(sequence[3]) else None
        if row is None:
            is_alone = n == 1 or not len(self._prompt_batch)
            batch = super()._make_batch(n)
            # Beside rows under way it is their padding that tells how many fresh ones there are.
            if is_alone:
                with quietly("a batch keeps a mask that it does not need"):
                    unpadded(batch.prompt_cache)
            return batch
        self._unprocessed_sequences[0] = (*sequence[:3], [], *sequence[4:])
        batch = super()._make_batch(1)
        batch.prompt_cache = row
        return batch

    def _next(self) -> tuple[list[Any], list[Any]]:
        prompted, generated = super()._next()
        # A row in which something fails is not there any more: what it would store next might not
        # go on from what is stored.
        for response in prompted:
            if not response.end_of_prompt and (row := self._rows.pop(response.uid, None)):
                with quietly(_FAILED):
                    self._after_prompt(response, row)
                    self._rows[response.uid] = row
        for response in generated:
            if row := self._rows.pop(response.uid, None):
                with quietly(_FAILED):
                    self._after_token(response, row)
                    if response.finish_reason is None:
                        self._rows[response.uid] = row
        return prompted, generated

    def _after_prompt(self, response: Any, row: _Row) -> None:
        position = row.endpoint + response.progress[0]
        if position not in row.segment_ends:
            # The server keeps a copy in RAM at each end that it sees.
            response.end_of_segment = False
        if position in row.stops:
            batch = self._prompt_batch
            self._stop(row, position, batch.prompt_cache, batch.uids.index(response.uid))

    def _after_token(self, response: Any, row: _Row) -> None:
        if response.finish_reason is not None:
            self._decoded(row, response.all_tokens)
            self._stop(row, len(response.all_tokens), response.prompt_cache, None)
            row.recording.finish()
            return
        batch = self._generation_batch
        index = batch.uids.index(response.uid)
        token_ids = batch.tokens[index]
        bound_to = self._session.bound_to
        if bound_to is not None and bound_to.bound.grid.is_on_grid(len(token_ids)):
            self._decoded(row, token_ids)
            self._stop(row, len(token_ids), batch.prompt_cache, index)

    def _decoded(self, row: _Row, token_ids: Sequence[int]) -> None:
        row.recording.extend(token_ids[row.known_tokens :])
        row.known_tokens = len(token_ids)

    def _stop(self, row: _Row, position: int, caches: Any, index: int | None) -> None:
        """Record a stop of one row of a batch, or of a cache of its own."""
        if self._session.stores:
            row.recording.stop(position, lambda: caches if index is None else row_of(caches, index))


def _row_of(segments: list[list[int]], prepared: Prepared) -> _Row | None:
    """The row of a request; None if nothing of it is recorded."""
    restoration, recording = prepared.restoration, prepared.recording
    if restoration is None or recording is None:
        return None
    # As upstream: the last token is a segment of its own.
    lengths = [len(segment) for segment in segments if segment]
    lengths[-1:] = [lengths[-1] - 1, 1] if lengths[-1] > 1 else [1]
    ends = accumulate(lengths, initial=restoration.endpoint)
    return _Row(
        recording=recording,
        endpoint=restoration.endpoint,
        stops=frozenset(restoration.stops),
        segment_ends=frozenset(ends),
        known_tokens=len(prepared.token_ids),
    )


def _cut(segments: list[list[int]], row: _Row) -> list[list[int]]:
    """The same token ids, in segments that also end at the row's stops."""
    token_ids = [each for segment in segments for each in segment]
    ends = {end - row.endpoint for end in (*row.stops, *row.segment_ends)} | {len(token_ids)}
    cuts = sorted(end for end in ends if 0 <= end <= len(token_ids))
    return [token_ids[start:end] for start, end in pairwise(cuts)]
