"""The images of a request by what they show: mlx-lm has 60 bits of a hash of their URLs."""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cbor2
import mlx.core as mx
from blake3 import blake3

from ...restore.images import DIGEST_BYTES, ImageSpan
from ...restore.materialise import bytes_of, code_of

_CONTEXT = "walkback 2026 pixels of an image v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestImages:
    """Where a prompt has images, and its token ids with each of theirs replaced by the digest.

    The replacements are negative and have 256 bits: what they key may be shared as far as they are
    equal, and is never cut between two that are.
    """

    spans: tuple[ImageSpan, ...]
    key: list[int]


def images_of(token_ids: Sequence[int], vision: Any) -> RequestImages | None:
    """What mlx-lm made of a prompt's images, told apart by content; None if it does not fit.

    Every run of token ids that upstream replaced must be one image. Call it on the thread that made
    the pixels.
    """
    runs = list(_runs(token_ids, vision.cache_key))
    pixels: list[mx.array] = list(vision.pixel_values)
    if [start for start, _ in runs] != list(vision.starts) or len(runs) != len(pixels):
        return None
    spans = tuple(
        ImageSpan(start=start, end=end, digest=digest_of(each))
        for (start, end), each in zip(runs, pixels, strict=True)
    )
    key = list(token_ids)
    for span in spans:
        key[span.start : span.end] = [_id_of(span.digest)] * (span.end - span.start)
    return RequestImages(spans=spans, key=key)


def digest_of(pixels: mx.array) -> bytes:
    """32 bytes that name what a model is fed of an image: its pixels, their order and dtype."""
    pixels = mx.contiguous(pixels)
    mx.eval(pixels)
    hasher = blake3(derive_key_context=_CONTEXT)
    hasher.update(cbor2.dumps([code_of(pixels.dtype), list(pixels.shape)]))
    hasher.update(bytes_of(pixels))
    return hasher.digest()


def unshared_key(token_ids: Sequence[int], vision: Any) -> list[int]:
    """A key of a prompt that shares nothing with any other from its first image on."""
    unique = _id_of(secrets.token_bytes(DIGEST_BYTES))
    return [
        theirs if theirs == each else unique
        for each, theirs in zip(token_ids, vision.cache_key, strict=True)
    ]


def is_inside_image(key: Sequence[int], position: int) -> bool:
    """Whether a cut of such a key at a position would part an image in two."""
    return 0 < position < len(key) and key[position] < 0 and key[position - 1] == key[position]


def _runs(token_ids: Sequence[int], key: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The runs of token ids that upstream replaced by one id each."""
    start = 0
    for at in range(1, len(key) + 1):
        if at == len(key) or key[at] != key[start] or token_ids[start] == key[start]:
            if token_ids[start] != key[start]:
                yield start, at
            start = at


def _id_of(digest: bytes) -> int:
    return -1 - int.from_bytes(digest, "little")
