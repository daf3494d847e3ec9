"""mlx-lm's sequential generation, resumed and recorded: one request at a time, those with a seed or
images and, with ``--kv-bits``, all.

Upstream looks for such a prompt in memory and keeps what comes of it, but a state that cannot be
cut has no prefix there: so it never reuses anything for a hybrid.
"""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import dataclasses
from collections.abc import Generator
from typing import Any, cast

from mlx_lm.generate import stream_generate as mlx_stream_generate

from ..generation import prepare_generation
from ..restoration import Restoration
from .session import MutableSession, Prepared

_mlx_stream_generate = cast(Any, mlx_stream_generate)


def stream_generate(
    session: MutableSession, *, prompt: list[int], prompt_cache: list[Any], **options: Any
) -> Generator[Any]:
    """Yield mlx-lm's responses. ``prompt`` is what the cache lacks, as the server found it.

    Prefill stops where the plan says, and the end of the answer is stored when the caller is done.
    """
    prepared = session.take()
    restoration = None if prepared is None else prepared.restoration
    recording = None if prepared is None else prepared.recording
    bound_to = session.bound_to
    if (
        not (prepared and restoration and recording and bound_to)
        or options.get("draft_model") is not None
        or not _fits(prepared, restoration, options.get("input_embeddings"))
    ):
        if prepared is not None:
            prepared.cancel()
        if bound_to is not None and bound_to.bound.quantisation is not None:
            # What it leaves in memory serves others, who count on where KV is quantised.
            options.update(bound_to.bound.quantisation.options())
        yield from _mlx_stream_generate(prompt=prompt, prompt_cache=prompt_cache, **options)
        return
    # A prompt that resumes from nothing has a cache that the server made.
    restoration = dataclasses.replace(restoration, cache=prompt_cache)
    token_ids, answer = prepared.token_ids, list[int]()
    try:
        rest, ours = prepare_generation(
            bound_to.bound,
            token_ids,
            restoration,
            options,
            stop=lambda position, cache: recording.stop(position, lambda: cache),
        )
        for response in _mlx_stream_generate(prompt=rest, **ours):
            answer.append(response.token)
            yield response
    finally:
        if answer and session.stores:
            # Every token that was yielded is in the cache.
            recording.extend(answer)
            recording.stop(len(token_ids) + len(answer), lambda: prompt_cache)
        recording.finish()


def _fits(prepared: Prepared, restoration: Restoration, embeddings: Any) -> bool:
    """Whether images among what is left to compute are embedded, and nothing is without them."""
    if any(image.start >= restoration.endpoint for image in prepared.spans):
        return embeddings is not None and len(embeddings) == restoration.uncached
    return embeddings is None
