import errno
import os
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from payload_examples import (
    SPECS,
    Destination,
    RecordingFiles,
    altered_data_refused,
    altered_header_refused,
    another_header_refused,
    another_place_refused,
    another_size_refused_unread,
    data_of,
    is_refused,
    staged_example,
)

from walkback.journal.errors import PayloadDamagedError
from walkback.journal.files import FileStatus
from walkback.journal.words import Kind
from walkback.restore.reader import Expected, read_header, read_payload
from walkback.store import digest, verify
from walkback.store.tensors import TensorSpec
from walkback.store.verify import verify_payload


@pytest.fixture
def files(tmp_path: Path) -> Iterator[RecordingFiles]:
    files = RecordingFiles(tmp_path)
    yield files
    files.close()
    assert files.descriptors == set()


@pytest.fixture(params=[100, 8 * 1024 * 1024])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Small chunks are hashed on the thread beside the reader, one large chunk in place."""
    for module in (digest, verify):
        monkeypatch.setattr(module, "CHUNK_BYTES", request.param)
    return request.param


def refusal(files: RecordingFiles, expected: Expected) -> str:
    """Why the payload is refused; no buffer has been asked for by then."""
    into = Destination()
    with pytest.raises(PayloadDamagedError) as caught:
        read_payload(files, "payload", expected=expected, segments_of=into)
    assert into.segments == {}
    return str(caught.value)


@pytest.mark.usefixtures("chunk_bytes")
def test_the_tensors_arrive_as_they_were_staged(files: RecordingFiles) -> None:
    expected, tensors = staged_example(files)
    into = Destination()

    result = read_payload(files, "payload", expected=expected, segments_of=into)

    assert into.data() == data_of(tensors)
    assert list(into.segments) == [spec.name for spec in SPECS]
    assert result.header.description.tensors == SPECS


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("pieces", [2, 3, 7, 1000])
def test_segments_scattered_per_head_arrive_right(files: RecordingFiles, pieces: int) -> None:
    expected, tensors = staged_example(files)
    into = Destination(pieces=pieces)

    read_payload(files, "payload", expected=expected, segments_of=into)

    assert into.data() == data_of(tensors)


def test_the_tokens_of_a_block_can_go_into_a_longer_buffer(files: RecordingFiles) -> None:
    spec = TensorSpec(name="0.keys", dtype="BF16", shape=(1, 2, 4, 8))
    expected, tensors = staged_example(files, specs=[spec])
    room = bytearray(2 * 10 * 16)

    def heads(_: TensorSpec) -> list[memoryview]:
        return [memoryview(room)[h * 160 + 32 :][:64] for h in range(2)]

    read_payload(files, "payload", expected=expected, segments_of=heads)

    data = data_of(tensors)
    assert room[32:96] + room[192:256] == data
    assert room[:32] + room[96:192] + room[256:] == bytes(192)


def test_more_segments_than_one_call_takes_arrive_right(files: RecordingFiles) -> None:
    spec = TensorSpec(name="0", dtype="U8", shape=(5000,))
    expected, tensors = staged_example(files, specs=[spec])
    into = Destination(pieces=5000)

    read_payload(files, "payload", expected=expected, segments_of=into)

    assert into.data() == data_of(tensors)


@pytest.mark.usefixtures("chunk_bytes")
def test_short_reads_are_continued(files: RecordingFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, tensors = staged_example(files)
    real = os.preadv

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:50]], offset)

    monkeypatch.setattr(os, "preadv", short)
    into = Destination(pieces=3)

    read_payload(files, "payload", expected=expected, segments_of=into)

    assert into.data() == data_of(tensors)


def test_a_small_payload_takes_two_reads(files: RecordingFiles) -> None:
    expected, _ = staged_example(files)
    files.steps.clear()

    read_payload(files, "payload", expected=expected, segments_of=Destination())

    assert files.steps == ["status", "read", "read"]


def test_a_header_can_be_read_alone(files: RecordingFiles) -> None:
    expected, _ = staged_example(files)

    header = read_header(files, "payload", expected=expected)

    assert header.header_digest == expected.header_digest
    assert (header.description.key, header.nbytes) == (expected.key, expected.nbytes)


def test_a_flipped_bit_anywhere_in_the_header_is_damage(tmp_path: Path) -> None:
    altered_header_refused(tmp_path)


@pytest.mark.usefixtures("chunk_bytes")
def test_a_flipped_bit_anywhere_in_the_data_is_damage(tmp_path: Path) -> None:
    altered_data_refused(tmp_path)


def test_a_flipped_bit_anywhere_is_damage_without_a_journal(
    files: RecordingFiles, tmp_path: Path
) -> None:
    expected, _ = staged_example(files)
    accepted: list[int] = []

    with (tmp_path / "payload").open("r+b", buffering=0) as file:
        for offset in range(expected.nbytes):
            good = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([good[0] ^ 1 << offset % 8]), offset)
            if not is_refused(lambda: verify_payload(files, "payload", None)):
                accepted.append(offset)
            os.pwrite(file.fileno(), good, offset)

    assert accepted == []
    assert verify_payload(files, "payload", None).header_digest == expected.header_digest


@pytest.mark.parametrize("journal", [True, False])
def test_every_truncation_is_damage(files: RecordingFiles, tmp_path: Path, journal: bool) -> None:
    expected, _ = staged_example(files)
    accepted: list[int] = []

    for length in reversed(range(expected.nbytes)):
        os.truncate(tmp_path / "payload", length)
        if journal:
            refused = is_refused(
                lambda: read_payload(files, "payload", expected=expected, segments_of=Destination())
            )
        else:
            refused = is_refused(lambda: verify_payload(files, "payload", None))
        if not refused:
            accepted.append(length)

    assert accepted == []


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("missing", [1, 30, 300, 1000, 16000, 16700])
def test_a_file_that_shrinks_while_it_is_read_is_damage(
    files: RecordingFiles, tmp_path: Path, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = staged_example(files)
    real = files.status_of

    def shrinking(descriptor: int) -> FileStatus:
        status = real(descriptor)
        os.truncate(tmp_path / "payload", expected.nbytes - missing)
        return status

    monkeypatch.setattr(files, "status_of", shrinking)

    with pytest.raises(PayloadDamagedError, match="payload: it ends at"):
        read_payload(files, "payload", expected=expected, segments_of=Destination())


def test_a_valid_payload_that_is_not_the_committed_one_is_damage(tmp_path: Path) -> None:
    another_header_refused(tmp_path)


def test_a_payload_of_another_endpoint_or_layout_is_damage(tmp_path: Path) -> None:
    another_place_refused(tmp_path)


def test_a_file_of_another_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    another_size_refused_unread(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": Kind.SIDECAR}, "its kind is"),
        ({"key": b"x"}, "its key is 6b6b6b6b6b6b6b6b, and should be 78"),
        ({"parent": b"x"}, "its parent is"),
        ({"namespace": b"x"}, "its namespace is"),
        ({"layout_digest": b"x"}, "its layout digest is"),
        ({"generation": 4}, "its generation is 3, and should be 4"),
        ({"end": 513}, "its token range is (256, 512), and should be (256, 513)"),
        ({"start": 255}, "its token range is (256, 512), and should be (255, 512)"),
        ({"header_digest": bytes(32)}, "not the one that the journal committed"),
    ],
)
def test_a_payload_of_something_else_is_refused(
    files: RecordingFiles, change: dict[str, object], message: str
) -> None:
    expected, _ = staged_example(files)

    assert message in refusal(files, replace(expected, **change))  # type: ignore[arg-type]


def test_a_part_that_is_missing_is_named(files: RecordingFiles) -> None:
    expected, _ = staged_example(files)
    more = TensorSpec(name="4.keys", dtype="BF16", shape=(1,))

    assert "'4.keys' is missing" in refusal(files, replace(expected, tensors=(*SPECS, more)))


def test_a_part_that_is_too_many_is_named(files: RecordingFiles) -> None:
    expected, _ = staged_example(files)

    assert "'3.0' is in no layout" in refusal(files, replace(expected, tensors=SPECS[:-1]))


def test_an_empty_part_that_is_too_many_is_named(files: RecordingFiles) -> None:
    expected, _ = staged_example(files)
    others = tuple(spec for spec in SPECS if spec.nbytes)

    assert "'2.0' is in no layout" in refusal(files, replace(expected, tensors=others))


def test_parts_in_another_order_are_refused(files: RecordingFiles) -> None:
    expected, _ = staged_example(files)
    swapped = (SPECS[1], SPECS[0], *SPECS[2:])

    assert "another order" in refusal(files, replace(expected, tensors=swapped))


@pytest.mark.parametrize("change", [{"dtype": "F16"}, {"shape": (1, 2, 8, 4)}])
def test_a_part_of_another_dtype_or_shape_is_named(
    files: RecordingFiles, change: dict[str, object]
) -> None:
    expected, _ = staged_example(files)
    other = (replace(SPECS[0], **change), *SPECS[1:])  # type: ignore[arg-type]

    assert "'0.keys' is BF16 (1, 2, 4, 8), and the layout says" in refusal(
        files, replace(expected, tensors=other)
    )


def test_a_header_that_asks_for_437_gb_is_refused_without_allocating(
    files: RecordingFiles, tmp_path: Path
) -> None:
    (tmp_path / "payload").write_bytes((437 * 10**9).to_bytes(8, "little") + bytes(20_000))
    tracemalloc.start()

    refused = is_refused(lambda: verify_payload(files, "payload", None))

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused
    assert peak < 200_000


def test_an_unlinked_payload_is_an_os_error(files: RecordingFiles) -> None:
    expected, _ = staged_example(files)
    files.unlink("payload")

    with pytest.raises(FileNotFoundError):
        read_payload(files, "payload", expected=expected, segments_of=Destination())


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("reads_before", [0, 1])
def test_a_read_error_passes_unchanged(
    files: RecordingFiles, reads_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = staged_example(files)
    error = OSError(errno.EIO, "Input/output error")
    real, count = os.preadv, 0

    def failing(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal count
        count += 1
        if count > reads_before:
            raise error
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)

    with pytest.raises(OSError) as caught:
        read_payload(files, "payload", expected=expected, segments_of=Destination())

    assert caught.value is error


@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
def test_what_is_not_a_regular_file_is_an_os_error(
    files: RecordingFiles, tmp_path: Path, kind: str
) -> None:
    expected, _ = staged_example(files)
    (tmp_path / "payload").rename(tmp_path / "elsewhere")
    if kind == "directory":
        (tmp_path / "payload").mkdir()
    elif kind == "link":
        (tmp_path / "payload").symlink_to("elsewhere")
    else:
        os.mkfifo(tmp_path / "payload")

    with pytest.raises(OSError):
        read_payload(files, "payload", expected=expected, segments_of=Destination())


@pytest.mark.parametrize("nbytes", [0, 3, 127, 129])
def test_segments_of_another_size_than_the_tensor_are_the_callers_error(
    files: RecordingFiles, nbytes: int
) -> None:
    expected, _ = staged_example(files)

    with pytest.raises(ValueError, match=r"0\.keys: segments of"):
        read_payload(
            files,
            "payload",
            expected=expected,
            segments_of=lambda spec: [memoryview(bytearray(nbytes))],
        )


def test_a_segment_that_cannot_be_written_to_is_the_callers_error(files: RecordingFiles) -> None:
    expected, _ = staged_example(files)

    with pytest.raises(ValueError, match="cannot be written"):
        read_payload(
            files,
            "payload",
            expected=expected,
            segments_of=lambda spec: [memoryview(bytes(spec.nbytes))],
        )


def test_an_error_of_the_caller_closes_the_file(files: RecordingFiles) -> None:
    expected, _ = staged_example(files)

    def out_of_memory(spec: TensorSpec) -> list[memoryview]:
        raise MemoryError

    with pytest.raises(MemoryError):
        read_payload(files, "payload", expected=expected, segments_of=out_of_memory)

    assert files.descriptors == set()


@pytest.mark.usefixtures("chunk_bytes")
def test_verifying_says_what_the_payload_is(files: RecordingFiles) -> None:
    expected, _ = staged_example(files)

    header = verify_payload(files, "payload", expected.header_digest)

    assert header.description.tensors == SPECS
    assert header.header_digest == expected.header_digest
    assert header.nbytes == expected.nbytes
    status = files.status("payload")
    assert status is not None and header.charge_bytes == status.charge_bytes


def test_verifying_against_another_header_is_damage(files: RecordingFiles) -> None:
    staged_example(files)

    with pytest.raises(PayloadDamagedError, match="payload: its header is not the one"):
        verify_payload(files, "payload", bytes(32))


def test_the_times_of_header_and_data_are_told_apart(files: RecordingFiles) -> None:
    expected, _ = staged_example(files)
    ticks = iter(range(1000))

    result = read_payload(
        files,
        "payload",
        expected=expected,
        segments_of=Destination(),
        clock=lambda: next(ticks),
    )

    assert result.header_seconds == 1
    assert result.data_seconds > result.hash_wait_seconds >= 1
