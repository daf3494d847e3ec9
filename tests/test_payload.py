import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import safetensors as safetensors_module
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from payload_examples import SPECS, data_of, described, filled, is_refused, sealed

from walkback.journal.errors import PayloadDamagedError
from walkback.journal.words import Kind
from walkback.store.decoder import decode_header, header_end
from walkback.store.payload import (
    HEADER_BYTES_MAX,
    Description,
    data_offset,
    encode_header,
    file_bytes,
    header_digest,
)
from walkback.store.tensors import DTYPE_BYTES, TensorSpec

# Its stubs leave the arguments' types out.
safetensors: Any = safetensors_module


def example() -> tuple[bytes, int]:
    """The header of the example and the size of its file."""
    return encode_header(described(), b"d" * 32), file_bytes(described())


def fields_of_example() -> dict[str, Any]:
    header, _ = example()
    return json.loads(header[8:])


def refusal(fields: object, *, nbytes: int | None = None) -> str:
    """Why a header with these fields, and a right digest of its own, is refused."""
    header = sealed(json.dumps(fields, separators=(",", ":")).encode())
    with pytest.raises(PayloadDamagedError) as caught:
        decode_header(header, example()[1] if nbytes is None else nbytes)
    return str(caught.value)


def test_what_is_encoded_decodes_to_the_same() -> None:
    header, nbytes = example()

    assert decode_header(header, nbytes) == (described(), b"d" * 32)


def test_the_header_is_the_same_each_time() -> None:
    assert example() == example()


def test_the_data_starts_at_16_kib_before_any_data_is_known() -> None:
    header, nbytes = example()

    assert len(header) == data_offset(described()) == 16384
    assert nbytes == 16384 + sum(spec.nbytes for spec in SPECS)


def test_a_long_header_gets_another_16_kib() -> None:
    specs = [TensorSpec(name=f"{n}.0", dtype="F32", shape=(1,)) for n in range(300)]
    description = described(specs)

    header = encode_header(description, b"d" * 32)

    assert len(header) == data_offset(description) == 32768
    assert decode_header(header, file_bytes(description))[0] == description


def test_the_header_digest_covers_the_length_and_the_header() -> None:
    header, _ = example()

    assert header_digest(header) == blake3(header).digest()


def test_mlx_reads_the_file_with_equal_tensors(tmp_path: Path) -> None:
    tensors = filled()
    data = data_of(tensors)
    path = tmp_path / "payload.safetensors"
    path.write_bytes(encode_header(described(), blake3(data).digest()) + data)

    loaded: Any = mx.load(str(path), return_metadata=True)

    arrays, metadata = loaded
    dtypes = {"BF16": mx.bfloat16, "F32": mx.float32, "F16": mx.float16}
    dtypes |= {"I64": mx.int64, "U8": mx.uint8}
    assert arrays.keys() == {spec.name for spec in SPECS}
    for tensor in tensors:
        array = arrays[tensor.spec.name]
        assert (array.dtype, array.shape) == (dtypes[tensor.spec.dtype], tensor.spec.shape)
        if tensor.spec.nbytes:
            assert bytes(memoryview(array.reshape(-1)).cast("B")) == bytes(tensor.buffer)
    assert metadata["kind"] == "block"
    assert metadata["data_blake3"] == blake3(data).hexdigest()


def test_safetensors_reads_the_file_with_equal_tensors() -> None:
    tensors = filled()
    data = data_of(tensors)

    found = safetensors.deserialize(encode_header(described(), blake3(data).digest()) + data)

    assert {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in found
    } == {
        tensor.spec.name: (tensor.spec.dtype, tensor.spec.shape, bytes(tensor.buffer))
        for tensor in tensors
    }


def test_a_payload_without_tensors_is_one() -> None:
    description = described([], kind=Kind.SIDECAR, start=512)

    header = encode_header(description, blake3().digest())

    assert decode_header(header, 16384)[0] == description


