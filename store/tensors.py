"""What a payload holds, as bytes: named tensors with a dtype, a shape and a buffer.

Pure: mlx arrays become buffers in ``integration``, and buffers become arrays in
``restore.materialise``. Only bytes cross threads.
"""

from dataclasses import dataclass
from math import prod

# The safetensors codes of the dtypes that a cache of mlx-lm can hold, with their sizes in bytes.
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor without its data. ``dtype`` is a safetensors code such as ``BF16``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor with its data: a C-contiguous buffer of unsigned bytes, ``spec.nbytes`` long.

    The buffer must not change until the store has let go of it.
    """

    spec: TensorSpec
    buffer: memoryview

    def __post_init__(self) -> None:
        if self.buffer.nbytes != self.spec.nbytes:
            raise ValueError(
                f"{self.spec.name}: {self.buffer.nbytes} bytes for a tensor of {self.spec.nbytes}"
            )
