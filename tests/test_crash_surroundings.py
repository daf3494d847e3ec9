"""The layer of what the world around a cache does: a share of it, and that its checks can fail."""

from pathlib import Path

import pytest
from crash.course import Course, put, quarantine
from crash.layer import Effort, is_at_length
from crash.surroundings import LAYER, judge
from crash.troubles_of_files import of_the_directory

from walkback.journal.files import Files


def always(*_: object) -> bool:
    return True


def test_nothing_around_a_cache_costs_more_than_it_took() -> None:
    share = 1.0 if is_at_length() else LAYER.quick_share
    report = LAYER.report(Effort(share=share))

    assert not report.failures, "\n".join(report.failures)
    assert len(report.states) > 1000 * share


def test_a_store_that_does_not_ask_where_it_is_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = next(each for each in of_the_directory() if each.name == "the directory is renamed")
    judge(trouble, 4, tmp_path / "sound")
    monkeypatch.setattr(Files, "is_in_place", always)

    with pytest.raises(AssertionError, match="stored where nobody finds it"):
        judge(trouble, 4, tmp_path / "broken")


def test_a_stranger_in_quarantine_costs_no_file_that_was_to_go_there(tmp_path: Path) -> None:
    """The next opening took the two for one file, and removed the one that it was to keep."""
    course = Course(tmp_path / "cache", tmp_path)
    course.open()
    put(course, "c1", 1)
    (path,) = (course.root / "blocks").glob("*/*")
    stranger = course.root / f"quarantine/block-{path.parent.name}-{path.name}"
    stranger.mkdir()
    quarantine(course, "c1")
    course.close()

    course.open()
    course.close()

    assert path.exists() and stranger.exists()