@given(
    specs=st.lists(
        st.builds(
            TensorSpec,
            name=st.text(min_size=1, max_size=12),
            dtype=st.sampled_from(sorted(DTYPE_BYTES)),
            shape=st.lists(st.integers(0, 300), max_size=5).map(tuple),
        ),
        max_size=8,
        unique_by=lambda spec: spec.name,
    ),
    producer=st.text(max_size=40),
    digests=st.lists(st.binary(max_size=40), min_size=6, max_size=6),
    start=st.integers(0, 2**40),
    tokens=st.integers(0, 2**20),
)
def test_any_description_survives_the_round_trip(
    specs: list[TensorSpec], producer: str, digests: list[bytes], start: int, tokens: int
) -> None:
    description = Description(
        kind=Kind.BLOCK if tokens else Kind.SIDECAR,
        key=digests[0],
        parent=digests[1],
        namespace=digests[2],
        layout_digest=digests[3],
        plan_digest=digests[4],
        start=start,
        end=start + tokens,
        generation=tokens,
        store_id=digests[5],
        producer=producer,
        tensors=tuple(specs),
    )

    header = encode_header(description, bytes(32))

    assert decode_header(header, file_bytes(description)) == (description, bytes(32))


@pytest.mark.parametrize(
    "description",
    [
        described([SPECS[0], SPECS[0]]),
        described([replace(SPECS[0], name="__metadata__")]),
        described([replace(SPECS[0], dtype="F8")]),
        described([replace(SPECS[0], shape=(-1, 2))]),
        described([replace(SPECS[0], shape=(2**31, 0))]),
        described(kind=Kind.SIDECAR),
        described(start=512),
        described(start=513),
        described([replace(SPECS[0], name=f"{n:0400}") for n in range(3000)]),
    ],
)
def test_what_would_be_refused_is_not_written(description: Description) -> None:
    with pytest.raises(ValueError):
        encode_header(description, bytes(32))


# Hostile headers. What follows has a right digest of its own, so only the bounds can refuse it.


def test_the_helper_of_these_tests_makes_the_header_that_the_code_makes() -> None:
    header, _ = example()

    assert sealed(json.dumps(fields_of_example(), separators=(",", ":")).encode()) == header


def test_a_header_that_once_asked_for_437_gb_is_refused() -> None:
    fields = fields_of_example()
    fields["0.keys"] |= {"shape": [437, 1000, 1000, 500], "data_offsets": [0, 437 * 10**9]}

    assert "would end at 437000000000" in refusal(fields)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**64 - 8, 2**40, HEADER_BYTES_MAX + 8])
def test_a_header_length_beyond_the_bound_is_refused_before_it_is_read(length: int) -> None:
    with pytest.raises(PayloadDamagedError, match="its header claims"):
        header_end(length.to_bytes(8, "little"), 2**64)


@pytest.mark.parametrize("length", [0, 1, 8, 16375, 16377, 16384])
def test_data_that_starts_off_the_16_kib_grid_is_refused(length: int) -> None:
    with pytest.raises(PayloadDamagedError, match="not a multiple"):
        header_end(length.to_bytes(8, "little"), 100_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F8_E4M3"}, "unknown dtype"),
        ({"dtype": None}, "unknown dtype"),
        ({"dtype": ["BF16"]}, "unknown dtype"),
        ({"shape": [1, 2, 4, -8]}, "impossible shape"),
        ({"shape": [2**31, 0]}, "impossible shape"),
        ({"shape": [10**400]}, "impossible shape"),
        ({"shape": [1] * 17}, "impossible shape"),
        ({"shape": [True, 2, 4, 8]}, "impossible shape"),
        ({"shape": [1, 2, 4, "8"]}, "impossible shape"),
        ({"shape": "1248"}, "impossible shape"),
        ({"shape": [2**31 - 1] * 16}, "would end at"),
        ({"shape": [1, 2, 4, 9]}, "does not stand at"),
        ({"data_offsets": [0, 127]}, "does not stand at"),
        ({"data_offsets": [1, 129]}, "does not stand at"),
        ({"data_offsets": [False, 128]}, "does not stand at"),
        ({"data_offsets": [0, 128, 128]}, "does not stand at"),
        ({"data_offsets": [-128, 0]}, "does not stand at"),
        ({"data_offsets": None}, "does not stand at"),
        ({"extra": 1}, "not described as a tensor"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    fields = fields_of_example()
    fields["0.keys"] |= change

    assert message in refusal(fields)


def test_tensors_that_overlap_are_refused() -> None:
    fields = fields_of_example()
    fields["0.values"]["data_offsets"] = [64, 192]

    assert "'0.values' does not stand at 128 to 256" in refusal(fields)


def test_a_gap_between_tensors_is_refused() -> None:
    fields = fields_of_example()
    del fields["0.values"]

    assert "'1.1' does not stand at 128 to 188" in refusal(fields)


def test_tensors_out_of_order_are_refused() -> None:
    fields = fields_of_example()
    fields["0.keys"] = fields.pop("0.keys")

    assert "does not stand at" in refusal(fields)


def test_data_after_the_last_tensor_is_refused() -> None:
    assert "its tensors end at" in refusal(fields_of_example(), nbytes=example()[1] + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "2"}, "its format is '2'"),
        ({"kind": "blob"}, "its kind is 'blob'"),
        ({"key": "zz"}, "its key is not in hex"),
        ({"key": "AB"}, "its key is not in hex"),
        ({"key": "a b"}, "its key is not in hex"),
        ({"key": None}, "something else than text"),
        ({"start": "-1"}, "its start is not a number"),
        ({"start": "0256"}, "its start is not a number"),
        ({"start": "٣"}, "its start is not a number"),
        ({"start": "9" * 5000}, "its start is not a number"),
        ({"end": "9" * 19}, "its tokens are"),
        ({"end": "12"}, "its tokens are"),
        ({"end": "256"}, "and it is a block"),
        ({"kind": "sidecar"}, "and it is a sidecar"),
        ({"data_blake3": "00"}, "not 32 bytes"),
        ({"more": ""}, "other names"),
    ],
)
def test_metadata_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    fields = fields_of_example()
    fields["__metadata__"] |= change

    assert message in refusal(fields)


