"""The log: durable, chained, and sure of what it does not know."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
from journals import (
    STORE_ID,
    Crash,
    Journal,
    StoppingFiles,
    make_journal,
    missed,
    open_journal,
    opened,
    story,
)

from walkback.journal import chain, environment, log_reader
from walkback.journal.codec import decode, encode
from walkback.journal.errors import (
    CacheLockedError,
    CacheOfflineError,
    CommitUnknownError,
    FormatError,
    JournalDamagedError,
)
from walkback.journal.files import Files, Transaction
from walkback.journal.head import Head, MutableHead
from walkback.journal.log import MutableLog


class FailingFiles(Files):
    """Commits fail while ``fails`` is "before" or "after" the real one."""

    fails = ""
    error: BaseException = OSError(errno.EIO, "injected")

    def commit(self, transaction: Transaction) -> None:
        if self.fails == "before":
            raise self.error
        super().commit(transaction)
        if self.fails == "after":
            raise self.error


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "cache"
    make_journal(root)
    return root


def edit_events(root: Path, edit: Callable[[Any, Any], object]) -> None:
    """Change the database of events behind the log's back."""
    with lmdb.open(str(root / "journal"), lock=False, max_dbs=3) as env:
        database = env.open_db(b"events", create=False)
        with env.begin(write=True) as transaction:
            edit(transaction, database)


def fill(root: Path, count: int = 10) -> None:
    with open_journal(root) as journal:
        journal.append(opened(), *(missed(each) for each in range(count - 1)))


def tell_story(journal: Journal, count: int) -> None:
    for batch in story(count):
        journal.append(*batch)


# Appending and reading.


def test_appended_events_are_read_back_in_their_places(root: Path) -> None:
    with open_journal(root) as journal:
        records = journal.log.append([opened(), missed(1)], epoch=1, wall_ns=50)

        assert [each.sequence for each in records] == [1, 2]
        assert list(journal.log.read(1)) == records
    with open_journal(root) as journal:
        assert list(journal.log.read(1)) == records
        assert list(journal.log.read(2, 2)) == records[1:]


def test_an_empty_append_writes_nothing(root: Path) -> None:
    with open_journal(root) as journal:
        assert journal.log.append([], epoch=1, wall_ns=1) == []
        assert journal.log.sequence == 0


def test_wall_time_never_runs_backwards(root: Path) -> None:
    with open_journal(root) as journal:
        journal.append(opened(), wall_ns=500)
    with open_journal(root) as journal:
        journal.append(missed(1), wall_ns=400)
        journal.append(missed(2), wall_ns=600)

        assert [each.wall_ns for each in journal.log.read(1)] == [500, 500, 600]


def test_reading_crosses_batches(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "_BATCH_RECORDS", 3)
    fill(root, 10)

    with open_journal(root) as journal:
        assert [each.sequence for each in journal.log.read(2)] == list(range(2, 11))


def test_appending_while_reading_is_allowed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "_BATCH_RECORDS", 2)
    fill(root, 4)

    with open_journal(root) as journal:
        found: list[int] = []
        for record in journal.log.read(1):
            found.append(record.sequence)
            journal.append(missed(9))

        assert found == [1, 2, 3, 4]


def test_loading_gives_the_running_state(root: Path) -> None:
    with open_journal(root) as journal:
        tell_story(journal, 200)
        running = journal.records()

        assert dict(journal.log.load().records()) == running
    with open_journal(root) as journal:
        assert journal.records() == running


def test_links_are_known_from_before_the_first_event_to_the_last(root: Path) -> None:
    fill(root, 3)

    with open_journal(root) as journal:
        assert journal.log.link_at(0) == chain.FIRST_LINK
        assert journal.log.link_at(3) == journal.log.link
        assert journal.log.link_at(4) is None


def test_the_bytes_of_the_journal_are_those_of_its_file(root: Path) -> None:
    fill(root)

    with open_journal(root) as journal:
        assert journal.log.file_bytes() >= (root / "journal/data.mdb").stat().st_size


