"""The compactor: the snapshot and what follows it always give the state, and nothing is lost."""

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from journals import (
    Crash,
    Journal,
    StoppingFiles,
    evicted,
    key,
    make_journal,
    missed,
    open_journal,
    opened,
    story,
)

from walkback.journal import archive, backup, chain
from walkback.journal.archive import read_segment
from walkback.journal.backup import restore_backup, write_backup
from walkback.journal.compactor import MutableCompactor
from walkback.journal.errors import CommitUnknownError, JournalDamagedError
from walkback.journal.events import Compacted, Event, Record, SegmentDropped, SegmentSealed
from walkback.journal.files import Files, Transaction
from walkback.journal.state import State


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "cache"
    make_journal(root)
    return root


def compactor_of(journal: Journal, *, retain: int = 10, step: int = 1000) -> MutableCompactor:
    return MutableCompactor(journal.log, journal.files, retain_events=retain, step_events=step)


def compact(journal: Journal, *, retain: int = 10, step: int = 1000) -> list[Record]:
    it = compactor_of(journal, retain=retain, step=step)
    it.gather(journal.state)
    records = it.step(epoch=1, wall_ns=2000)
    for each in records:
        journal.state.apply(each)
    return records


def tell(journal: Journal, batches: Sequence[list[Event]]) -> None:
    for batch in batches:
        journal.append(*batch)


def replayed(records: Sequence[Record]) -> dict[bytes, bytes]:
    state = State()
    for each in records:
        state.apply(each)
    return dict(state.records())


def every_record(journal: Journal) -> list[Record]:
    """From the archive and the log, in order."""
    found: list[Record] = []
    for each in sorted(journal.state.segments):
        segment = journal.state.segments[each]
        found.extend(read_segment(journal.files, archive.segment_path(each), digest=segment.digest))
    return found + list(journal.log.read(journal.log.first_sequence))


# Snapshot, tail and replay.


@pytest.mark.parametrize("cut", [1, 2, 7, 30, 55])
@pytest.mark.parametrize("step", [3, 1000])
def test_snapshot_and_tail_are_the_full_replay_and_the_running_state(
    root: Path, cut: int, step: int
) -> None:
    batches = list(story(150))

    with open_journal(root) as journal:
        tell(journal, batches[:cut])
        compact(journal, step=step)
        tell(journal, batches[cut:])
        running = journal.records()

        assert dict(journal.log.load().records()) == running
        assert replayed(every_record(journal)) == running
    with open_journal(root) as journal:
        assert journal.records() == running


def test_compacting_after_each_batch_keeps_the_state(root: Path) -> None:
    with open_journal(root) as journal:
        it = compactor_of(journal, retain=5, step=7)
        for batch in story(120):
            journal.append(*batch)
            it.gather(journal.state)
            for each in it.step(epoch=1, wall_ns=1):
                journal.state.apply(each)

            assert dict(journal.log.load().records()) == journal.records()
        assert replayed(every_record(journal)) == journal.records()


def test_an_entry_that_is_gone_leaves_the_snapshot(root: Path) -> None:
    with open_journal(root) as journal:
        tell(journal, list(story(60)))
        compact(journal)
        journal.append(*evicted(1))
        ids = journal.records().keys()
        compact(journal)

        assert archive.FOLDER in journal.files.names()
        assert journal.log.watermark.record_count == len(ids)
        assert key(1) not in {each[1:] for each in ids}


def test_the_newest_events_stay(root: Path) -> None:
    with open_journal(root) as journal:
        tell(journal, list(story(100)))
        last = journal.log.sequence
        compact(journal, retain=30)

        assert journal.log.first_sequence == last - 30 + 1


def test_nothing_after_the_watermark_is_trimmed(root: Path) -> None:
    with open_journal(root) as journal:
        tell(journal, list(story(50)))
        it = compactor_of(journal, retain=0)
        it.gather(journal.state)
        watermark = journal.log.sequence
        journal.append(missed(1), missed(2))
        it.step(epoch=1, wall_ns=1)

        assert journal.log.first_sequence == watermark + 1
        assert journal.log.watermark.sequence == watermark


def test_a_step_trims_no_more_than_it_may(root: Path) -> None:
    with open_journal(root) as journal:
        tell(journal, list(story(100)))
        compact(journal, retain=10, step=25)
        assert journal.log.first_sequence == 26
        compact(journal, retain=10, step=25)

        assert journal.log.first_sequence == 51
        assert journal.files.names("archive") == [f"{1:016x}", f"{26:016x}"]


def test_with_nothing_to_do_nothing_is_written(root: Path) -> None:
    with open_journal(root) as journal:
        tell(journal, list(story(8)))
        assert compact(journal, retain=100) != []
        assert compact(journal, retain=100) == []


