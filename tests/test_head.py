"""HEAD: two slots, written in turn, that no crash can lose together."""

from pathlib import Path

import pytest
from journals import Crash, StoppingFiles

from walkback.journal.errors import FormatError
from walkback.journal.files import Files
from walkback.journal.head import CleanMark, Head, MutableHead

MARK = CleanMark(nbytes=8192, inode=7, mtime_ns=123)


def head_at(sequence: int, clean: CleanMark | None = None) -> Head:
    return Head(sequence=sequence, link=bytes([sequence]) * 16, epoch=3, clean=clean)


def read_back(root: Path) -> Head | None:
    files = Files(root)
    head = MutableHead(files)
    head.close()
    files.close()
    return head.value


def write_all(root: Path, *heads: Head) -> None:
    files = Files(root)
    head = MutableHead(files)
    for each in heads:
        head.write(each)
    head.close()
    files.close()


def test_a_missing_head_reads_as_none(tmp_path: Path) -> None:
    assert read_back(tmp_path) is None


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_last_write_is_the_one_that_is_read(tmp_path: Path, count: int) -> None:
    write_all(tmp_path, *(head_at(each) for each in range(1, count + 1)))

    assert read_back(tmp_path) == head_at(count)


def test_a_clean_mark_comes_back(tmp_path: Path) -> None:
    write_all(tmp_path, head_at(1, MARK))

    assert read_back(tmp_path) == head_at(1, MARK)


def test_unmarking_takes_the_clean_mark_away_durably(tmp_path: Path) -> None:
    write_all(tmp_path, head_at(1, MARK))
    files = StoppingFiles(tmp_path)
    head = MutableHead(files)

    head.unmark()

    assert files.steps == ["write", "sync"]
    assert read_back(tmp_path) == head_at(1)


def test_a_mark_is_taken_away_anew_until_a_sync_has_said_yes(tmp_path: Path) -> None:
    """Of the first try only the page cache may know: a reader of the disk would find the mark."""
    write_all(tmp_path, head_at(1, MARK))
    files = StoppingFiles(tmp_path, stop_at=1)
    head = MutableHead(files)
    with pytest.raises(Crash, match="sync"):
        head.unmark()
    head.close()

    again = StoppingFiles(tmp_path)
    head = MutableHead(again)
    head.unmark()
    head.unmark()

    assert again.steps == ["write", "sync"]


def test_a_write_after_a_rollback_counts_although_its_sequence_is_lower(tmp_path: Path) -> None:
    write_all(tmp_path, head_at(8), head_at(9), head_at(5))

    assert read_back(tmp_path) == head_at(5)


@pytest.mark.parametrize("byte", [0, 17, 200, 479, 480, 511])
def test_a_torn_newest_slot_leaves_the_older_one(tmp_path: Path, byte: int) -> None:
    write_all(tmp_path, head_at(1), head_at(2))
    content = bytearray((tmp_path / "HEAD").read_bytes())
    content[byte] ^= 0xFF
    (tmp_path / "HEAD").write_bytes(content)

    assert read_back(tmp_path) == head_at(1)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * 8192, b"\xff" * 8192, b"x" * 5000])
def test_two_torn_slots_read_as_none_and_can_be_written_again(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "HEAD").write_bytes(content)

    assert read_back(tmp_path) is None

    write_all(tmp_path, head_at(4))
    assert read_back(tmp_path) == head_at(4)


@pytest.mark.parametrize("stop_at", range(5))
def test_a_crash_while_head_is_made_leaves_a_whole_head_or_none(
    tmp_path: Path, stop_at: int
) -> None:
    files = StoppingFiles(tmp_path, stop_at)

    with pytest.raises(Crash):
        MutableHead(files).write(head_at(1))

    assert read_back(tmp_path) in (None, head_at(1))
    write_all(tmp_path, head_at(2))
    assert read_back(tmp_path) == head_at(2)


def test_a_crash_in_a_write_leaves_the_head_before_it(tmp_path: Path) -> None:
    write_all(tmp_path, head_at(1), head_at(2))
    head = MutableHead(StoppingFiles(tmp_path, 0))

    with pytest.raises(Crash):
        head.write(head_at(3))

    assert read_back(tmp_path) == head_at(2)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("walkback.journal.head.FORMAT", 2)
        write_all(tmp_path, head_at(1))

    with pytest.raises(FormatError, match="format 2"):
        read_back(tmp_path)


def test_a_mark_matches_only_the_file_that_was_closed(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"12345678")
    files = Files(tmp_path)
    status = files.status("data")
    assert status is not None
    mark = CleanMark(nbytes=8, inode=status.inode, mtime_ns=status.mtime_ns)

    assert mark.matches(status)
    (tmp_path / "data").write_bytes(b"123456789")
    assert not mark.matches(files.status("data"))
    assert not mark.matches(None)