def test_a_full_map_grows_and_the_append_is_repeated(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_MAP_BYTES", 1 << 16)

    with open_journal(root) as journal:
        for start in range(0, 2000, 200):
            journal.append(*(missed(start + each) for each in range(200)))

        assert [each.sequence for each in journal.log.read(1)] == list(range(1, 2001))
    with open_journal(root) as journal:
        journal.append(*(missed(each) for each in range(2000)))
        assert journal.log.load().sequence == 4000
    assert (root / "journal/data.mdb").stat().st_size > 1 << 16


# Damage that the chain finds.


@pytest.mark.parametrize("victim", [1, 5, 9])
def test_a_removed_event_is_found(root: Path, victim: int) -> None:
    fill(root)
    edit_events(root, lambda txn, db: txn.delete(chain.sequence_key(victim), db=db))

    with pytest.raises(JournalDamagedError, match="event"), open_journal(root):
        pass


@pytest.mark.parametrize("victim", [1, 5, 10])
@pytest.mark.parametrize("byte", [0, 3, 20, -20, -1])
def test_an_altered_event_is_found(root: Path, victim: int, byte: int) -> None:
    fill(root)

    def alter(transaction: Any, database: Any) -> None:
        stored = bytearray(transaction.get(chain.sequence_key(victim), db=database))
        stored[byte] ^= 1
        transaction.put(chain.sequence_key(victim), bytes(stored), db=database)

    edit_events(root, alter)

    with pytest.raises(JournalDamagedError), open_journal(root):
        pass


def test_two_swapped_events_are_found(root: Path) -> None:
    fill(root)

    def swap(transaction: Any, database: Any) -> None:
        keys = chain.sequence_key(4), chain.sequence_key(5)
        values = [transaction.get(each, db=database) for each in keys]
        for each, value in zip(keys, reversed(values), strict=True):
            transaction.put(each, value, db=database)

    edit_events(root, swap)

    with pytest.raises(JournalDamagedError, match="link"), open_journal(root):
        pass


def forge(root: Path) -> None:
    """Replace event 5 with a well-formed one that carries the old one's link."""

    def replace_event(transaction: Any, database: Any) -> None:
        old = transaction.get(chain.sequence_key(5), db=database)
        data = encode(replace(decode(old[:-16]), event=missed(666)))
        transaction.put(chain.sequence_key(5), data + old[-16:], db=database)

    edit_events(root, replace_event)


def test_a_forged_event_is_found(root: Path) -> None:
    fill(root)
    forge(root)

    with pytest.raises(JournalDamagedError, match="event 5"), open_journal(root):
        pass


def test_without_the_check_of_links_a_forged_event_would_pass(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root)
    forge(root)

    class AgreeingLink(bytes):
        def __ne__(self, other: object) -> bool:
            return False

    class Agreeing:
        def __init__(self, _: bytes) -> None: ...

        def digest(self, length: int) -> bytes:
            return AgreeingLink(length)

    monkeypatch.setattr(chain, "blake3", Agreeing)

    with open_journal(root) as journal:
        assert journal.log.sequence == 10


def test_a_journal_of_another_cache_is_refused(root: Path) -> None:
    files = Files(root)

    with pytest.raises(JournalDamagedError, match="another cache"):
        MutableLog.open(files, store_id=b"other", head=MutableHead(files))


@pytest.mark.parametrize("content", [b"", b"no LMDB" * 9999, bytes(8192)])
def test_a_file_that_is_not_lmdbs_is_damage(root: Path, content: bytes) -> None:
    (root / "journal/data.mdb").write_bytes(content)

    with pytest.raises(JournalDamagedError), open_journal(root):
        pass


def test_a_missing_journal_is_damage_and_is_not_made(root: Path) -> None:
    shutil.rmtree(root / "journal")

    with pytest.raises(JournalDamagedError, match="missing"), open_journal(root):
        pass
    assert not (root / "journal").exists()


def test_a_link_in_place_of_the_journal_is_not_followed(root: Path, tmp_path: Path) -> None:
    (root / "journal").rename(tmp_path / "elsewhere")
    (root / "journal").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OSError), open_journal(root):
        pass


