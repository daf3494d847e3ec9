"""mlx-lm's sequential generation, resumed and recorded: requests with a seed, one at a time.

Upstream looks for such a prompt in memory and keeps what comes of it, but a state that cannot be
cut has no prefix there: so it never reuses anything for a hybrid.
"""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import dataclasses
import logging
from collections.abc import Generator
from typing import Any, cast

from mlx_lm.generate import stream_generate as mlx_stream_generate

from ..generation import prepare_generation
from .session import MutableSession, Prepared

log = logging.getLogger("walkback")

# What makes of a cache something else than was bound, or feeds it something else than token ids.
_OPTIONS_OF_OTHERS = ("draft_model", "kv_bits", "input_embeddings")

_mlx_stream_generate = cast(Any, mlx_stream_generate)


def stream_generate(
    session: MutableSession, *, prompt: list[int], prompt_cache: list[Any], **options: Any
) -> Generator[Any]:
    """Yield mlx-lm's responses. ``prompt`` is what the cache lacks, as the server found it.

    Prefill stops where the plan says, and the end of the answer is stored when the caller is done.
    """
    prepared = session.take()
    others = [name for name in _OPTIONS_OF_OTHERS if options.get(name) is not None]
    if prepared is None or prepared.restoration is None or session.bound_to is None or others:
        yield from _mlx_stream_generate(prompt=prompt, prompt_cache=prompt_cache, **options)
        return
    bound = session.bound_to.bound
    # A prompt that resumes from nothing has a cache that the server made.
    restoration = dataclasses.replace(prepared.restoration, cache=prompt_cache)
    recording, tokens = restoration.recording, list[int]()
    try:
        rest, ours = prepare_generation(bound, prepared.token_ids, restoration, options)
        for response in _mlx_stream_generate(prompt=rest, **ours):
            tokens.append(response.token)
            yield response
    finally:
        if session.stores:
            _record_end(prepared, tokens, prompt_cache)
        recording.finish()


def _record_end(prepared: Prepared, tokens: list[int], cache: list[Any]) -> None:
    """Store the end of the answer: every token that was yielded is in the cache."""
    assert prepared.restoration is not None
    recording = prepared.restoration.recording
    try:
        if tokens:
            recording.extend(tokens)
            recording.stop(len(prepared.token_ids) + len(tokens), cache)
    except Exception:
        log.exception("the end of an answer was not recorded")
