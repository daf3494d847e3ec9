"""The images of a prompt: where its token ids stand for each, and a digest of what it shows. Pure.

All images of one size have the same token ids, and each row that a model makes of an image depends
on the whole of it. So a block that holds a part of an image is keyed by all of it, and nothing is
cut inside one: the rows of an image go into a model together or not at all.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Token positions ``start:end`` that stand for one image.

    ``digest`` is 32 bytes over all that the model is fed of it, its pixels for example: a hash of a
    name or of a URL is none, since what stands behind it may change.
    """

    start: int
    end: int
    digest: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"tokens {self.start}:{self.end} are no image")
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"an image has a digest of 32 bytes, not of {len(self.digest)}")


def in_order(images: Iterable[ImageSpan], token_count: int) -> tuple[ImageSpan, ...]:
    """The images of a prompt from its start on. ValueError if two overlap or one goes beyond it."""
    spans = tuple(sorted(images, key=lambda each: each.start))
    last = 0
    for span in spans:
        if span.start < last or span.end > token_count:
            raise ValueError(
                f"an image at {span.start}:{span.end} overlaps another, "
                f"or goes beyond the {token_count} tokens of its prompt"
            )
        last = span.end
    return spans


def is_inside(images: Sequence[ImageSpan], position: int) -> bool:
    """Whether a cut at a position would part one of these images, which are in order, in two."""
    at = bisect_right(images, position, key=lambda each: each.end)
    return at < len(images) and images[at].start < position


def overlapping(images: Sequence[ImageSpan], start: int, end: int) -> Sequence[ImageSpan]:
    """Those of these images, which are in order, of which a part stands at ``start:end``."""
    first = bisect_right(images, start, key=lambda each: each.end)
    last = first
    while last < len(images) and images[last].start < end:
        last += 1
    return images[first:last]