def test_the_events_of_a_step_follow_its_watermark(root: Path) -> None:
    with open_journal(root) as journal:
        tell(journal, list(story(60)))
        last = journal.log.sequence
        records = compact(journal)

        assert [each.sequence for each in records] == [last + 1, last + 2]
        sealed = records[1].event
        assert records[0].event == Compacted(
            watermark=last, record_count=journal.log.watermark.record_count
        )
        assert isinstance(sealed, SegmentSealed)
        assert (sealed.first, sealed.last) == (1, last - 10)
        assert sealed.allocated_bytes >= (root / "archive" / f"{1:016x}").stat().st_size


# Segments.


@pytest.mark.parametrize("byte", [3, 40, 300, -1])
def test_an_altered_segment_is_found(root: Path, byte: int) -> None:
    with open_journal(root) as journal:
        tell(journal, list(story(60)))
        compact(journal)
        path = root / archive.segment_path(1)
        content = bytearray(path.read_bytes())
        content[byte] ^= 1
        path.write_bytes(content)

        with pytest.raises(JournalDamagedError):
            every_record(journal)


def test_an_altered_event_in_a_segment_is_found_without_its_digest(root: Path) -> None:
    with open_journal(root) as journal:
        tell(journal, list(story(60)))
        compact(journal)
        path = root / archive.segment_path(1)
        content = bytearray(path.read_bytes())
        content[200] ^= 1
        path.write_bytes(content)

        with pytest.raises(JournalDamagedError):
            list(read_segment(journal.files, archive.segment_path(1)))


