"""An architecture of mlx-lm that takes images: a model's folder holds a copy of this file.

``fault`` makes it one of those whose prompts cannot be resumed: ``positions`` counts every image as
one position, as mrope nearly does, and remembers by how much in the model; ``decoding`` does so
where it is fed token ids only; ``company`` has what an image looks like depend on the others of its
prompt.
"""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

TOKEN_PIXELS = 28


@dataclass
class ModelArgs:
    model_type: str
    text_architecture: Mapping[str, Any]
    image_token_id: int
    fault: str = ""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "ModelArgs":
        return cls(**{name: config[name] for name in cls.__annotations__})


class Model(nn.Module):
    """Rows of an image: a projection of each square of pixels, and of all of them together."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        name = args.text_architecture["model_type"]
        module: Any = importlib.import_module(f"mlx_lm.models.{name}")
        self.language_model: Any = module.Model(
            module.ModelArgs.from_dict(dict(args.text_architecture))
        )
        width = _embedding_of(self.language_model).weight.shape[1]
        self.projection = nn.Linear(3 * TOKEN_PIXELS**2, width, bias=False)
        self._remembered = 0
        self._behind = [0]
        if args.fault in ("positions", "decoding"):
            for layer in self.layers:
                layer.self_attn.rope = _ShiftedRope(layer.self_attn.rope, self._behind)

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        is_shifted = self.args.fault == "positions" or input_embeddings is None
        self._behind[0] = self._remembered if is_shifted else 0
        return self.language_model(inputs, cache=cache, input_embeddings=input_embeddings)

    def embed_inputs(self, inputs: mx.array, *, pixel_values: Sequence[mx.array]) -> mx.array:
        """(tokens, width), of all token ids and images of a prompt or of what is left of it."""
        embedded: mx.array = _embedding_of(self.language_model)(inputs)
        images = [self._rows_of(pixels) for pixels in pixel_values]
        if self.args.fault == "company":
            images = [rows + images[0].mean(axis=0) for rows in images]
        self._remembered = sum(1 - len(rows) for rows in images)
        rows = mx.concatenate(images).astype(embedded.dtype)
        is_image = inputs == self.args.image_token_id
        at = mx.clip(mx.cumsum(is_image) - 1, 0, len(rows) - 1)
        return mx.where(is_image[:, None], rows[at], embedded)

    def _rows_of(self, pixels: mx.array) -> mx.array:
        _, height, width = pixels.shape
        down, across = height // TOKEN_PIXELS, width // TOKEN_PIXELS
        squares = pixels.reshape(3, down, TOKEN_PIXELS, across, TOKEN_PIXELS)
        squares = squares.transpose(1, 3, 0, 2, 4).reshape(down * across, -1)
        rows = self.projection(squares)
        return rows + rows.mean(axis=0)

    @property
    def layers(self) -> list[Any]:
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.language_model)


class _ShiftedRope(nn.Module):
    def __init__(self, rope: Any, behind: list[int]) -> None:
        super().__init__()
        self._rope, self._behind = rope, behind

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        return self._rope(x, offset=offset + self._behind[0])


def _embedding_of(model: Any) -> Any:
    return next(each for name, each in model.named_modules() if name.endswith("embed_tokens"))
