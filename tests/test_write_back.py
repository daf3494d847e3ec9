"""Large payloads are given to the disk piece by piece; that must make nothing durable by itself."""

import errno
import threading
from pathlib import Path

import pytest
from payload_examples import RecordingFiles, data_of, described, filled, staged_example

from walkback.store import digest, stage


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_WRITE_BACK_BYTES", 64)
    monkeypatch.setattr(digest, "CHUNK_BYTES", 32)


def test_the_last_sync_comes_after_the_header(tmp_path: Path) -> None:
    files = RecordingFiles(tmp_path)

    staged_example(files)

    assert files.steps.count("sync") > 1, "the example is too small to be written back early"
    assert files.steps.index("write header") < len(files.steps) - files.steps[::-1].index("sync")
    assert [step for step in files.steps if step in ("sync", "status")][-2:] == ["sync", "status"]
    files.close()


def test_the_bytes_are_the_same_as_without(tmp_path: Path) -> None:
    files = RecordingFiles(tmp_path)

    staged = stage.stage(files, "payload", described(), filled())

    assert (tmp_path / "payload").read_bytes()[-len(data_of(filled())) :] == data_of(filled())
    assert staged.nbytes == (tmp_path / "payload").stat().st_size
    files.close()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_early_sync_gives_the_file_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    syncs: list[int] = []

    class Failing(RecordingFiles):
        def sync(self, descriptor: int) -> None:
            syncs.append(descriptor)
            if len(syncs) == failing:
                raise OSError(errno.EIO, "Input/output error")
            super().sync(descriptor)

    files = Failing(tmp_path)

    with pytest.raises(OSError, match="Input/output error"):
        staged_example(files)

    assert files.names() == []
    assert files.descriptors == set()
    assert not [thread for thread in threading.enumerate() if "write-back" in thread.name]
    files.close()
