"""From the first bytes of a payload file to its description, whatever the bytes are.

Pure: bytes in, values out, and ``PayloadDamagedError`` for all that ``store.payload`` would not
have written. Nothing is allocated, and nothing computed, on the word of the header: a corrupt one
once asked another reader for 437 GB.
"""

import json
from collections.abc import Sequence
from math import prod
from typing import NoReturn, cast

from blake3 import blake3

from ..journal.errors import PayloadDamagedError
from ..journal.words import Kind
from .payload import (
    ALIGNMENT_BYTES,
    BLANK,
    FORMAT,
    HEADER_BYTES_MAX,
    LENGTH_BYTES,
    METADATA,
    OPENING,
    SEAL,
    Description,
    flaw_of,
    flaw_of_tensor,
)
from .tensors import DTYPE_BYTES, TensorSpec

_METADATA_NAMES = {
    "header_blake3",
    "format",
    "kind",
    "key",
    "parent",
    "namespace",
    "layout_digest",
    "plan_digest",
    "start",
    "end",
    "generation",
    "store_id",
    "producer",
    "data_blake3",
}
_TENSOR_NAMES = {"dtype", "shape", "data_offsets"}
_KINDS = {kind.word: kind for kind in Kind}


def header_end(first: bytes, file_bytes: int) -> int:
    """Where the header of a file of ``file_bytes`` ends, from its first 8 bytes or more.

    The result is bounded, whatever the bytes: this is what a reader allocates.
    """
    if len(first) < LENGTH_BYTES:
        raise PayloadDamagedError(f"it has {file_bytes} bytes, too few for a header")
    end = int.from_bytes(first[:LENGTH_BYTES], "little") + LENGTH_BYTES
    if end > HEADER_BYTES_MAX:
        raise PayloadDamagedError(f"its header claims {end} bytes, more than {HEADER_BYTES_MAX}")
    if end > file_bytes:
        raise PayloadDamagedError(f"its header claims {end} bytes of a file of {file_bytes}")
    if end % ALIGNMENT_BYTES or end == 0:
        raise PayloadDamagedError(f"its data would start at {end}, not a multiple of 16 KiB")
    return end


def decode_header(first: bytes, file_bytes: int) -> tuple[Description, bytes]:
    """What the first bytes of a file of ``file_bytes`` say: the description and the data's digest.

    ``first`` may be longer than the header.
    """
    end = header_end(first, file_bytes)
    if len(first) < end:
        raise PayloadDamagedError(f"it ends after {len(first)} bytes, inside its header")
    header = bytes(first[:end])
    _check_seal(header)
    fields = _parsed(header[LENGTH_BYTES:])
    metadata = fields.pop(METADATA, None)
    tensors = _decoded_tensors(fields, data_bytes=file_bytes - end)
    description, data_digest = _decoded_metadata(metadata, tensors)
    if flaw := flaw_of(description):
        raise PayloadDamagedError(flaw)
    return description, data_digest


def _check_seal(header: bytes) -> None:
    if not header.startswith(OPENING, LENGTH_BYTES):
        raise PayloadDamagedError("its header does not begin as a payload's does")
    blank = bytearray(header)
    blank[SEAL] = BLANK.encode("ascii")
    if blake3(blank).hexdigest().encode("ascii") != header[SEAL]:
        raise PayloadDamagedError("its header does not match the header's own digest")


def _parsed(text: bytes) -> dict[str, object]:
    end = text.rfind(b"}") + 1
    if text[end:] != b" " * (len(text) - end):
        raise PayloadDamagedError("its header is not padded with spaces")
    try:
        fields: object = _DECODER.decode(text[:end].decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise PayloadDamagedError(f"its header does not decode: {error!s:.200}") from None
    if not isinstance(fields, dict):
        raise PayloadDamagedError("its header is not an object")
    return cast("dict[str, object]", fields)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name stands twice")
    return fields


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text:.40} is not a whole number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_refuse_number, parse_constant=_refuse_number
)


def _decoded_tensors(fields: dict[str, object], *, data_bytes: int) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    offset = 0
    for name, value in fields.items():
        entry = cast("dict[str, object]", value) if isinstance(value, dict) else {}
        if entry.keys() != _TENSOR_NAMES:
            raise PayloadDamagedError(f"{name!r:.80} is not described as a tensor")
        dtype, shape = entry["dtype"], _whole_numbers(entry["shape"])
        if flaw := flaw_of_tensor(name, dtype, shape):
            raise PayloadDamagedError(flaw)
        assert isinstance(dtype, str) and shape is not None
        end = offset + prod(shape) * DTYPE_BYTES[dtype]
        if end > data_bytes:
            raise PayloadDamagedError(
                f"{name!r:.80} would end at {end} of {data_bytes} bytes of data"
            )
        if _whole_numbers(entry["data_offsets"]) != (offset, end):
            raise PayloadDamagedError(f"{name!r:.80} does not stand at {offset} to {end}")
        specs.append(TensorSpec(name=name, dtype=dtype, shape=shape))
        offset = end
    if offset != data_bytes:
        raise PayloadDamagedError(f"its tensors end at {offset} of {data_bytes} bytes of data")
    return tuple(specs)


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    numbers = cast("Sequence[object]", value)
    # JSON's true is equal to 1, and is none.
    for number in numbers:
        if type(number) is not int:
            return None
    return tuple(cast("Sequence[int]", numbers))


def _decoded_metadata(value: object, tensors: tuple[TensorSpec, ...]) -> tuple[Description, bytes]:
    metadata = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    if metadata.keys() != _METADATA_NAMES:
        raise PayloadDamagedError("its metadata has other names than a payload's")
    texts = {name: text for name, text in metadata.items() if isinstance(text, str)}
    if len(texts) != len(metadata):
        raise PayloadDamagedError("its metadata holds something else than text")
    if texts["format"] != FORMAT:
        raise PayloadDamagedError(f"its format is {texts['format']!r:.40}, not {FORMAT!r}")
    if texts["kind"] not in _KINDS:
        raise PayloadDamagedError(f"its kind is {texts['kind']!r:.40}")
    data_digest = _digits(texts, "data_blake3")
    if len(data_digest) != 32:
        raise PayloadDamagedError("its data_blake3 is not 32 bytes long")
    return Description(
        kind=_KINDS[texts["kind"]],
        key=_digits(texts, "key"),
        parent=_digits(texts, "parent"),
        namespace=_digits(texts, "namespace"),
        layout_digest=_digits(texts, "layout_digest"),
        plan_digest=_digits(texts, "plan_digest"),
        start=_number(texts, "start"),
        end=_number(texts, "end"),
        generation=_number(texts, "generation"),
        store_id=_digits(texts, "store_id"),
        producer=texts["producer"],
        tensors=tensors,
    ), data_digest


def _digits(texts: dict[str, str], name: str) -> bytes:
    text = texts[name]
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if value.hex() != text:
        raise PayloadDamagedError(f"its {name} is not in hex: {text!r:.80}")
    return value


def _number(texts: dict[str, str], name: str) -> int:
    text = texts[name]
    if not (text.isascii() and text.isdigit() and len(text) < 20) or str(int(text)) != text:
        raise PayloadDamagedError(f"its {name} is not a number: {text!r:.80}")
    return int(text)