def test_a_journal_of_the_other_lmdb_is_refused(root: Path) -> None:
    shutil.rmtree(root / "journal")
    lmdb.open(str(root / "journal"), lock=False, lib_version=1).close()

    with pytest.raises(FormatError, match="LMDB"), open_journal(root):
        pass


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("walkback.journal.log.FORMAT", 2)
        make_journal(tmp_path)

    with pytest.raises(FormatError, match="newer"), open_journal(tmp_path):
        pass


def test_a_second_opening_in_one_process_is_refused(root: Path) -> None:
    with open_journal(root), pytest.raises(CacheLockedError), open_journal(root):
        pass


# HEAD.


def test_head_follows_each_commit(root: Path) -> None:
    with open_journal(root) as journal:
        journal.append(opened(), epoch=4)

        expected = Head(sequence=1, link=journal.log.link, epoch=4)
        assert journal.head.value == expected
        assert MutableHead(journal.files).value == expected


def test_a_journal_rolled_back_behind_head_is_known(root: Path) -> None:
    fill(root, 3)
    shutil.copytree(root / "journal", root / "older")
    with open_journal(root) as journal:
        journal.append(missed(8))
    shutil.rmtree(root / "journal")
    (root / "older").rename(root / "journal")

    with open_journal(root) as journal:
        assert journal.head.value is not None
        assert journal.log.is_behind(journal.head.value)


def test_a_journal_that_took_another_course_than_head_is_known(root: Path) -> None:
    fill(root, 3)
    shutil.copytree(root / "journal", root / "older")
    with open_journal(root) as journal:
        journal.append(missed(8))
        known = journal.head.value
    assert known is not None
    shutil.rmtree(root / "journal")
    (root / "older").rename(root / "journal")

    with open_journal(root) as journal:
        journal.append(missed(9))
        assert journal.log.sequence == known.sequence
        assert journal.log.is_behind(known)


def test_a_journal_ahead_of_head_is_not_behind_it(root: Path) -> None:
    fill(root, 3)
    with open_journal(root) as journal:
        older = journal.head.value
        assert older is not None
        journal.append(missed(8))

        assert not journal.log.is_behind(older)


def test_a_crash_before_the_commit_leaves_head_where_the_journal_is(root: Path) -> None:
    fill(root, 3)
    files = StoppingFiles(root)

    with pytest.raises(Crash), open_journal(root, files) as journal:
        files.stop_at = len(files.steps)
        journal.append(missed(8))

    with open_journal(root) as journal:
        assert journal.head.value is not None
        assert not journal.log.is_behind(journal.head.value)


def test_with_head_written_before_the_commit_a_crash_would_look_like_a_rollback(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, 3)
    files = StoppingFiles(root)
    write = environment.MutableEnvironment.write

    def write_late(self: Any, body: Any) -> None:
        def body_then_head(transaction: Any) -> None:
            body(transaction)
            position = journal.log._proposal.position  # pyright: ignore
            journal.head.write(Head(sequence=position.sequence, link=position.link, epoch=1))

        write(self, body_then_head)

    monkeypatch.setattr(environment.MutableEnvironment, "write", write_late)
    with pytest.raises(Crash), open_journal(root, files) as journal:
        files.stop_at = len(files.steps) + 1
        journal.append(missed(8))

    with open_journal(root) as journal:
        assert journal.head.value is not None
        assert journal.log.is_behind(journal.head.value)


def test_a_head_that_cannot_be_written_does_not_undo_the_commit(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, 3)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    with open_journal(root) as journal:
        monkeypatch.setattr(journal.head, "write", refuse)
        journal.append(missed(8))

        assert journal.log.sequence == 4
        assert journal.log.head_failure is not None


def test_a_clean_close_leaves_a_mark_that_matches(root: Path) -> None:
    with open_journal(root) as journal:
        journal.append(opened())
        journal.log.close_clean()

    files = Files(root)
    head = MutableHead(files).value
    assert head is not None and head.clean is not None
    assert head.clean.matches(files.status("journal/data.mdb"))