def test_a_name_that_stands_twice_is_refused() -> None:
    text = json.dumps(fields_of_example(), separators=(",", ":")).encode()
    twice = text.replace(b'"0.values"', b'"0.keys"')

    with pytest.raises(PayloadDamagedError, match="stands twice"):
        decode_header(sealed(twice), example()[1])


@pytest.mark.parametrize("number", ["1.0", "1e3", "NaN", "Infinity", "9" * 5000])
def test_a_number_that_is_not_whole_is_refused(number: str) -> None:
    text = json.dumps(fields_of_example(), separators=(",", ":"))
    other = text.replace('"shape":[1,', f'"shape":[{number},', 1).encode()

    with pytest.raises(PayloadDamagedError, match="does not decode"):
        decode_header(sealed(other), example()[1])


def test_a_header_nested_without_end_is_refused() -> None:
    opening = b'{"__metadata__":{"header_blake3":"' + b"0" * 64 + b'","a":'
    for brackets in (b"[" * 200_000, b'{"a":' * 100_000):
        with pytest.raises(PayloadDamagedError, match="does not decode"):
            decode_header(sealed(opening + brackets + b"}"), 10**6)


@pytest.mark.parametrize("padding", [b"\0", b"\n", b"\t"])
def test_padding_that_is_not_spaces_is_refused(padding: bytes) -> None:
    text = json.dumps(fields_of_example(), separators=(",", ":")).encode()

    with pytest.raises(PayloadDamagedError, match="padded"):
        decode_header(sealed(text, padding=padding), example()[1])


def test_a_header_that_ends_early_is_refused() -> None:
    header, nbytes = example()

    for length in (0, 1, 7, 8, 9, 200, len(header) - 1):
        assert is_refused(lambda length=length: decode_header(header[:length], nbytes))


@given(first=st.binary(max_size=300), nbytes=st.integers(0, 2**63))
def test_random_bytes_are_refused(first: bytes, nbytes: int) -> None:
    assert is_refused(lambda: decode_header(first, nbytes))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
any_json = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(st.data())
def test_a_sealed_header_with_anything_in_it_is_refused_or_means_the_same(
    data: st.DataObject,
) -> None:
    fields = fields_of_example()
    target = data.draw(st.sampled_from([fields, *fields.values()]))
    name = data.draw(st.sampled_from(sorted(target)) | st.text(max_size=8))
    target[name] = data.draw(any_json)
    header = sealed(json.dumps(fields, separators=(",", ":")).encode())
    nbytes = data.draw(st.just(example()[1]) | st.integers(0, 2**63))

    try:
        description, digest = decode_header(header, nbytes)
    except PayloadDamagedError:
        return

    assert file_bytes(description) == nbytes
    assert encode_header(description, digest) == header


@given(
    offset=st.integers(0, 1200),
    removed=st.integers(0, 4),
    inserted=st.binary(max_size=4),
)
def test_a_sealed_header_with_bytes_exchanged_never_raises_anything_else(
    offset: int, removed: int, inserted: bytes
) -> None:
    header, nbytes = example()
    text = header[8:].rstrip(b" ")
    text = text[:offset] + inserted + text[offset + removed :]

    try:
        description, _ = decode_header(sealed(text), nbytes)
    except PayloadDamagedError:
        return

    assert file_bytes(description) == nbytes
