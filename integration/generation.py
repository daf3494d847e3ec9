"""mlx-lm's generation over a cache: the same tokens, with the prefix resumed and recorded."""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.generate import generation_stream
from mlx_lm.generate import stream_generate as mlx_stream_generate

from ..journal.errors import SettingsError
from ..restore.images import ImageSpan
from ..restore.plan import Grid
from .forms import KV_GROUP_SIZE, QUANTIZED_KV_START, KVQuantisation
from .prompts import DECODE_HEADROOM_TOKENS, token_ids_of
from .restoration import Restoration

# Options under which mlx-lm's cache is not the one that was bound, or is not fed token by token.
_REFUSED_OPTIONS = {
    "prompt_cache": "the cache is walkback's to make",
    "max_kv_size": "rotating KV is not stored yet",
    "input_embeddings": "only with images=, which say what they are computed from",
    "draft_model": "a draft model rewinds, which a recurrent state cannot",
}
_HEADROOM_TOKENS_MAX = 4096

_mlx_generate_step = cast(Any, mlx_generate_step)
_mlx_stream_generate = cast(Any, mlx_stream_generate)


class Resumable(Protocol):
    """What generation needs of a bound model."""

    model: Any
    grid: Grid
    quantisation: KVQuantisation | None

    @property
    def turning_point(self) -> int | None: ...

    def restore(
        self,
        prompt: Sequence[int] | mx.array,
        *,
        turn_ends: Iterable[int],
        images: Iterable[ImageSpan],
        headroom_tokens: int,
    ) -> Restoration: ...


def generate_step(
    bound: Resumable,
    prompt: Sequence[int] | mx.array,
    *,
    turn_ends: Iterable[int] = (),
    images: Iterable[ImageSpan] = (),
    on_restore: Callable[[Restoration], None] | None = None,
    **options: Any,
) -> Generator[tuple[int, mx.array]]:
    """Yield ``(token, logprobs)`` as mlx-lm's ``generate_step`` does, resumed and recorded.

    Options are mlx-lm's, but for those that change the cache: SettingsError names them.
    ``turn_ends`` are positions where a conversation may go on from: prefill stops there too. A
    prompt with ``images`` comes with the ``input_embeddings`` of all of it, (tokens, width), which
    differ from those of its token ids inside the images only; those of what is cached are not used.
    ``on_restore`` is told what the prompt resumed from, before anything is computed. Closing the
    generator ends the recording; what was captured is still stored.
    """
    token_ids = token_ids_of(prompt)
    with _resumed(bound, token_ids, turn_ends, images, on_restore, options) as (rest, prepared):
        yield from _mlx_generate_step(mx.array(rest), bound.model, **prepared)


def stream_generate(
    bound: Resumable,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    *,
    turn_ends: Iterable[int] = (),
    images: Iterable[ImageSpan] = (),
    on_restore: Callable[[Restoration], None] | None = None,
    **options: Any,
) -> Generator[Any]:
    """Yield mlx-lm's ``GenerationResponse``s, resumed and recorded.

    Takes what ``mlx_lm.stream_generate`` takes. ``prompt_tokens`` counts the whole prompt;
    ``prompt_tps`` counts what was computed.
    """
    if isinstance(prompt, str):
        # As mlx-lm does: a prompt that has its own first special token gets no second one.
        bos = tokenizer.bos_token
        prompt = tokenizer.encode(
            prompt, add_special_tokens=bos is None or not prompt.startswith(bos)
        )
    token_ids = token_ids_of(cast("Sequence[int] | mx.array", prompt))
    with _resumed(bound, token_ids, turn_ends, images, on_restore, options) as (rest, prepared):
        for response in _mlx_stream_generate(bound.model, tokenizer, rest, **prepared):
            yield dataclasses.replace(response, prompt_tokens=len(token_ids))


@contextlib.contextmanager
def _resumed(
    bound: Resumable,
    token_ids: list[int],
    turn_ends: Iterable[int],
    images: Iterable[ImageSpan],
    on_restore: Callable[[Restoration], None] | None,
    options: dict[str, Any],
) -> Generator[tuple[list[int], dict[str, Any]]]:
    """Restore, and record until the context ends: what mlx-lm is to prefill, and its options."""
    images = tuple(images)
    _require_options(bound, options, len(token_ids), has_images=bool(images))
    if not token_ids:
        raise ValueError("a prompt needs at least one token id")
    restoration = bound.restore(
        token_ids, turn_ends=turn_ends, images=images, headroom_tokens=_headroom(options)
    )
    if images:
        rest = options["input_embeddings"][restoration.endpoint :]
        options = {**options, "input_embeddings": rest}
    try:
        if on_restore is not None:
            on_restore(restoration)
        stop = restoration.recording.stop
        yield prepare_generation(bound, token_ids, restoration, options, stop=stop)
    finally:
        restoration.recording.finish()


