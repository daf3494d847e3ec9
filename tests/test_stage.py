import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from mutants_payload import MUTANTS, Mutant
from payload_examples import (
    RecordingFiles,
    data_of,
    described,
    failed_sync_given_up,
    filled,
    staged_example,
    written_in_order,
)

from walkback.store import digest
from walkback.store.payload import encode_header, header_digest
from walkback.store.stage import stage
from walkback.store.tensors import Tensor, TensorSpec


@pytest.fixture
def files(tmp_path: Path) -> Iterator[RecordingFiles]:
    files = RecordingFiles(tmp_path)
    yield files
    files.close()
    assert files.descriptors == set()


def test_the_file_is_the_header_and_the_data(files: RecordingFiles, tmp_path: Path) -> None:
    tensors = filled()
    data = data_of(tensors)
    header = encode_header(described(), blake3(data).digest())

    staged = stage(files, "payload", described(), tensors)

    assert (tmp_path / "payload").read_bytes() == header + data
    assert staged.nbytes == len(header + data)
    assert staged.header_digest == header_digest(header)


def test_the_charge_is_what_the_file_takes_after_the_sync(files: RecordingFiles) -> None:
    staged = stage(files, "payload", described(), filled())

    status = files.status("payload")
    assert status is not None
    assert staged.charge_bytes == status.charge_bytes >= 20480


def test_the_data_is_written_before_the_header_and_one_sync_ends_it(tmp_path: Path) -> None:
    written_in_order(tmp_path)


def test_a_failing_sync_leaves_no_file_and_is_not_retried(tmp_path: Path) -> None:
    failed_sync_given_up(tmp_path)


def test_data_of_many_chunks_is_the_same_file(
    files: RecordingFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(files, "whole", described(), filled())
    monkeypatch.setattr(digest, "CHUNK_BYTES", 100)

    stage(files, "chunks", described(), filled())

    assert (tmp_path / "chunks").read_bytes() == (tmp_path / "whole").read_bytes()
    assert files.steps.count("write data") == 1 + 4


def test_without_a_thread_to_be_had_it_is_hashed_in_place(
    files: RecordingFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(files, "whole", described(), filled())
    monkeypatch.setattr(digest, "CHUNK_BYTES", 100)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)

    stage(files, "payload", described(), filled())

    assert (tmp_path / "payload").read_bytes() == (tmp_path / "whole").read_bytes()


def test_chunks_hold_every_byte_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", 10)
    buffers = [memoryview(bytes([n] * n)) for n in (3, 0, 7, 25, 10, 1)]

    chunks = [b"".join(chunk) for chunk in digest.chunks_of(buffers)]

    assert b"".join(chunks) == b"".join(buffers)
    assert [len(chunk) for chunk in chunks] == [10, 10, 10, 10, 6]


def test_short_writes_are_continued(
    files: RecordingFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(files, "whole", described(), filled())
    real = os.pwritev

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:50]], offset)

    monkeypatch.setattr(os, "pwritev", short)

    stage(files, "short", described(), filled())

    assert (tmp_path / "short").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("step", range(1, 4))
@pytest.mark.parametrize("call", ["pwritev", "fsync", "fstat", "close"])
def test_an_error_at_any_step_leaves_no_file_and_is_passed_on(
    call: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(RecordingFiles):
        countdown = step

        def fail(self, name: str) -> None:
            if name == call:
                self.countdown -= 1
                if self.countdown == 0:
                    raise OSError(errno.ENOSPC, "No space left on device")

        def write(
            self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int
        ) -> None:
            self.fail("pwritev")
            super().write(descriptor, buffers, offset)

        def sync(self, descriptor: int) -> None:
            self.fail("fsync")
            super().sync(descriptor)

        def status_of(self, descriptor: int) -> Any:
            self.fail("fstat")
            return super().status_of(descriptor)

        def close_file(self, descriptor: int) -> None:
            super().close_file(descriptor)
            self.fail("close")

    monkeypatch.setattr(digest, "CHUNK_BYTES", 200)
    files = Failing(tmp_path)

    try:
        staged_example(files)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        assert files.names() == []
    else:
        assert step > 1 and files.names() == ["payload"]
    assert files.descriptors == set()
    files.close()


def test_a_name_that_is_taken_is_left_alone(files: RecordingFiles, tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(b"another's")

    with pytest.raises(FileExistsError):
        stage(files, "payload", described(), filled())

    assert (tmp_path / "payload").read_bytes() == b"another's"


def test_tensors_of_another_order_are_not_written(files: RecordingFiles) -> None:
    with pytest.raises(ValueError, match="in its order"):
        stage(files, "payload", described(), filled()[::-1])

    assert files.names() == []


@pytest.mark.parametrize("chunk_bytes", [1000, 10_000])
@pytest.mark.parametrize("fails", [False, True])
def test_no_buffer_is_held_when_it_is_done(
    chunk_bytes: int,
    fails: bool,
    files: RecordingFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digest, "CHUNK_BYTES", chunk_bytes)
    spec = TensorSpec(name="0", dtype="U8", shape=(5000,))
    source = bytearray(5000)
    view = memoryview(source)
    if fails:

        def failing(descriptor: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", failing)

    try:
        stage(files, "payload", described([spec]), [Tensor(spec=spec, buffer=view)])
    except OSError as error:
        assert fails and error.errno == errno.EIO
    view.release()

    # A bytearray refuses to change its size while anything looks at it.
    source.clear()


def test_the_times_are_those_of_the_clock_that_was_given(files: RecordingFiles) -> None:
    ticks = iter(range(1000))

    staged = stage(files, "payload", described(), filled(), clock=lambda: next(ticks))

    assert staged.sync_seconds == 1
    assert staged.hash_wait_seconds >= 1
    assert staged.write_seconds >= 1


def test_a_float_buffer_is_written_as_its_bytes(files: RecordingFiles, tmp_path: Path) -> None:
    spec = TensorSpec(name="0", dtype="F32", shape=(2, 2))
    values: Any = memoryview(bytes(range(16))).cast("f", (2, 2))

    stage(files, "payload", described([spec]), [Tensor(spec=spec, buffer=values)])

    assert (tmp_path / "payload").read_bytes()[16384:] == bytes(range(16))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_is_caught_by_a_check_that_the_code_passes(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, broken = tmp_path / "sound", tmp_path / "broken"
    sound.mkdir()
    broken.mkdir()
    mutant.check(sound, RecordingFiles)

    mutant.patch(monkeypatch)
    with pytest.raises(AssertionError):
        mutant.check(broken, mutant.files)
