"""Verifying in a child: whatever is wrong with the journal, only the child meets it."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from journals import Journal, make_journal, missed, open_journal, story

from walkback.journal.compactor import MutableCompactor
from walkback.journal.errors import JournalDamagedError
from walkback.journal.verify import verify_in_child

PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, bytes]]:
    """A journal with a snapshot and a tail, and its state."""
    root = tmp_path_factory.mktemp("verify") / "cache"
    make_journal(root)
    with open_journal(root) as journal:
        for batch in story(300):
            journal.append(*batch)
        compact(journal)
        for number in range(20):
            journal.append(missed(number))
        return root, journal.records()


def compact(journal: Journal) -> None:
    compactor = MutableCompactor(journal.log, journal.files, retain_events=100)
    compactor.gather(journal.state)
    for each in compactor.step(epoch=1, wall_ns=1):
        journal.state.apply(each)


@pytest.fixture
def root(good: tuple[Path, dict[bytes, bytes]], tmp_path: Path) -> Path:
    """A copy of the good journal, to ruin."""
    root = tmp_path / "cache"
    (root / "journal").mkdir(parents=True)
    for name in ("HEAD", "journal/data.mdb"):
        (root / name).write_bytes((good[0] / name).read_bytes())
    return root


def change(root: Path, offset: int, content: bytes) -> None:
    with (root / "journal/data.mdb").open("r+b") as file:
        file.seek(offset)
        file.write(content)


def size(root: Path) -> int:
    return (root / "journal/data.mdb").stat().st_size


def test_a_good_journal_verifies(root: Path) -> None:
    assert verify_in_child(root) is None


def test_verifying_changes_nothing(root: Path) -> None:
    before = (root / "journal/data.mdb").read_bytes()

    verify_in_child(root)

    assert (root / "journal/data.mdb").read_bytes() == before
    assert [each.name for each in (root / "journal").iterdir()] == ["data.mdb"]


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_harmless_or_found(
    root: Path, good: tuple[Path, dict[bytes, bytes]], seed: int
) -> None:
    generator = random.Random(seed)
    for _ in range(6):
        offset = generator.randrange(size(root))
        byte = (root / "journal/data.mdb").read_bytes()[offset : offset + 1]
        change(root, offset, bytes([byte[0] ^ 1 << generator.randrange(8)]))

        if verify_in_child(root) is None:
            assert_is_known_or_right(root, good[1])
        change(root, offset, byte)


def assert_is_known_or_right(root: Path, state: dict[bytes, bytes]) -> None:
    """What verifies is the state that was, or an older one that HEAD knows to be older."""
    with open_journal(root) as journal:
        assert journal.head.value is not None
        if not journal.log.is_behind(journal.head.value):
            assert journal.records() == state


@pytest.mark.parametrize("page", [2, 5, 9, 14, -1])
def test_a_zeroed_page_is_harmless_or_found_and_this_process_lives(
    root: Path, good: tuple[Path, dict[bytes, bytes]], page: int
) -> None:
    change(root, page % (size(root) // PAGE_BYTES) * PAGE_BYTES, bytes(PAGE_BYTES))

    if verify_in_child(root) is None:
        assert_is_known_or_right(root, good[1])


@pytest.mark.parametrize("kept", [0, 100, PAGE_BYTES, 3 * PAGE_BYTES])
def test_a_truncated_file_is_found(root: Path, kept: int) -> None:
    with (root / "journal/data.mdb").open("r+b") as file:
        file.truncate(kept)

    assert verify_in_child(root)


def test_an_altered_record_of_the_snapshot_is_found(root: Path) -> None:
    content = (root / "journal/data.mdb").read_bytes()
    change(root, content.rindex(b"weights"), b"WEIGHTS")

    assert verify_in_child(root)


def test_a_missing_file_is_found(root: Path) -> None:
    (root / "journal/data.mdb").unlink()

    assert verify_in_child(root) == "data.mdb is missing, or not a regular file"


def test_a_missing_directory_could_not_be_looked_at(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="could not be verified"):
        verify_in_child(tmp_path / "unmounted")


@pytest.mark.parametrize("signal_name", ["SIGBUS", "SIGABRT"])
def test_a_child_that_dies_is_an_answer(
    root: Path, signal_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run
    dying = [sys.executable, "-c", f"import os, signal; os.kill(os.getpid(), signal.{signal_name})"]
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run(dying, **options))  # pyright: ignore

    assert verify_in_child(root) == f"verifying it died of {signal_name}"


def test_a_child_that_cannot_start_is_no_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run
    broken = [sys.executable, "-c", "import no_such_module"]
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run(broken, **options))  # pyright: ignore

    with pytest.raises(OSError, match="could not be verified"):
        verify_in_child(root)


def test_verifying_loads_no_mlx() -> None:
    code = "import sys, walkback.journal.verify; sys.exit('mlx' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_second_look_by_the_opening_itself_finds_what_is_left(root: Path) -> None:
    content = (root / "journal/data.mdb").read_bytes()
    change(root, content.rindex(b"weights"), b"WEIGHTS")

    with pytest.raises(JournalDamagedError), open_journal(root) as journal:
        list(journal.log.read(journal.log.first_sequence))