class FullFiles(Files):
    """No segment can be written."""

    def create(self, name: str) -> int:
        if name.startswith("archive/"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(name)


def test_a_segment_that_cannot_be_written_is_a_gap_and_the_trim_goes_on(root: Path) -> None:
    with open_journal(root, FullFiles(root)) as journal:
        tell(journal, list(story(60)))
        last = journal.log.sequence
        records = compact(journal)

        assert records[1].event == SegmentDropped(
            first=1, last=last - 10, reason="not written: No space left on device"
        )
        assert journal.log.first_sequence == last - 9
        assert dict(journal.log.load().records()) == journal.records()
        assert journal.files.names("archive") == []


def test_a_damaged_event_is_not_archived(root: Path) -> None:
    with open_journal(root) as journal:
        tell(journal, list(story(60)))
        environment = journal.log._environment  # pyright: ignore
        with environment._env.begin(write=True) as transaction:  # pyright: ignore
            transaction.put(chain.sequence_key(5), b"x" * 99, db=environment.events)

        with pytest.raises(JournalDamagedError):
            compact(journal)
        assert journal.log.first_sequence == 1


# Failures and crashes.


class FailingFiles(Files):
    fails = ""

    def commit(self, transaction: Transaction) -> None:
        if self.fails == "before":
            raise OSError(errno.EIO, "injected")
        super().commit(transaction)
        if self.fails == "after":
            raise OSError(errno.EIO, "injected")


def fail_then_compact_again(
    root: Path, fails: str
) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """What the next opening loads after a failed step and a good one, and the running state."""
    files = FailingFiles(root)
    with open_journal(root, files) as journal:
        tell(journal, list(story(60)))
        it = compactor_of(journal)
        it.gather(journal.state)
        files.fails = fails
        with pytest.raises(CommitUnknownError):
            it.step(epoch=1, wall_ns=1)
        files.fails = ""
        if journal.log.settle():
            for each in journal.log.proposed:
                journal.state.apply(each)
        journal.append(missed(1))
        it.gather(journal.state)
        for each in it.step(epoch=1, wall_ns=1):
            journal.state.apply(each)
        running = journal.records()
    with open_journal(root) as journal:
        return journal.records(), running


@pytest.mark.parametrize("fails", ["before", "after"])
def test_a_failed_step_loses_no_change(root: Path, fails: str) -> None:
    loaded, running = fail_then_compact_again(root, fails)

    assert loaded == running


def test_with_changes_dropped_on_failure_the_snapshot_would_lack_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = MutableCompactor.step

    def forgetful(self: MutableCompactor, *, epoch: int, wall_ns: int) -> list[Record]:
        try:
            return step(self, epoch=epoch, wall_ns=wall_ns)
        except CommitUnknownError:
            self._changed = {}  # pyright: ignore
            raise

    monkeypatch.setattr(MutableCompactor, "step", forgetful)
    loaded, running = fail_then_compact_again(root, "before")

    assert loaded != running


def compact_twice_and_back_up(journal: Journal) -> None:
    compact(journal, step=20)
    journal.append(*evicted(1))
    compact(journal, step=20)
    write_backup(journal.log, journal.files)


def fill_busily(root: Path) -> dict[bytes, bytes]:
    with open_journal(root) as journal:
        tell(journal, list(story(60)))
        return journal.records()


COMPACTING_STEPS = 28


def test_the_steps_of_compacting_are_all_counted(root: Path) -> None:
    fill_busily(root)
    files = StoppingFiles(root)

    with open_journal(root, files) as journal:
        compact_twice_and_back_up(journal)

    assert len(files.steps) == COMPACTING_STEPS


@pytest.mark.parametrize("stop_at", range(COMPACTING_STEPS))
def test_a_crash_at_any_step_of_compacting_loses_nothing(root: Path, stop_at: int) -> None:
    before = fill_busily(root)
    running: dict[bytes, bytes] = {}

    with pytest.raises(Crash), open_journal(root, StoppingFiles(root, stop_at)) as journal:
        try:
            compact_twice_and_back_up(journal)
        finally:
            running = journal.records()

    with open_journal(root) as journal:
        # The eviction may have been committed without being acknowledged.
        without = {name: value for name, value in before.items() if name != b"b" + key(1)}
        assert blocks(journal.records()) in (blocks(running), blocks(without))
        assert journal.head.value is not None
        assert not journal.log.is_behind(journal.head.value)
        journal.append(missed(1))
        compact(journal, step=20)
        write_backup(journal.log, journal.files)
        assert replayed(every_record(journal)) == journal.records()
        leftovers = [*journal.files.names("archive"), *journal.files.names("backup")]
        assert not [each for each in leftovers if each.endswith(".new")]


def blocks(records: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {name: value for name, value in records.items() if name.startswith(b"b")}


# Backups.


def test_a_backup_restores_the_journal_as_it_was(root: Path) -> None:
    with open_journal(root) as journal:
        tell(journal, list(story(80)))
        compact(journal)
        name = write_backup(journal.log, journal.files)
        then, head = journal.records(), journal.head.value
        journal.append(missed(1))
    (root / "journal/data.mdb").write_bytes(b"ruined")
    files = Files(root)

    assert restore_backup(files) == name

    with open_journal(root) as journal:
        assert journal.records() == then
        assert head is not None and not journal.log.is_behind(head)
        assert journal.head.value is not None and journal.log.is_behind(journal.head.value)
    assert (root / "journal.bad/data.mdb").read_bytes() == b"ruined"


def test_the_two_newest_backups_are_kept(root: Path) -> None:
    with open_journal(root) as journal:
        names: list[str] = []
        for number in range(4):
            journal.append(missed(number))
            names.append(write_backup(journal.log, journal.files))

        assert [f"backup/{each}" for each in journal.files.names("backup")] == names[-2:]


def test_a_ruined_backup_is_passed_over(root: Path) -> None:
    with open_journal(root) as journal:
        journal.append(opened())
        older = write_backup(journal.log, journal.files)
        journal.append(missed(1))
        newer = write_backup(journal.log, journal.files)
    (root / newer).write_bytes((root / newer).read_bytes()[:9000])

    assert restore_backup(Files(root)) == older


def test_without_a_good_backup_the_journal_stays_where_it_is(root: Path) -> None:
    with open_journal(root) as journal:
        journal.append(opened())
        (root / write_backup(journal.log, journal.files)).write_bytes(b"ruined")

    assert restore_backup(Files(root)) is None
    with open_journal(root) as journal:
        assert journal.log.sequence == 1


@pytest.mark.parametrize("stop_at", range(12))
def test_a_crash_while_a_backup_is_restored_is_mended_by_restoring_again(
    root: Path, stop_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trust(_root: Path, _folder: str) -> None: ...

    monkeypatch.setattr(backup, "verify_in_child", trust)
    with open_journal(root) as journal:
        journal.append(opened())
        name = write_backup(journal.log, journal.files)
    (root / "journal/data.mdb").write_bytes(b"ruined")
    (root / "journal.bad").mkdir()
    (root / "journal.bad/data.mdb").write_bytes(b"older")

    with pytest.raises(Crash):
        restore_backup(StoppingFiles(root, stop_at))
        raise Crash("past the last step")

    assert restore_backup(Files(root)) == name
    with open_journal(root) as journal:
        assert journal.log.sequence == 1


def test_a_backup_that_cannot_be_written_leaves_the_older_ones(root: Path) -> None:
    class FullBackups(Files):
        full = False

        def sync(self, descriptor: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().sync(descriptor)

    files = FullBackups(root)
    with open_journal(root, files) as journal:
        journal.append(opened())
        name = write_backup(journal.log, files)
        journal.append(missed(1))
        files.full = True

        with pytest.raises(OSError):
            write_backup(journal.log, files)
        assert [f"backup/{each}" for each in files.names("backup")] == [name]
