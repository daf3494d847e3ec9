"""mlx-lm's sequential generation, resumed and recorded: one request at a time, those with a seed or
images and, with ``--kv-bits``, all.

Upstream looks for such a prompt in memory and keeps what comes of it, but a state that cannot be
cut has no prefix there: so it never reuses anything for a hybrid.
"""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import stream_generate as mlx_stream_generate

from ..binding import BoundModel
from ..generation import prepare_generation
from ..restoration import Restoration
from .quiet import QuietRecording, quietly
from .session import MutableSession, Prepared

_mlx_stream_generate = cast(Any, mlx_stream_generate)


def stream_generate(
    session: MutableSession, *, prompt: list[int], prompt_cache: list[Any], **options: Any
) -> Generator[Any]:
    """Yield mlx-lm's responses. ``prompt`` is what the cache lacks, as the server found it.

    Prefill stops where the plan says, and the end of the answer is stored when the caller is done.
    """
    run = None
    with quietly("a request is not recorded"):
        run = _run_of(session, prompt_cache, options)
    if run is None:
        with quietly("a request was not given up"):
            session.put(None)
        if session.bound_to is not None:
            _quantise_as_bound(session.bound_to.bound, options)
        yield from _mlx_stream_generate(prompt=prompt, prompt_cache=prompt_cache, **options)
        return
    token_ids, recording, answer = run.token_ids, run.recording, list[int]()
    try:
        prepared = None
        with quietly("a request is prefilled anew from its start, as mlx-lm does"):
            prepared = prepare_generation(
                run.bound,
                token_ids,
                run.restoration,
                options,
                stop=lambda position, cache: recording.stop(position, lambda: cache),
            )
        if prepared is None:
            recording.finish()
            prepared = _anew(run, prompt_cache, options)
        rest, ours = prepared
        for response in _mlx_stream_generate(prompt=rest, **ours):
            answer.append(response.token)
            yield response
    finally:
        with quietly("the end of an answer is not stored"):
            if answer and session.stores:
                # Every token that was yielded is in the cache.
                recording.extend(answer)
                recording.stop(len(token_ids) + len(answer), lambda: prompt_cache)
        recording.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A request that is resumed and recorded."""

    bound: BoundModel
    token_ids: list[int]
    restoration: Restoration
    recording: QuietRecording
    # Its images as mlx-lm has them, or None.
    vision: Any


def _run_of(
    session: MutableSession, prompt_cache: list[Any], options: dict[str, Any]
) -> _Run | None:
    """The request that is being served, if it is one for us."""
    prepared, bound_to = session.take(), session.bound_to
    if prepared is None:
        return None
    restoration, recording = prepared.restoration, prepared.recording
    if (
        restoration is None
        or recording is None
        or bound_to is None
        or options.get("draft_model") is not None
        or not _fits(prepared, restoration, options.get("input_embeddings"))
    ):
        prepared.cancel()
        return None
    return _Run(
        bound=bound_to.bound,
        token_ids=prepared.token_ids,
        # A prompt that resumes from nothing has a cache that the server made.
        restoration=dataclasses.replace(restoration, cache=prompt_cache),
        recording=recording,
        vision=prepared.vision,
    )


def _anew(
    run: _Run, prompt_cache: list[Any], options: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    """The whole prompt and options for it: its cache may have been fed with a part of it."""
    prompt_cache[:] = run.bound.make_cache()
    options = {**options, "prompt_cache": prompt_cache}
    _quantise_as_bound(run.bound, options)
    if run.vision is not None:
        # mlx-lm has embedded only what the cache lacked.
        embedded = run.bound.model.embed_inputs(
            mx.array(run.token_ids), pixel_values=run.vision.pixel_values
        )
        mx.eval(embedded)
        options["input_embeddings"] = embedded
    return run.token_ids, options


def _quantise_as_bound(bound: BoundModel, options: dict[str, Any]) -> None:
    """What it leaves in memory serves others, who count on where KV is quantised."""
    if bound.quantisation is not None:
        options.update(bound.quantisation.options())


def _fits(prepared: Prepared, restoration: Restoration, embeddings: Any) -> bool:
    """Whether images among what is left to compute are embedded, and nothing is without them."""
    if any(image.start >= restoration.endpoint for image in prepared.spans):
        return embeddings is not None and len(embeddings) == restoration.uncached
    return embeddings is None
