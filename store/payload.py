"""The payload format: a safetensors file that describes and checks itself.

Pure: values in, bytes out. ``store.stage`` writes it, ``store.decoder`` is the way back.

=============  ======================  ========================================================
offset         size                    what
=============  ======================  ========================================================
0              8                       length of the header, little-endian: data offset - 8
8              data offset - 8         JSON, ASCII, padded with spaces
data offset    sum of the tensors      the tensors, one after the other, in the header's order
=============  ======================  ========================================================

- The data offset is the first multiple of 16 KiB that fits. It depends on the description alone, so
  the data can be written first and the header last, into its place.
- ``header_blake3`` comes first in the metadata, so its 64 digits stand at a fixed place. It is the
  BLAKE3 of everything before the data with those digits as zeros: what finds a flipped bit in a key
  or a position when there is no journal to ask.
- ``data_blake3`` is the BLAKE3 of the data. The journal holds ``header_digest``, which covers both.
- The file ends where the data ends.
"""

import json
from dataclasses import dataclass

from blake3 import blake3

from ..journal.words import Kind
from .tensors import DTYPE_BYTES, TensorSpec

FORMAT = "1"

# The page of Apple silicon, and a multiple of every other page and sector that we know of.
ALIGNMENT_BYTES = 16 * 1024

# 96 tensors take 10 KB; this is room for some 9,000. A parsed header of hostile JSON can need 30
# times its size, so the bound is also what keeps a corrupt file from taking the memory.
HEADER_BYTES_MAX = 1024 * 1024

LENGTH_BYTES = 8
OPENING = b'{"__metadata__":{"header_blake3":"'
SEAL = slice(LENGTH_BYTES + len(OPENING), LENGTH_BYTES + len(OPENING) + 64)
BLANK = "0" * 64

METADATA = "__metadata__"

# MLX counts a dimension in 32 bits.
_DIMENSION_MAX = 2**31 - 1
_DIMENSIONS_MAX = 16
_POSITION_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """All that a payload says of itself but its data's digest.

    ``start`` and ``end`` are token positions; a sidecar's are both its boundary. ``producer`` is
    for people: "mlx 0.32.4, mlx-lm 0.32.2, cpu".
    """

    kind: Kind
    key: bytes
    parent: bytes
    namespace: bytes
    layout_digest: bytes
    plan_digest: bytes
    start: int
    end: int
    generation: int
    store_id: bytes
    producer: str
    tensors: tuple[TensorSpec, ...]


def data_offset(description: Description) -> int:
    """Where the data starts, known before there is any."""
    text = _text(description, data_blake3=BLANK)
    return -(-(LENGTH_BYTES + len(text)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def file_bytes(description: Description) -> int:
    """The size of the whole file."""
    return data_offset(description) + sum(spec.nbytes for spec in description.tensors)


def encode_header(description: Description, data_digest: bytes) -> bytes:
    """Everything before the data: exactly ``data_offset(description)`` bytes.

    ``ValueError`` if a reader would refuse the description.
    """
    if flaw := flaw_of(description):
        raise ValueError(flaw)
    for spec in description.tensors:
        if flaw := flaw_of_tensor(spec.name, spec.dtype, spec.shape):
            raise ValueError(flaw)
    end = data_offset(description)
    if end > HEADER_BYTES_MAX:
        raise ValueError(f"the header takes {end} bytes, more than {HEADER_BYTES_MAX}")
    text = _text(description, data_blake3=data_digest.hex()).encode("ascii")
    length = (end - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    header = bytearray(length + text.ljust(end - LENGTH_BYTES))
    assert len(data_digest) == 32 and len(header) == end
    header[SEAL] = blake3(header).hexdigest().encode("ascii")
    return bytes(header)


def header_digest(header: bytes) -> bytes:
    """The BLAKE3 of the length and the header: what the journal's ``Committed`` holds."""
    return blake3(header).digest()


def _text(description: Description, *, data_blake3: str) -> str:
    fields: dict[str, object] = {
        METADATA: {
            "header_blake3": BLANK,
            "format": FORMAT,
            "kind": description.kind.word,
            "key": description.key.hex(),
            "parent": description.parent.hex(),
            "namespace": description.namespace.hex(),
            "layout_digest": description.layout_digest.hex(),
            "plan_digest": description.plan_digest.hex(),
            "start": str(description.start),
            "end": str(description.end),
            "generation": str(description.generation),
            "store_id": description.store_id.hex(),
            "producer": description.producer,
            "data_blake3": data_blake3,
        }
    }
    offset = 0
    for spec in description.tensors:
        end = offset + spec.nbytes
        fields[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    return json.dumps(fields, separators=(",", ":"))


def flaw_of(description: Description) -> str | None:
    """What is wrong with a description, whoever made it; its tensors apart."""
    start, end = description.start, description.end
    if not 0 <= start <= end <= _POSITION_MAX or description.generation < 0:
        return f"its tokens are {start} to {end}, its generation {description.generation}"
    if (start == end) != (description.kind is Kind.SIDECAR):
        return f"its tokens are {start} to {end}, and it is a {description.kind.word}"
    names = {spec.name for spec in description.tensors}
    if len(names) != len(description.tensors) or METADATA in names or "" in names:
        return "the names of its tensors are not unique, or one is reserved"
    return None


def flaw_of_tensor(name: str, dtype: object, shape: tuple[int, ...] | None) -> str | None:
    """What is wrong with a tensor, before anything is computed from its shape."""
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        return f"{name!r:.80} has the unknown dtype {dtype!r:.20}"
    if shape is None or len(shape) > _DIMENSIONS_MAX:
        return f"{name!r:.80} has the impossible shape {shape!r:.200}"
    if shape and not 0 <= min(shape) <= max(shape) <= _DIMENSION_MAX:
        return f"{name!r:.80} has the impossible shape {shape!r:.200}"
    return None
