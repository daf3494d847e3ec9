"""Whether a model's prompts with images resume as they go on.

mlx-lm hands a model the embeddings of a prompt, and counts positions by its cache. A family whose
positions depend on the images (mrope), or whose deeper layers are fed of them too, has to remember
that somewhere; if it does so in the model, it is lost with the next prompt or the process, and the
cache does not tell. So each model is asked when it is loaded.
"""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from ...restore.layout import Layout
from ...restore.materialise import MutableAssembly
from ...store.tensors import Tensor
from ..binding import BoundModel
from ..capture import capture
from .padding import difference

# Where it depends on something else, logits are off by a part of their own size; otherwise kernels
# for another number of rows differ in the last bits of bfloat16.
_DIFFERENCE_MAX = 0.02
# Some tens of tokens: as much as positions by the grid of an image would be off.
_SIDE_PIXELS = 224


def why_images_do_not_resume(bound: BoundModel, processor: Any, tokenizer: Any) -> str:
    """Why nothing of this model's prompts with images may be stored; "" if nothing forbids it.

    A prompt of two images goes through, is captured before the second and behind it, and resumed at
    both after another prompt has. Takes a few forwards of some hundred tokens, on the thread that
    owns the model's arrays. The model has a layout.
    """
    layout = bound.layout
    assert layout is not None, "what is not stored need not be asked about"
    probe = _Probe(bound, layout, processor, tokenizer)
    if len(probe.runs) != 2:
        return f"its processor makes {len(probe.runs)} images of two"
    _, second = probe.runs
    cuts = (second[0], second[1] + 1)
    if (off := probe.difference_of_embeddings(cuts[0])) > _DIFFERENCE_MAX:
        return f"an image is embedded in another way beside others (off by {off:.2g})"
    for cut, off in zip(cuts, probe.differences(cuts), strict=True):
        if off > _DIFFERENCE_MAX:
            where = "behind an image" if cut == cuts[1] else "before an image"
            return f"resumed {where} it does not go on as it would have (off by {off:.2g})"
    return ""


class _Probe:
    """One prompt with two images, and what the model makes of it."""

    def __init__(self, bound: BoundModel, layout: Layout, processor: Any, tokenizer: Any) -> None:
        self._bound, self._model, self._layout = bound, bound.model, layout
        source = np.random.default_rng(0)
        shape = (_SIDE_PIXELS, _SIDE_PIXELS, 3)
        images = [source.integers(0, 256, shape, dtype=np.uint8) for _ in range(3)]
        mark = processor.image_token
        self._ids, self._pixels = _tokenised(
            processor, tokenizer, f"a {mark} b {mark} c d", images[:2]
        )
        self._other_ids, self._other_pixels = _tokenised(processor, tokenizer, mark, images[2:])
        token_id = tokenizer.convert_tokens_to_ids(mark)
        self.runs = _runs_of(self._ids, token_id)

    def difference_of_embeddings(self, cut: int) -> float:
        """How far the rows behind a cut are off if only what stands there is embedded."""
        whole = self._embedded(self._ids, self._pixels)
        return difference(whole[cut:], self._embedded(self._ids[cut:], self._pixels[1:]))

    def differences(self, cuts: tuple[int, int]) -> list[float]:
        """How far the logits up to the next cut are off if the prompt resumes at each of them."""
        pieces = list(pairwise((*cuts, len(self._ids))))
        whole = self._embedded(self._ids, self._pixels)
        cache = self._bound.make_cache()
        self._forward(cache, 0, cuts[0], whole[: cuts[0]])
        expected: list[mx.array] = []
        resumed: list[list[Any]] = []
        for start, end in pieces:
            resumed.append(self._resumed(cache, start))
            expected.append(self._forward(cache, start, end, whole[start:end]))
        differences: list[float] = []
        for (start, end), wanted, again in zip(pieces, expected, resumed, strict=True):
            self._disturb()
            # Behind all images mlx-lm feeds token ids.
            is_last = end == len(self._ids)
            rows = None if is_last else self._embedded(self._ids[start:], self._pixels[1:])
            found = self._forward(again, start, end, None if rows is None else rows[: end - start])
            differences.append(difference(wanted, found))
        return differences

    def _embedded(self, ids: Sequence[int], pixels: Sequence[mx.array]) -> mx.array:
        rows = self._model.embed_inputs(mx.array(list(ids)), pixel_values=list(pixels))
        mx.eval(rows)
        return rows

    def _forward(self, cache: list[Any], start: int, end: int, rows: mx.array | None) -> mx.array:
        options = {} if rows is None else {"input_embeddings": rows[None]}
        logits = self._model(mx.array([self._ids[start:end]]), cache=cache, **options)
        mx.eval(logits, [leaf.state for leaf in cache])
        return logits

    def _disturb(self) -> None:
        """Have the model see another prompt, as a server would in between."""
        rows = self._embedded(self._other_ids, self._other_pixels)
        ids = mx.array([self._other_ids])
        mx.eval(self._model(ids, cache=self._bound.make_cache(), input_embeddings=rows[None]))

    def _resumed(self, cache: list[Any], position: int) -> list[Any]:
        """Another cache, made of what would be stored of this one."""
        layout = self._layout
        captured = capture(
            cache,
            layout,
            position=position,
            ranges=[(0, position)],
            with_point=layout.has_point_state,
        )
        assembly = MutableAssembly(layout, endpoint=position, capacity_tokens=len(self._ids))
        for tensor in captured.blocks[0]:
            _fill(tensor, assembly.block_segments(tensor.spec, start=0, end=position))
        for tensor in captured.point:
            _fill(tensor, assembly.point_segments(tensor.spec))
        return assembly.finish(self._bound.make_cache)


def _tokenised(
    processor: Any, tokenizer: Any, text: str, images: Sequence[Any]
) -> tuple[list[int], list[mx.array]]:
    expanded, pixels = processor(text, images=list(images))
    return list(tokenizer.encode(expanded, add_special_tokens=False)), list(pixels)


def _runs_of(ids: Sequence[int], token_id: int) -> list[tuple[int, int]]:
    """Where the token ids are this one: ``start, end`` of each run."""
    runs: list[tuple[int, int]] = []
    start = 0
    for each, group in groupby(ids):
        end = start + len(list(group))
        if each == token_id:
            runs.append((start, end))
        start = end
    return runs


def _fill(tensor: Tensor, segments: Sequence[memoryview]) -> None:
    start = 0
    for segment in segments:
        segment[:] = tensor.buffer[start : start + len(segment)]
        start += len(segment)