def test_the_clean_mark_is_durably_gone_before_the_next_commit(root: Path) -> None:
    with open_journal(root) as journal:
        journal.append(opened())
        journal.log.close_clean()
    files = StoppingFiles(root)

    with open_journal(root, files) as journal:
        journal.append(opened(2), epoch=2)
        journal.append(missed(1), epoch=2)

    assert files.steps == ["write", "sync", "commit", "write", "commit", "write"]


def test_an_abandoned_log_has_no_mark(root: Path) -> None:
    with open_journal(root) as journal:
        journal.append(opened())

    head = MutableHead(Files(root)).value
    assert head is not None and head.clean is None


# Creation.


def steps_of_creation(root: Path) -> int:
    files = StoppingFiles(root)
    MutableLog.create(files, STORE_ID)
    return len(files.steps)


@pytest.mark.parametrize("stop_at", range(7))
def test_a_crash_at_any_step_of_creation_leaves_a_journal_or_none(
    tmp_path: Path, stop_at: int
) -> None:
    (tmp_path / "count").mkdir()
    assert steps_of_creation(tmp_path / "count") == 6
    root = tmp_path / "cache"
    root.mkdir()
    if stop_at < 6:
        with pytest.raises(Crash):
            MutableLog.create(StoppingFiles(root, stop_at), STORE_ID)

    if not (root / "journal").exists():
        make_journal(root)
    with open_journal(root) as journal:
        journal.append(opened())
        assert journal.log.sequence == 1


def test_made_in_place_a_journal_would_be_there_before_it_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "NEW_FOLDER", "journal")
    with pytest.raises(Crash):
        MutableLog.create(StoppingFiles(tmp_path, 1), STORE_ID)

    assert (tmp_path / "journal").exists()
    with pytest.raises(JournalDamagedError), open_journal(tmp_path):
        pass


# A commit that failed.


@pytest.mark.parametrize(("fails", "stands"), [("before", False), ("after", True)])
def test_a_failed_commit_is_settled_by_what_is_on_disk(
    root: Path, fails: str, stands: bool
) -> None:
    fill(root, 3)
    files = FailingFiles(root)

    with open_journal(root, files) as journal:
        files.fails = fails
        with pytest.raises(CommitUnknownError):
            journal.append(missed(8), missed(9))
        files.fails = ""

        assert journal.log.settle() is stands
        assert journal.log.sequence == (5 if stands else 3)
        assert [each.sequence for each in journal.log.proposed] == [4, 5]
        assert [each.sequence for each in journal.log.read(1)][-1] == journal.log.sequence
        journal.log.append([missed(10)], epoch=1, wall_ns=1)
        assert journal.head.value is not None
        assert journal.head.value.sequence == journal.log.sequence


def test_a_commit_that_failed_on_a_full_disk_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FailingFiles(root)

    with open_journal(root, files) as journal:
        monkeypatch.setattr(files, "free_bytes", lambda: 0)
        files.fails, files.error = "before", lmdb_error(lmdb.Error, errno.EIO)
        with pytest.raises(CommitUnknownError) as raised:
            journal.append(missed(8))

        cause = raised.value.__cause__
        assert isinstance(cause, OSError) and cause.errno == errno.ENOSPC


@pytest.mark.parametrize("fails", ["before", "after"])
def test_until_it_is_settled_a_log_refuses_everything(root: Path, fails: str) -> None:
    files = FailingFiles(root)

    with open_journal(root, files) as journal:
        files.fails = fails
        with pytest.raises(CommitUnknownError):
            journal.append(missed(8))

        assert journal.log.is_unsettled
        for use in (
            lambda: journal.append(missed(9)),
            lambda: list(journal.log.read(1)),
            journal.log.load,
            lambda: journal.log.link_at(0),
        ):
            with pytest.raises(CommitUnknownError):
                use()


def test_an_unsettled_log_closes_without_a_mark(root: Path) -> None:
    files = FailingFiles(root)

    with open_journal(root, files) as journal:
        journal.append(opened())
        files.fails = "after"
        with pytest.raises(CommitUnknownError):
            journal.append(missed(8))
        journal.log.close_clean()

        assert journal.head.value is not None
        assert journal.head.value.clean is None