def prepare_generation(
    bound: Resumable,
    token_ids: list[int],
    restoration: Restoration,
    options: dict[str, Any],
    *,
    stop: Callable[[int, list[Any]], object],
) -> tuple[list[int], dict[str, Any]]:
    """The token ids that mlx-lm is to prefill, and its options with our hooks in them.

    ``stop`` is told each position where prefill pauses, and the cache that stands there.
    ``input_embeddings`` among the options are those of the token ids behind the endpoint. What
    mlx-lm's one chunk size cannot express is prefilled here. Processors of logits see the token ids
    that were restored, as they do in a run from the start.
    """
    stride = bound.grid.checkpoint_tokens
    cache = restoration.cache
    position = restoration.endpoint
    quantisation, turning_point = bound.quantisation, bound.turning_point
    pauses = list(restoration.stops)
    if turning_point is not None and position < turning_point < len(token_ids):
        # Whoever records nothing must pause there all the same.
        pauses = sorted({*pauses, turning_point})
    embeddings: mx.array | None = options.get("input_embeddings")
    # mlx-lm has one chunk size, so the way to the last pause that is no multiple of it is ours.
    while any((each - position) % stride for each in pauses):
        end = pauses.pop(0)
        with mx.stream(options.get("stream", generation_stream)):
            for start in range(position, end, stride):
                chunk = token_ids[start : min(start + stride, end)]
                fed: dict[str, mx.array] = {}
                if embeddings is not None:
                    fed["input_embeddings"] = embeddings[: len(chunk)][None]
                    embeddings = embeddings[len(chunk) :]
                bound.model(mx.array([chunk]), cache=cache, **fed)
                if quantisation is not None:
                    quantisation.apply(cache)
                mx.eval([leaf.state for leaf in cache])
            if end in restoration.stops:
                stop(end, cache)
        position = end
    start = position
    user_progress = options.get("prompt_progress_callback")

    def progress(done: int, total: int) -> None:
        # At the end mlx-lm has already queued the next token: the cache stands one further.
        if 0 < done < total and start + done in restoration.stops:
            stop(start + done, cache)
        if user_progress is not None:
            user_progress(start + done, start + total)

    prepared = dict(options)
    prepared.update(
        prompt_cache=cache,
        prefill_step_size=stride,
        prompt_progress_callback=progress,
    )
    if embeddings is not None:
        prepared["input_embeddings"] = embeddings
    if quantisation is not None:
        prepared.update(quantisation.options())
    if options.get("logits_processors"):
        prefix = mx.array(token_ids[:start])
        prepared["logits_processors"] = [
            _with_prefix(each, prefix) for each in options["logits_processors"]
        ]
    return token_ids[start:], prepared


def _with_prefix(
    processor: Callable[[mx.array, mx.array], mx.array], prefix: mx.array
) -> Callable[[mx.array, mx.array], mx.array]:
    """A logits processor that sees the restored token ids too, as it does in a cold run."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        return processor(mx.concatenate([prefix, tokens]) if prefix.size else tokens, logits)

    return process


def _headroom(options: dict[str, Any]) -> int:
    max_tokens = int(options.get("max_tokens", 256))
    return min(max_tokens, _HEADROOM_TOKENS_MAX) if max_tokens > 0 else DECODE_HEADROOM_TOKENS


def _require_options(
    bound: Resumable, options: dict[str, Any], token_count: int, *, has_images: bool
) -> None:
    embeddings = options.get("input_embeddings") if has_images else None
    if has_images and (embeddings is None or len(embeddings) != token_count):
        raise SettingsError(
            "images need input_embeddings=, one row for each token id of the prompt"
        )
    for name, reason in _REFUSED_OPTIONS.items():
        if options.get(name) is not None and options[name] is not embeddings:
            raise SettingsError(f"{name} cannot be used with walkback: {reason}")
    if options.get("kv_bits") is not None:
        _require_quantisation(bound, options)
    step = options.get("prefill_step_size")
    if step is not None and step != bound.grid.checkpoint_tokens:
        raise SettingsError(
            f"prefill_step_size is {step}, and checkpoint_tokens {bound.grid.checkpoint_tokens}: "
            "prefill stops at checkpoints, so leave it out or open the cache with that stride"
        )


def _require_quantisation(bound: Resumable, options: dict[str, Any]) -> None:
    asked = KVQuantisation.on(
        bound.grid,
        bits=options["kv_bits"],
        group_size=options.get("kv_group_size", KV_GROUP_SIZE),
        start=options.get("quantized_kv_start", QUANTIZED_KV_START),
    )
    if asked != bound.quantisation:
        bound_to = bound.quantisation or "none that is quantised"
        raise SettingsError(
            f"KV of {asked} is asked for, and the model is bound to {bound_to}: "
            "bind it with kv_bits, kv_group_size and quantized_kv_start"
        )