def test_a_journal_that_cannot_be_reopened_stays_unsettled(root: Path) -> None:
    files = FailingFiles(root)

    with open_journal(root, files) as journal:
        files.fails = "after"
        with pytest.raises(CommitUnknownError):
            journal.append(missed(8))
        (root / "journal").rename(root / "away")
        with pytest.raises(JournalDamagedError):
            journal.log.settle()
        assert journal.log.is_unsettled

        (root / "away").rename(root / "journal")
        assert journal.log.settle()


def test_a_full_map_in_the_commit_itself_is_clean(root: Path) -> None:
    class FullOnce(Files):
        full = True

        def commit(self, transaction: Transaction) -> None:
            if self.full:
                self.full = False
                raise lmdb.MapFullError("mdb_txn_commit")
            super().commit(transaction)

    with open_journal(root, FullOnce(root)) as journal:
        journal.append(missed(1))

        assert journal.log.sequence == 1


def test_an_error_before_the_commit_changes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise ValueError("injected")

    with open_journal(root) as journal:
        with monkeypatch.context() as broken:
            broken.setattr("walkback.journal.log.encode", fail)
            with pytest.raises(ValueError, match="injected"):
                journal.append(missed(1))
        journal.append(missed(2))

        assert [each.event for each in journal.log.read(1)] == [missed(2)]


def lmdb_error(kind: type[lmdb.Error], code: int) -> lmdb.Error:
    error = kind("injected")
    vars(error)["code"] = code
    return error


# The directory goes away, or someone else writes.


@pytest.mark.parametrize("victim", ["", "journal", "journal/data.mdb"])
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_directory_that_is_gone_or_replaced_is_offline(root: Path, victim: str, how: str) -> None:
    with open_journal(root) as journal:
        journal.append(opened())
        gone = root / victim
        away = root.with_name("away")
        gone.rename(away)
        if how == "replaced" and away.is_dir():
            shutil.copytree(away, gone)
        elif how == "replaced":
            shutil.copy(away, gone)

        with pytest.raises(CacheOfflineError):
            journal.append(missed(1))
        assert journal.log.sequence == 1


def test_a_journal_unlinked_while_open_is_offline(root: Path) -> None:
    with open_journal(root) as journal:
        os.unlink(root / "journal/data.mdb")  # noqa: PTH108

        with pytest.raises(CacheOfflineError, match="gone"):
            journal.append(missed(1))


def test_a_newer_epoch_fences_the_older_one_off(root: Path) -> None:
    with open_journal(root) as journal:
        journal.append(opened(2), epoch=2)

        with pytest.raises(CacheOfflineError, match="epoch 2"):
            journal.append(missed(1), epoch=1)
        assert journal.log.sequence == 1


def test_events_that_another_opening_wrote_stop_this_one(root: Path) -> None:
    with open_journal(root) as journal:
        journal.append(opened())
        with journal.log._environment._env.begin(write=True) as transaction:  # pyright: ignore
            transaction.put(
                chain.sequence_key(2),
                b"x" * 32,
                db=journal.log._environment.events,  # pyright: ignore
            )

        with pytest.raises(CacheOfflineError, match="another opening"):
            journal.append(missed(1))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (lmdb_error(lmdb.CorruptedError, -30796), JournalDamagedError),
        (lmdb_error(lmdb.InvalidError, -30793), JournalDamagedError),
        (lmdb_error(lmdb.Error, errno.EROFS), OSError),
        (lmdb_error(lmdb.PanicError, -30795), OSError),
    ],
)
def test_lmdbs_errors_are_told_apart_by_what_can_be_done(
    root: Path, error: lmdb.Error, expected: type[Exception]
) -> None:
    with open_journal(root) as journal:
        reading = journal.log._environment.read()  # pyright: ignore

        with pytest.raises(expected), reading:
            raise error


def test_a_short_write_on_a_full_disk_is_told_as_a_full_disk(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_journal(root) as journal:
        monkeypatch.setattr(journal.files, "free_bytes", lambda: 0)

        with pytest.raises(OSError) as raised, journal.log._environment.read():  # pyright: ignore
            raise lmdb_error(lmdb.Error, errno.EIO)
        assert raised.value.errno == errno.ENOSPC
