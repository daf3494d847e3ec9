"""The store: what it promises to whoever stores, looks up, evicts, and to the one who restarts."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import store_checks as checks
from cache_maker import (
    BLOCK_BYTES,
    CHARGE_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    SETTINGS,
    WAIT_SECONDS,
    CacheMaker,
    Failing,
    Gate,
    HookedFiles,
    SkippedTime,
    boundary,
    claimed,
    core_of,
    expected_bytes,
    file_of,
    files_of,
    flip_byte,
    is_readable,
    key_of,
    live,
    locate,
    made_caches,
    named_paths,
    outcome,
    payload_paths,
    put,
    read,
    records_of,
    settle,
    store_chain,
    store_one,
    tensors_for,
    touch,
    wait_until,
)
from mutants_store import MUTANTS, Mutant

from walkback.journal import log as journal_log
from walkback.journal.errors import (
    CacheClosedError,
    CacheLockedError,
    FormatError,
    PayloadDamagedError,
    RootRefusedError,
    SettingsError,
    WalkbackError,
)
from walkback.journal.events import Event
from walkback.journal.words import Cause, Kind, NotStoredReason
from walkback.store import root as store_root
from walkback.store.boundary import Claim, NotStored
from walkback.store.core import Mode
from walkback.store.settings import MIB, StoreSettings
from walkback.store.store import MutableStore

PAIR_BYTES = 2 * CHARGE_BYTES
SMALL = replace(SETTINGS, budget_bytes=2 * MIB)


@pytest.fixture
def caches(tmp_path: Path) -> Generator[CacheMaker]:
    with made_caches(tmp_path) as maker:
        yield maker


def refused(store: MutableStore, chain: str, index: int = 0) -> NotStored:
    """Why a boundary is not stored."""
    claim = store.claim(boundary(chain, index), request=1, producer="a test")
    if isinstance(claim, NotStored):
        return claim
    store.reserve(claim)
    store.put(claim, tensors_for(claim), prefill_seconds=0.0)
    refusal = outcome(claim)
    assert refusal is not None
    return refusal


# What a boundary becomes.


def test_split_the_block_and_the_state_are_payloads_of_their_own(caches: CacheMaker) -> None:
    store = caches.open()
    wanted = boundary("a", 0)

    store_one(store, wanted)

    for kind in Kind:
        assert read(store, kind, key_of("a", 0)) == expected_bytes(wanted, kind)
    assert {path.split("/")[0] for path in payload_paths(caches.root)} == {"blocks", "sidecars"}


def test_write_nothing_shows_under_its_final_name_before_it_is_complete(
    caches: CacheMaker,
) -> None:
    store = caches.open()
    files = files_of(store)
    files.log.clear()

    store_one(store, boundary("a", 0))

    steps = [step for step, _ in files.log]
    renames = [index for index, step in enumerate(steps) if step == "rename"]
    syncs = [index for index, step in enumerate(steps) if step == "sync"]
    folders = [name for step, name in files.log[renames[-1] :] if step == "sync directory"]
    assert len(renames) == len(syncs) == 2
    assert max(syncs) < min(renames) < max(renames) < steps.index("commit")
    assert folders == ["staging", "blocks/00000001", "sidecars/00000001"]


def test_a_failed_replacement_leaves_the_existing_checkpoint_usable(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    for kind in Kind:
        located = locate(store, kind, key_of("a", 0))
        assert located is not None
        store.damage.suspect(located)
    files_of(store).hook = Failing("write", errno.ENOSPC, path="staging")

    refusal = refused(store, "a")

    assert refusal.reason is NotStoredReason.DISK_FULL
    assert is_readable(store, "a", 0)
    assert core_of(store).state.blocks[key_of("a", 0)].generation == 1


def test_a_replacement_takes_the_place_of_the_older_generation(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    older = file_of(store, Kind.BLOCK, key_of("a", 0))
    located = locate(store, Kind.BLOCK, key_of("a", 0))
    assert located is not None

    store.damage.suspect(located)
    claim = put(store, boundary("a", 0))
    settle(store)

    assert [writing.cause for writing in claim.writings] == [Cause.REPLACEMENT]
    assert core_of(store).state.blocks[key_of("a", 0)].generation == 2
    assert older.path not in payload_paths(caches.root)
    assert is_readable(store, "a", 0)


def test_startup_lists_no_payload_folder_and_opens_no_payload(caches: CacheMaker) -> None:
    store = caches.open()
    store_chain(store, "a", 3)

    store = caches.reopen(store)

    folders = ("blocks", "sidecars", "staging", "quarantine")
    looked = {name for step, name in files_of(store).log if step in ("list", "open", "status")}
    assert [name for name in looked if name.startswith(folders) and name not in folders] == []
    assert not {name for step, name in files_of(store).log if step == "list"} & {*folders}
    assert live(store, Kind.SIDECAR, "a") == [0, 1, 2]


def test_startup_keeps_commit_order_recency_and_bytes(caches: CacheMaker) -> None:
    store = caches.open()
    for chain in "abc":
        store_one(store, boundary(chain, 0))
    touch(store, "a", 0)
    before = records_of(core_of(store).state)
    used_bytes = core_of(store).state.used_bytes

    store = caches.reopen(store)

    state = core_of(store).state
    after = records_of(state)
    assert {key for key in before if before[key] != after[key]} <= {b"w", b"e"}
    assert state.used_bytes == used_bytes
    order = [key_of(chain, 0) for chain in "bca"]
    assert [leaf.key for leaf in state.coldest_leaves()] == order


def test_restore_choosing_an_endpoint_opens_no_file(caches: CacheMaker) -> None:
    store = caches.open()
    store_chain(store, "a", 2)
    files_of(store).log.clear()

    located = locate(store, Kind.SIDECAR, key_of("a", 1))

    assert located is not None and located.file is not None
    assert files_of(store).log == []


def test_last_boundary_of_several_blocks_is_committed_with_its_one_sidecar(
    caches: CacheMaker,
) -> None:
    store = caches.open()

    store_one(store, boundary("a", 3, block_count=4))

    assert live(store, Kind.BLOCK, "a") == [0, 1, 2, 3]
    assert live(store, Kind.SIDECAR, "a") == [3]


def test_repair_a_live_block_whose_sidecar_is_gone_gets_a_new_one(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    located = locate(store, Kind.SIDECAR, key_of("a", 0))
    assert located is not None and located.file is not None
    (caches.root / located.file.path).unlink()
    store.damage.lose(located, "it was not there")

    claim = put(store, boundary("a", 0))

    assert outcome(claim) is None
    assert [(each.part.kind, each.cause) for each in claim.writings] == [
        (Kind.SIDECAR, Cause.REPAIR)
    ]
    assert is_readable(store, "a", 0)


def test_coalescing_the_same_boundary_twice_is_stored_once(caches: CacheMaker) -> None:
    store = caches.open()
    gate = Gate("create", "staging")
    files_of(store).hook = gate
    first = put(store, boundary("a", 0))
    gate.await_thread()

    second = put(store, boundary("a", 0))
    gate.open()
    assert outcome(first) is None
    third = put(store, boundary("a", 0))

    assert (second.is_empty, third.is_empty) == (True, True)
    assert second.settled.is_set() and third.settled.is_set()
    assert store.statistics().boundaries_stored == 1
    assert store.statistics().payload_bytes_written == 2 * (16_384 + BLOCK_BYTES)


def test_a_block_without_bytes_is_a_record_and_no_file(caches: CacheMaker) -> None:
    store = caches.open()

    store_one(store, boundary("a", 0, nbytes=0))
    store_one(store, boundary("a", 1, nbytes=0))
    store = caches.reopen(store)

    assert live(store, Kind.BLOCK, "a") == live(store, Kind.SIDECAR, "a") == [0, 1]
    assert {path.split("/")[0] for path in payload_paths(caches.root)} == {"sidecars"}


# Parents.


def test_a_child_waits_for_a_parent_that_another_claim_is_storing(caches: CacheMaker) -> None:
    checks.children_wait_for_their_parent(caches.open())


def test_what_waits_for_a_parent_takes_no_memory_that_the_parent_needs(
    caches: CacheMaker,
) -> None:
    # Four threads with one prefix stood still for ever: the children of a claim held the memory
    # that it was to be captured into.
    checks.children_wait_for_their_parent(
        caches.open(replace(SETTINGS, staging_bytes=2 * BLOCK_BYTES))
    )


def test_a_child_whose_parent_is_refused_is_refused_too(caches: CacheMaker) -> None:
    store = caches.open()
    parent = claimed(store, boundary("a", 0))
    child = put(store, boundary("a", 1))
    wait_until(lambda: bool(core_of(store).awaiting_parent), "the child waits")

    store.cancel(parent, NotStored(NotStoredReason.ABORTED, "the client left"))

    refusal = outcome(child)
    assert refusal is not None and refusal.reason is NotStoredReason.PARENT
    settle(store)
    assert payload_paths(caches.root) == set()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_claims_that_need_blocks_of_each_other_are_stored_together(
    order: tuple[int, int], caches: CacheMaker
) -> None:
    """Each waited for the other until the close, and all that came behind them waited too.

    Of one prefix the first claim has block 2, whose parent went while it was captured; the second,
    of another request, has all but that.
    """
    store = caches.open()
    claims = [
        claimed(store, boundary("a", 2)),
        claimed(store, boundary("a", 3, block_count=4)),
    ]
    assert [len(claim.writings) for claim in claims] == [2, 4]

    for each in order:
        store.reserve(claims[each])
        store.put(claims[each], tensors_for(claims[each]), prefill_seconds=0.5)
        if each == order[0]:
            wait_until(lambda: bool(core_of(store).awaiting_parent), "the first waits")

    assert [outcome(claim) for claim in claims] == [None, None]
    assert live(store, Kind.BLOCK, "a", 10) == [0, 1, 2, 3]
    assert live(store, Kind.SIDECAR, "a", 10) == [2, 3]
    assert not core_of(store).awaiting_parent


def test_closing_refuses_a_child_whose_parent_was_never_put(caches: CacheMaker) -> None:
    store = caches.open()
    parent = claimed(store, boundary("a", 0))
    child = put(store, boundary("a", 1))
    wait_until(lambda: bool(core_of(store).awaiting_parent), "the child waits")

    store.close()
    store.put(parent, tensors_for(parent), prefill_seconds=0.0)

    refusal = outcome(child)
    assert refusal is not None and refusal.reason is NotStoredReason.PARENT
    late = outcome(parent)
    assert late is not None and late.reason is NotStoredReason.CLOSED
    assert payload_paths(caches.root) == set()


def test_a_child_without_its_parent_is_refused_and_leaves_no_file(caches: CacheMaker) -> None:
    store = caches.open()

    refusal = refused(store, "a", 1)

    assert refusal.reason is NotStoredReason.PARENT
    assert payload_paths(caches.root) == set()


# Staging: bounded memory.


def test_staging_holds_back_a_capture_until_there_is_memory(caches: CacheMaker) -> None:
    store = caches.open(replace(SETTINGS, staging_bytes=3 * BLOCK_BYTES))
    gate = Gate("create", "staging")
    files_of(store).hook = gate
    put(store, boundary("a", 0))
    gate.await_thread()

    with ThreadPoolExecutor() as pool:
        second = pool.submit(put, store, boundary("a", 1))
        wait_until(lambda: (Kind.BLOCK, key_of("a", 1)) in core_of(store).overlay.in_flight, "")
        is_waiting = not second.done()
        gate.open()
        assert outcome(second.result(WAIT_SECONDS)) is None

    statistics = store.statistics()
    assert is_waiting
    assert statistics.backpressure_seconds > 0
    assert statistics.staging_bytes_high_water == 2 * BLOCK_BYTES


def test_staging_that_is_full_is_written_inline_by_the_caller(caches: CacheMaker) -> None:
    store = caches.open(replace(SETTINGS, staging_bytes=5 * BLOCK_BYTES))
    gate = Gate("create", "staging/00000001-00000001")
    files_of(store).hook = gate
    first = put(store, boundary("a", 0))
    gate.await_thread()
    second = put(store, boundary("b", 0))

    third = put(store, boundary("c", 0))

    assert second.settled.is_set() and not first.settled.is_set()
    gate.open()
    assert [outcome(claim) for claim in (first, second, third)] == [None, None, None]
    assert store.statistics().inline_writes == 1
    assert store.statistics().staging_bytes_high_water <= 5 * BLOCK_BYTES


def test_staging_lets_a_boundary_larger_than_the_bound_pass_alone(caches: CacheMaker) -> None:
    store = caches.open(replace(SETTINGS, staging_bytes=1))

    store_chain(store, "a", 3)

    assert store.statistics().staging_bytes_high_water == 2 * BLOCK_BYTES


def test_reservations_are_released_once_and_only_when_readers_are_gone(
    caches: CacheMaker,
) -> None:
    checks.reservation_is_kept_for_readers(caches.open())


@pytest.mark.parametrize("how", ["cancel", "refuse"])
def test_reservations_of_what_is_not_stored_are_released(caches: CacheMaker, how: str) -> None:
    store = caches.open()
    if how == "cancel":
        claim = claimed(store, boundary("a", 0))
        store.reserve(claim)
        store.cancel(claim, NotStored(NotStoredReason.ABORTED, ""))
        store.cancel(claim, NotStored(NotStoredReason.ABORTED, ""))
    else:
        refused(store, "a", 1)

    core = core_of(store)
    assert (core.staging_bytes, core.overlay.reserved_bytes) == (0, 0)
    assert not core.overlay.in_flight and not core.overlay.held


def test_what_is_being_stored_is_readable_from_its_buffer(caches: CacheMaker) -> None:
    store = caches.open()
    gate = Gate("create", "staging")
    files_of(store).hook = gate

    claim = put(store, boundary("a", 0))
    gate.await_thread()

    assert is_readable(store, "a", 0)
    located = locate(store, Kind.BLOCK, key_of("a", 0))
    assert located is not None and located.file is None
    gate.open()
    assert outcome(claim) is None


def test_what_is_claimed_but_not_handed_over_is_not_readable(caches: CacheMaker) -> None:
    store = caches.open()

    claim = claimed(store, boundary("a", 0))

    assert locate(store, Kind.BLOCK, key_of("a", 0)) is None
    store.cancel(claim, NotStored(NotStoredReason.ABORTED, ""))


def test_promotion_goes_on_when_the_request_that_captured_it_is_aborted(
    caches: CacheMaker,
) -> None:
    store = caches.open()
    gate = Gate("rename", "staging")
    files_of(store).hook = gate
    claim = put(store, boundary("a", 0))
    gate.await_thread()

    store.cancel(claim, NotStored(NotStoredReason.ABORTED, "the client left"))
    gate.open()

    assert outcome(claim) is None
    assert is_readable(store, "a", 0)


def test_hands_of_the_wrong_number_are_an_error_and_the_claim_can_be_cancelled(
    caches: CacheMaker,
) -> None:
    store = caches.open()
    claim = claimed(store, boundary("a", 0))

    with pytest.raises(ValueError, match="shorter"):
        store.put(claim, tensors_for(claim)[:1], prefill_seconds=0.0)
    store.cancel(claim, NotStored(NotStoredReason.FAILED, ""))

    assert not core_of(store).overlay.in_flight


def test_buffers_that_do_not_fit_their_description_are_a_refusal(caches: CacheMaker) -> None:
    store = caches.open()
    claim = claimed(store, boundary("a", 0))
    store.reserve(claim)

    store.put(claim, list(reversed(tensors_for(claim))), prefill_seconds=0.0)

    refusal = outcome(claim)
    assert refusal is not None and refusal.reason is NotStoredReason.FAILED
    assert store.mode is Mode.WRITING
    assert payload_paths(caches.root) == set()


# Failures of the disk.


@pytest.mark.parametrize("step", ["create", "write", "sync"])
def test_one_failed_write_is_written_anew_under_another_name(caches: CacheMaker, step: str) -> None:
    store = caches.open()
    files_of(store).hook = Failing(step, errno.EIO, path="staging", times=1)

    store_one(store, boundary("a", 0))

    settle(store)
    assert payload_paths(caches.root) == named_paths(core_of(store).state)
    assert "blocks/00000001/00000001" not in payload_paths(caches.root)
    assert store.statistics().events["Abandoned"] == 1


def test_two_failed_writes_in_a_row_stop_writing_and_restores_go_on(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    files_of(store).hook = Failing("sync", errno.EIO, path="staging", times=2)

    refusal = refused(store, "b")

    files_of(store).hook = None
    assert refusal.reason is NotStoredReason.WRITE_FAILED
    assert store.mode is Mode.READING
    assert refused(store, "c").reason is NotStoredReason.WRITING_STOPPED
    assert is_readable(store, "a", 0)
    store = caches.reopen(store)
    store_one(store, boundary("b", 0))
    assert is_readable(store, "a", 0) and is_readable(store, "b", 0)


def test_one_failure_between_two_successes_does_not_stop_writing(caches: CacheMaker) -> None:
    store = caches.open()
    for index in range(3):
        files_of(store).hook = Failing("sync", errno.EIO, path="staging", times=1)
        store_one(store, boundary("a", index))

    assert store.mode is Mode.WRITING


@pytest.mark.parametrize("step", ["write", "sync", "rename", "commit"])
def test_a_full_disk_is_a_refusal_and_the_next_boundary_is_stored(
    caches: CacheMaker, step: str
) -> None:
    store = caches.open()
    path = "" if step == "commit" else "staging"
    files_of(store).hook = Failing(step, errno.ENOSPC, path=path)

    refusal = refused(store, "a")

    files_of(store).hook = None
    assert refusal.reason is NotStoredReason.DISK_FULL
    assert payload_paths(caches.root) == set()
    store_one(store, boundary("a", 0))
    assert store.mode is Mode.WRITING


def test_a_commit_that_stands_although_it_failed_is_a_stored_boundary(caches: CacheMaker) -> None:
    store = caches.open()
    files_of(store).after_commit = Failing("commit", errno.EIO, times=1)

    store_one(store, boundary("a", 0))

    assert store.mode is Mode.WRITING
    assert is_readable(store, "a", 0)


def test_a_folder_that_does_not_sync_stops_writing(caches: CacheMaker) -> None:
    store = caches.open()
    files_of(store).hook = Failing("sync directory", errno.EIO, path="blocks")

    refusal = refused(store, "a")

    files_of(store).hook = None
    assert refusal.reason is NotStoredReason.WRITE_FAILED
    assert store.mode is Mode.READING
    store = caches.reopen(store)
    assert payload_paths(caches.root) == set()
    assert live(store, Kind.BLOCK, "a") == []


def test_what_requests_told_survives_a_commit_that_failed(caches: CacheMaker) -> None:
    store = caches.open()
    store.refuse(NotStored(NotStoredReason.POSITION, ""), request=1, key=bytes(32), position=7)
    files_of(store).hook = Failing("commit", errno.ENOSPC, times=1)
    store.flush()

    store.flush()

    assert store.statistics().events["NotStored"] == 1


def test_a_journal_thread_that_dies_leaves_nobody_waiting(caches: CacheMaker) -> None:
    store = caches.open()

    def build() -> list[Event]:
        raise RuntimeError("a bug")

    with pytest.raises(WalkbackError, match="a bug"):
        store._committer.change(build)  # pyright: ignore[reportPrivateUsage]

    assert store.mode is Mode.READING
    assert refused(store, "a").reason is NotStoredReason.WRITING_STOPPED
    store.flush()


def test_a_claim_in_the_hands_of_a_dying_journal_thread_is_settled(
    caches: CacheMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = caches.open()

    def burst(*_: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr("walkback.store.ordering._admit", burst)
        refusal = refused(store, "a")

    assert refusal.reason is NotStoredReason.WRITING_STOPPED
    assert core_of(store).staging_bytes == 0
    caches.reopen(store)
    assert payload_paths(caches.root) == set()


# The directory goes away.


@pytest.mark.parametrize("how", ["deleted", "replaced", "moved"])
def test_a_directory_that_is_gone_while_open_is_offline_and_recovers_nothing(
    caches: CacheMaker, how: str
) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    if how == "deleted":
        shutil.rmtree(caches.root)
    else:
        caches.root.rename(caches.root.with_name("elsewhere"))
    if how == "replaced":
        caches.root.mkdir()

    refusal = refused(store, "b")

    assert refusal.reason is NotStoredReason.OFFLINE
    assert store.mode is Mode.OFFLINE
    assert refused(store, "c").reason is NotStoredReason.OFFLINE
    store.close()
    assert not caches.root.exists() or list(caches.root.iterdir()) == []


def test_after_the_close_stores_are_refused_and_lookups_raise(caches: CacheMaker) -> None:
    store = caches.open()
    store.close()
    store.close()

    assert refused(store, "a").reason is NotStoredReason.CLOSED
    with pytest.raises(CacheClosedError):
        locate(store, Kind.BLOCK, key_of("a", 0))
    with pytest.raises(CacheClosedError):
        store.operator.purge(NAMESPACE)


# Opening.


OPEN = """
    import sys
    from pathlib import Path
    from walkback.journal.errors import CacheLockedError
    from walkback.store.store import MutableStore
    try:
        MutableStore.open(Path(sys.argv[1])).close()
    except CacheLockedError as error:
        print(error.pid)
"""


def opened_elsewhere(root: Path) -> str:
    """What another process prints that opens the cache: the holder's pid, or nothing."""
    source = Path(__file__).parents[1] / "src"
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OPEN), str(root)],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_a_second_opener_gets_the_holders_pid(caches: CacheMaker) -> None:
    store = caches.open()

    while_open = opened_elsewhere(caches.root)
    with pytest.raises(CacheLockedError) as in_this_process:
        caches.open()
    store.close()

    assert while_open == str(os.getpid())
    assert in_this_process.value.pid == os.getpid()
    assert opened_elsewhere(caches.root) == ""
    caches.open()


def test_a_forked_child_neither_holds_nor_releases_the_lock_and_misses(
    caches: CacheMaker,
) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            claim = store.claim(boundary("b", 0), request=1, producer="")
            is_refused = isinstance(claim, NotStored)
            is_closed = store.mode is Mode.CLOSED
            store.flush()
            store.close()
            os._exit(0 if is_refused and is_closed else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert opened_elsewhere(caches.root) == str(os.getpid())
    store_one(store, boundary("b", 0))


def test_a_child_that_outlives_the_close_does_not_keep_the_lock(caches: CacheMaker) -> None:
    store = caches.open()
    reader, writer = os.pipe()
    is_there, says_so = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(writer)
        # The store has let go in here by now: a fork returns when its hooks have run.
        os.write(says_so, b"!")
        os.read(reader, 1)
        os._exit(0)
    os.read(is_there, 1)

    store.close()
    second = caches.open()

    assert second.mode is Mode.WRITING
    for descriptor in (writer, reader, is_there, says_so):
        os.close(descriptor)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, code: int) -> None:
    class ReadOnlyFiles(HookedFiles):
        def create(self, name: str) -> int:
            raise OSError(code, os.strerror(code), name)

    with pytest.raises(RootRefusedError, match="cannot be written"):
        MutableStore.open(tmp_path / "cache", SETTINGS, make_files=ReadOnlyFiles)


def test_a_journal_of_a_newer_format_is_refused(
    caches: CacheMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(journal_log, "FORMAT", 2)
        with pytest.raises(FormatError):
            MutableStore.open(caches.root, SETTINGS)

    with pytest.raises(FormatError, match="newer walkback"):
        MutableStore.open(caches.root, SETTINGS)


def test_a_cache_of_a_newer_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(store_root, "FORMAT", 2)
        MutableStore.open(tmp_path / "cache", SETTINGS).close()

    with pytest.raises(FormatError, match="Upgrade"):
        MutableStore.open(tmp_path / "cache", SETTINGS)


def test_a_missing_parent_directory_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(RootRefusedError, match="not mounted"):
        MutableStore.open(tmp_path / "volume" / "cache", SETTINGS)

    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_other_things_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")

    with pytest.raises(RootRefusedError, match=r"thesis\.txt"):
        MutableStore.open(tmp_path, SETTINGS)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")

    with pytest.raises(RootRefusedError, match="is a file"):
        MutableStore.open(tmp_path / "cache", SETTINGS)


def test_a_journal_without_its_store_is_refused_and_no_secret_is_made(
    caches: CacheMaker,
) -> None:
    caches.open().close()
    (caches.root / "STORE").unlink()

    with pytest.raises(RootRefusedError, match="no STORE"):
        MutableStore.open(caches.root, SETTINGS)

    assert not (caches.root / "STORE").exists()


def test_the_secret_and_all_folders_are_for_the_owner_only(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))

    modes = {path.stat().st_mode & 0o777 for path in caches.root.rglob("*") if path.is_file()}
    folders = {path.stat().st_mode & 0o777 for path in caches.root.rglob("*") if path.is_dir()}

    assert (modes, folders) == ({0o600}, {0o700})


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget_bytes": MIB - 1},
        {"free_floor_bytes": -1},
        {"staging_bytes": -1},
        {"request_events_max": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SettingsError):
        StoreSettings(**wrong)  # type: ignore[arg-type]


def test_the_budget_of_the_first_opening_is_recorded(caches: CacheMaker) -> None:
    store = caches.open(replace(SETTINGS, budget_bytes=5 * MIB))

    store = caches.reopen(store, replace(SETTINGS, budget_bytes=None))

    assert store.statistics().budget_bytes == 5 * MIB


# Crashes between two commits.


def test_a_sweep_removes_what_a_crash_left_and_keeps_what_is_named(caches: CacheMaker) -> None:
    store = caches.open()
    store_chain(store, "a", 2)
    gate = Gate("commit")
    files_of(store).hook = gate
    claim = put(store, boundary("b", 0))
    gate.await_thread()
    shutil.copyfile(
        caches.root / file_of(store, Kind.BLOCK, key_of("a", 0)).path,
        caches.root / "staging" / "00000001-000000ff",
    )

    after = caches.after_a_crash(store)
    gate.open()

    assert outcome(claim) is None
    root = after.files.root
    assert payload_paths(root) == named_paths(core_of(after).state)
    assert live(after, Kind.SIDECAR, "a") == [0, 1]
    assert live(after, Kind.SIDECAR, "b") == []
    assert not core_of(after).state.staged
    (root / "staging" / "00000001-000000ff").unlink(missing_ok=True)
    (caches.root / "staging" / "00000001-000000ff").unlink()


def test_a_file_that_cannot_be_swept_leaves_its_epoch_for_the_next_opening(
    caches: CacheMaker,
) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    path = "staging/00000001-000000ff"
    (caches.root / path).write_bytes(b"half a payload")
    root = caches.root.with_name("crashed")
    shutil.copytree(caches.root, root)
    (caches.root / path).unlink()

    class StubbornFiles(HookedFiles):
        def unlink(self, name: str) -> None:
            if name == path:
                raise OSError(errno.EPERM, "injected", name)
            super().unlink(name)

    second = caches.open(root=root, make_files=StubbornFiles)
    is_unswept = 1 in core_of(second).state.unswept
    second.close()
    third = caches.open(root=root)

    assert is_unswept
    assert 1 not in core_of(third).state.unswept
    assert payload_paths(root) == named_paths(core_of(third).state)


def test_a_staging_file_that_cannot_be_removed_is_swept_by_the_next_opening(
    caches: CacheMaker,
) -> None:
    store = caches.open()

    def hook(step: str, name: str) -> None:
        if name.startswith("staging") and step in ("write", "unlink"):
            raise OSError(errno.ENOSPC if step == "write" else errno.EPERM, "injected", name)

    files_of(store).hook = hook
    refused(store, "a")
    is_there = payload_paths(caches.root)
    store.close()
    store = caches.open()

    assert len(is_there) == 1
    assert payload_paths(caches.root) == set()


def test_the_folders_of_removed_files_are_synced_before_the_epoch_is_closed(
    caches: CacheMaker,
) -> None:
    store = caches.open()
    files_of(store).hook = Failing("commit", errno.ENOSPC, times=1)
    refused(store, "a")
    files_of(store).hook = None
    files_of(store).log.clear()

    store.close()

    steps = files_of(store).log
    last_commit = max(index for index, (step, _) in enumerate(steps) if step == "commit")
    synced = {name for step, name in steps[:last_commit] if step == "sync directory"}
    assert {"blocks/00000001", "sidecars/00000001"} <= synced


# Budget, floor and eviction.


def test_budget_blocks_and_sidecars_share_one_budget_and_one_order(caches: CacheMaker) -> None:
    store = caches.open(SMALL)

    for index in range(15):
        store_one(store, boundary(f"chain {index}", 0))
        store.flush()
    settle(store)

    kept = [index for index in range(15) if is_readable(store, f"chain {index}", 0)]
    statistics = store.statistics()
    assert kept == list(range(15 - len(kept), 15))
    assert 5 < len(kept) < 13
    assert statistics.charged_bytes <= 2 * MIB
    assert statistics.holdings.block_count == statistics.holdings.sidecar_count == len(kept)


def test_budget_stores_do_not_wait_in_turn_for_evictions_that_a_full_disk_cannot_record(
    caches: CacheMaker,
) -> None:
    store = caches.open(replace(SMALL, room_wait_seconds=10.0))
    for index in range(15):
        store_one(store, boundary(f"chain {index}", 0))
    settle(store)
    files_of(store).hook = Failing("commit", errno.ENOSPC)
    started = time.monotonic()

    late = [boundary(f"late {index}", 0, nbytes=6 * BLOCK_BYTES) for index in range(3)]
    refusals = [outcome(put(store, each)) for each in late]

    # As long as the first may wait: each of them would, one after the other.
    assert time.monotonic() - started < 10.0
    assert all(refusal is not None for refusal in refusals)
    files_of(store).hook = None
    store.flush()
    settle(store)
    store_one(store, boundary("after", 0))


def test_budget_a_touched_entry_outlives_newer_ones_also_after_a_restart(
    caches: CacheMaker,
) -> None:
    store = caches.open(SMALL)
    for index in range(6):
        store_one(store, boundary(f"chain {index}", 0))
    touch(store, "chain 0", 0)

    store = caches.reopen(store, SMALL)
    for index in range(6, 15):
        store_one(store, boundary(f"chain {index}", 0))
    settle(store)

    first_gone = [index for index in range(1, 6) if not is_readable(store, f"chain {index}", 0)]
    assert first_gone[:3] == [1, 2, 3]
    state = core_of(store).state
    assert key_of("chain 0", 0) in state.blocks or len(first_gone) == 5


def test_a_boundary_larger_than_the_budget_is_refused_and_evicts_nothing(
    caches: CacheMaker,
) -> None:
    store = caches.open(SMALL)
    store_chain(store, "a", 3)
    claim = put(store, boundary("b", 0, nbytes=2 * MIB))

    refusal = outcome(claim)

    assert refusal is not None and refusal.reason is NotStoredReason.BUDGET
    settle(store)
    assert live(store, Kind.SIDECAR, "a") == [0, 1, 2]


def test_a_budget_full_of_pinned_entries_refuses_and_does_not_spin(caches: CacheMaker) -> None:
    store = caches.open(SMALL)
    count = 0
    while store.statistics().charged_bytes + 2 * PAIR_BYTES < 2 * MIB:
        store_one(store, boundary("a", count))
        store.operator.pin(key_of("a", count))
        count += 1
    store.operator.set_budget(MIB)
    settle(store)
    before = core_of(store).overlay.is_urgent

    refusal = refused(store, "b")

    assert not before
    assert refusal.reason is NotStoredReason.BUDGET
    assert live(store, Kind.BLOCK, "a") == list(range(count))


def test_a_prefix_larger_than_the_budget_keeps_its_beginning_and_its_newest_checkpoint(
    caches: CacheMaker,
) -> None:
    store = caches.open(SMALL)
    count = 0

    while (refusal := outcome(put(store, boundary("a", count)))) is None:
        count += 1
    settle(store)

    assert refusal.reason is NotStoredReason.BUDGET
    assert count > 15
    assert live(store, Kind.BLOCK, "a") == list(range(count))
    assert live(store, Kind.SIDECAR, "a")[-1] == count - 1
    assert store.statistics().events["Evicted"] > 5


def test_a_floor_that_nothing_can_be_evicted_for_is_a_refusal(caches: CacheMaker) -> None:
    store = caches.open(replace(SETTINGS, free_floor_bytes=MIB))
    files_of(store).free = lambda: MIB

    assert refused(store, "a").reason is NotStoredReason.FLOOR


def test_a_floor_evicts_as_long_as_free_space_follows(caches: CacheMaker) -> None:
    store = caches.open(replace(SETTINGS, free_floor_bytes=MIB))
    files = files_of(store)
    capacity = MIB + 4 * PAIR_BYTES
    files.free = lambda: (
        capacity
        - sum(
            path.stat().st_blocks * 512
            for folder in ("blocks", "sidecars", "staging")
            for path in (caches.root / folder).rglob("*")
            if path.is_file()
        )
    )

    for index in range(8):
        store_one(store, boundary(f"chain {index}", 0))

    assert is_readable(store, "chain 7", 0)
    assert store.statistics().events["Evicted"] >= 8


def test_a_floor_that_evictions_do_not_help_stops_them_and_says_so(caches: CacheMaker) -> None:
    store = caches.open(replace(SETTINGS, free_floor_bytes=MIB))
    store_chain(store, "a", 6)
    files_of(store).free = lambda: MIB

    first = refused(store, "b")
    settle(store)
    evicted = store.statistics().events["Evicted"]
    second = refused(store, "b")
    settle(store)

    assert first.reason is second.reason is NotStoredReason.FLOOR_UNREACHABLE
    assert store.statistics().events["Evicted"] == evicted <= 4
    files_of(store).free = lambda: 64 * MIB
    store_one(store, boundary("b", 0))


def test_a_lowered_budget_converges_at_open_and_while_open(caches: CacheMaker) -> None:
    store = caches.open(replace(SETTINGS, budget_bytes=8 * MIB))
    store_chain(store, "a", 20)

    store = caches.reopen(store, replace(SETTINGS, budget_bytes=3 * MIB))
    settle(store)
    at_open = store.statistics().charged_bytes
    store.operator.set_budget(2 * MIB)
    settle(store)

    assert at_open <= 3 * MIB
    assert store.statistics().charged_bytes <= 2 * MIB
    assert live(store, Kind.SIDECAR, "a")[0] == 0


def test_a_lease_keeps_a_file_from_being_unlinked(caches: CacheMaker) -> None:
    checks.leased_file_stays(caches.open())


def test_a_hold_keeps_blocks_from_being_victims(caches: CacheMaker) -> None:
    store = caches.open(SMALL)
    store_one(store, boundary("a", 0))
    held = store.hold((key_of("a", 0),))

    for index in range(14):
        store_one(store, boundary(f"chain {index}", 0))
    is_kept = is_readable(store, "a", 0)
    store.release(held)

    assert is_kept


# Deletion.


@pytest.mark.parametrize("how", ["a link", "two names", "another size", "a folder"])
def test_deletion_refuses_what_is_not_the_file_that_was_recorded(
    caches: CacheMaker, tmp_path: Path, how: str
) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0, kinds=[Kind.BLOCK]))
    file = file_of(store, Kind.BLOCK, key_of("a", 0))
    path, precious = caches.root / file.path, tmp_path / "precious"
    precious.write_bytes(path.read_bytes())
    if how == "two names":
        os.link(path, tmp_path / "second")
    elif how == "another size":
        path.write_bytes(b"short")
    else:
        path.unlink()
        if how == "a link":
            path.symlink_to(precious)
        else:
            path.mkdir()

    checks.doomed_by_purge(store)

    doomed = core_of(store).state.doomed[file]
    assert doomed.refusals == 1
    assert store.statistics().holdings.refused_count == 1
    assert core_of(store).state.used_bytes == CHARGE_BYTES
    assert precious.exists() and os.path.lexists(path)


def test_deletion_does_not_follow_a_folder_that_is_a_link(
    caches: CacheMaker, tmp_path: Path
) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0, kinds=[Kind.BLOCK]))
    folder = caches.root / "blocks" / "00000001"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")

    checks.doomed_by_purge(store)

    assert len(list((tmp_path / "elsewhere").iterdir())) == 1
    assert core_of(store).state.used_bytes == CHARGE_BYTES
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)


def test_a_refused_deletion_stays_charged_and_is_tried_again_later(caches: CacheMaker) -> None:
    time = SkippedTime()
    store = caches.open(clock=time.clock)
    store_one(store, boundary("a", 0, kinds=[Kind.BLOCK]))
    files_of(store).hook = Failing("unlink", errno.EPERM, path="blocks")

    checks.doomed_by_purge(store)
    refused_once = core_of(store).state.used_bytes
    time.skip(store, 2.0)
    wait_until(lambda: core_of(store).counts.events["DeletionRefused"] == 2, "a second refusal")
    files_of(store).hook = None
    time.skip(store, 5.0)
    wait_until(lambda: not core_of(store).state.doomed, "the file is deleted")

    assert refused_once == CHARGE_BYTES
    assert core_of(store).state.used_bytes == 0


def test_a_transient_refusal_is_no_event(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    files_of(store).hook = Failing("unlink", errno.EBUSY, path="blocks", times=2)

    checks.doomed_by_purge(store)

    assert "DeletionRefused" not in store.statistics().events
    assert core_of(store).state.used_bytes == 0


def test_a_refused_deletion_is_charged_and_tried_again_after_a_restart(
    caches: CacheMaker, tmp_path: Path
) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0, kinds=[Kind.BLOCK]))
    path = caches.root / file_of(store, Kind.BLOCK, key_of("a", 0)).path
    os.link(path, tmp_path / "second")
    checks.doomed_by_purge(store)

    store = caches.reopen(store)
    at_open = core_of(store).state.used_bytes
    wait_until(lambda: core_of(store).counts.events["DeletionRefused"] == 1, "a new refusal")
    refusals = [doomed.refusals for doomed in core_of(store).state.doomed.values()]
    (tmp_path / "second").unlink()
    store = caches.reopen(store)
    wait_until(lambda: not core_of(store).state.doomed, "the file is deleted")

    assert at_open == CHARGE_BYTES
    assert refusals == [2]


def test_a_file_that_is_gone_already_counts_as_deleted(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    (caches.root / file_of(store, Kind.BLOCK, key_of("a", 0)).path).unlink()

    checks.doomed_by_purge(store)

    assert core_of(store).state.used_bytes == 0
    assert not core_of(store).state.doomed


def test_a_deletion_whose_folder_did_not_sync_is_not_recorded_yet(caches: CacheMaker) -> None:
    checks.deletions_are_synced(caches.open())


# Damage, and the operator.


def test_quarantine_moves_the_file_only_after_the_event(caches: CacheMaker) -> None:
    store = caches.open()
    store_chain(store, "a", 2)
    file = file_of(store, Kind.BLOCK, key_of("a", 0))
    located = locate(store, Kind.BLOCK, key_of("a", 0))
    assert located is not None
    known: list[bool] = []

    def hook(step: str, name: str) -> None:
        if step == "rename" and name == file.path:
            known.append(file in core_of(store).state.quarantined)

    files_of(store).hook = hook
    store.damage.quarantine(located, "its data does not match")
    settle(store)

    assert known == [True]
    assert (caches.root / file.quarantine_path).exists()
    assert not (caches.root / file.path).exists()
    assert set(core_of(store).state.holes) == {key_of("a", 0)}
    store_one(store, boundary("a", 0))
    assert is_readable(store, "a", 0) and is_readable(store, "a", 1)


def test_quarantine_is_charged_and_the_first_to_go(caches: CacheMaker) -> None:
    store = caches.open(SMALL)
    for index in range(4):
        store_one(store, boundary(f"chain {index}", 0))
    paths = [checks.quarantined(store, f"chain {index}") for index in (1, 2, 3)]
    charged = core_of(store).state.used_bytes

    index = 4
    while any(checks.is_file(store, path) for path in paths):
        store_one(store, boundary(f"chain {index}", 0))
        settle(store)
        index += 1

    assert charged == PAIR_BYTES + 3 * CHARGE_BYTES
    # The sidecars of the three damaged blocks, and nothing else.
    assert store.statistics().events["Evicted"] == 3
    assert not core_of(store).state.quarantined


def test_a_quarantined_file_that_cannot_be_deleted_does_not_keep_others_from_going(
    caches: CacheMaker,
) -> None:
    store = caches.open(SMALL)
    store_one(store, boundary("bad", 0))
    checks.quarantined(store, "bad")
    files_of(store).hook = Failing("unlink", errno.EPERM, path="quarantine")

    for index in range(15):
        store_one(store, boundary(f"chain {index}", 0))

    assert store.statistics().events["DeletionRefused"] >= 1
    assert is_readable(store, "chain 14", 0)


def test_a_quarantine_that_a_crash_interrupted_is_finished(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    store = caches.reopen(store)
    file = file_of(store, Kind.BLOCK, key_of("a", 0))
    located = locate(store, Kind.BLOCK, key_of("a", 0))
    assert located is not None
    gate = Gate("rename", file.path)
    files_of(store).hook = gate
    store.damage.quarantine(located, "a test")
    gate.await_thread()

    after = caches.after_a_crash(store)
    gate.open()
    settle(after)

    assert (after.files.root / file.quarantine_path).exists()
    assert not (after.files.root / file.path).exists()


def test_a_quarantine_of_a_block_whose_sidecar_is_a_victim_already_is_one_event_each(
    caches: CacheMaker,
) -> None:
    checks.damage_of_half_a_chosen_pair_is_recorded(caches.open())


def test_a_suspect_is_stored_again_and_was_readable_meanwhile(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    before = put(store, boundary("a", 0))
    located = locate(store, Kind.SIDECAR, key_of("a", 0))
    assert located is not None

    store.damage.suspect(located)
    after = put(store, boundary("a", 0))

    assert before.is_empty
    assert outcome(after) is None
    assert [writing.generation for writing in after.writings] == [2]
    assert put(store, boundary("a", 0)).is_empty


def test_a_suspicion_of_an_older_generation_is_forgotten(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    located = locate(store, Kind.SIDECAR, key_of("a", 0))
    assert located is not None
    store.damage.suspect(located)
    store_one(store, boundary("a", 0))

    store.damage.suspect(located)

    assert put(store, boundary("a", 0)).is_empty


def test_purge_drops_one_namespace_and_its_files(caches: CacheMaker) -> None:
    store = caches.open()
    store_chain(store, "a", 2)
    store_one(store, boundary("b", 0, namespace=OTHER_NAMESPACE))
    store.operator.pin(key_of("a", 0))

    store.operator.purge(NAMESPACE)
    settle(store)

    assert live(store, Kind.BLOCK, "a") == []
    assert live(store, Kind.SIDECAR, "b") == [0]
    assert payload_paths(caches.root) == named_paths(core_of(store).state)


def test_a_pin_keeps_a_block_its_sidecar_and_all_above_until_it_is_unpinned(
    caches: CacheMaker,
) -> None:
    store = caches.open(SMALL)
    store_chain(store, "a", 2)
    store.operator.pin(key_of("a", 1))
    store.operator.pin(key_of("nobody", 0))
    store = caches.reopen(store, SMALL)

    for index in range(14):
        store_one(store, boundary(f"chain {index}", 0))
    while_pinned = live(store, Kind.SIDECAR, "a")
    store.operator.unpin(key_of("a", 1))
    for index in range(14, 28):
        store_one(store, boundary(f"chain {index}", 0))

    assert while_pinned == [0, 1]
    assert live(store, Kind.BLOCK, "a") == []


def test_a_good_file_in_quarantine_is_reinstated(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0, kinds=[Kind.BLOCK]))
    file = file_of(store, Kind.BLOCK, key_of("a", 0))
    checks.quarantined(store, "a")

    store.operator.reinstate(file)
    settle(store)

    assert read(store, Kind.BLOCK, key_of("a", 0)) == expected_bytes(boundary("a", 0), Kind.BLOCK)
    assert payload_paths(caches.root) == {file.path}


def test_a_file_of_a_swept_epoch_is_reinstated_although_its_folder_is_gone(
    caches: CacheMaker,
) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0, kinds=[Kind.BLOCK]))
    file = file_of(store, Kind.BLOCK, key_of("a", 0))
    checks.quarantined(store, "a")
    after = caches.after_a_crash(store)
    assert not (after.files.root / "blocks" / "00000001").exists()

    after.operator.reinstate(file)

    assert live(after, Kind.BLOCK, "a") == [0]


def test_a_bad_file_is_not_reinstated(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0, kinds=[Kind.BLOCK]))
    file = file_of(store, Kind.BLOCK, key_of("a", 0))
    flip_byte(caches.root / checks.quarantined(store, "a"))

    with pytest.raises(PayloadDamagedError):
        store.operator.reinstate(file)
    settle(store)

    assert payload_paths(caches.root) == {file.quarantine_path}


@pytest.mark.parametrize("what", ["its key is stored anew", "its parent is gone", "unknown"])
def test_a_file_whose_place_is_gone_is_not_reinstated(caches: CacheMaker, what: str) -> None:
    store = caches.open()
    store_chain(store, "a", 2)
    file = file_of(store, Kind.BLOCK, key_of("a", 1))
    if what != "unknown":
        checks.quarantined(store, "a", 1)
    if what == "its key is stored anew":
        store_one(store, boundary("a", 1))
    elif what == "its parent is gone":
        checks.quarantined(store, "a", 0)

    with pytest.raises(WalkbackError):
        store.operator.reinstate(file)
    settle(store)

    assert store.mode is Mode.WRITING


def test_a_file_is_not_condemned_while_it_is_being_reinstated(caches: CacheMaker) -> None:
    checks.reinstating_a_condemned_file(caches.open(SMALL))


def test_a_change_that_the_journal_does_not_take_is_an_error_and_no_change(
    caches: CacheMaker,
) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    files_of(store).hook = Failing("commit", errno.ENOSPC, times=1)

    with pytest.raises(WalkbackError, match="nothing was changed"):
        store.operator.purge(NAMESPACE)

    assert is_readable(store, "a", 0)


def test_a_budget_that_makes_no_sense_is_refused_while_open(caches: CacheMaker) -> None:
    store = caches.open()

    with pytest.raises(SettingsError):
        store.operator.set_budget(0)


# Close.


def test_abort_reset_close_waits_for_stores_that_own_their_buffers(caches: CacheMaker) -> None:
    before = set(threading.enumerate())
    store = caches.open()
    gate = Gate("create", "staging")
    files_of(store).hook = gate
    claims = [put(store, boundary("a", index)) for index in range(3)]
    gate.await_thread()

    with ThreadPoolExecutor() as pool:
        closing = pool.submit(store.close)
        gate.open()
        closing.result(WAIT_SECONDS)

    assert [outcome(claim) for claim in claims] == [None, None, None]
    assert set(threading.enumerate()) <= before
    store = caches.open()
    assert all(is_readable(store, "a", index) for index in range(3))


def test_close_waits_for_a_caller_who_writes_inline(caches: CacheMaker) -> None:
    store = caches.open(replace(SETTINGS, staging_bytes=5 * BLOCK_BYTES))
    first_gate = Gate("create", "staging/00000001-00000001")
    inline_gate = Gate("create", "staging/00000001-00000002")

    def hook(step: str, name: str) -> None:
        first_gate(step, name)
        inline_gate(step, name)

    files_of(store).hook = hook
    put(store, boundary("a", 0))
    first_gate.await_thread()
    inline = put(store, boundary("b", 0))
    with ThreadPoolExecutor() as pool:
        third = pool.submit(put, store, boundary("c", 0))
        inline_gate.await_thread()
        closing = pool.submit(store.close)
        first_gate.open()
        wait_until(lambda: core_of(store).staging_now == 1, "only the inline write is left")
        assert not closing.done()
        inline_gate.open()
        closing.result(WAIT_SECONDS)
        late = outcome(third.result(WAIT_SECONDS))

    assert outcome(inline) is None
    assert late is None or late.reason is NotStoredReason.CLOSED


def test_a_close_that_the_disk_does_not_take_is_as_after_a_crash(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))
    files_of(store).hook = Failing("commit", errno.ENOSPC)

    store.close()
    store = caches.open()

    assert is_readable(store, "a", 0)


def test_a_clean_close_leaves_no_epoch_to_sweep(caches: CacheMaker) -> None:
    store = caches.open()
    store_one(store, boundary("a", 0))

    store = caches.reopen(store)

    assert core_of(store).state.unswept == {2}


def test_flush_returns_when_all_that_was_put_before_is_settled(caches: CacheMaker) -> None:
    store = caches.open()
    claims: list[Claim] = []
    for index in range(6):
        claims.append(put(store, boundary("a", index)))

    store.flush()

    assert all(claim.settled.is_set() for claim in claims)


# Statistics.


def test_statistics_tell_what_is_held_and_what_happened(caches: CacheMaker) -> None:
    store = caches.open()
    store_chain(store, "a", 3)
    touch(store, "a", 1)
    refused(store, "b", 1)

    statistics = store.statistics()

    assert statistics.holdings.sidecar_count == 3
    assert statistics.holdings.sidecar_bytes == 3 * CHARGE_BYTES
    assert (statistics.restores, statistics.sidecars_read) == (1, 1)
    assert statistics.not_stored == {"parent": 1}
    assert statistics.staging_bytes_high_water >= 2 * BLOCK_BYTES
    assert statistics.boundaries_stored == 3
    assert statistics.charged_bytes > 6 * CHARGE_BYTES
    assert statistics.mode == "writing"


def test_statistics_charge_the_journal_and_its_backups(caches: CacheMaker) -> None:
    store = caches.open(replace(SETTINGS, compact_every_events=10))
    store_chain(store, "a", 8)
    settle(store)

    charged = store.statistics().journal_bytes

    on_disk = sum(
        path.stat().st_blocks * 512
        for folder in ("journal", "backup")
        for path in (caches.root / folder).iterdir()
    )
    assert list((caches.root / "backup").iterdir())
    assert charged == on_disk


def test_a_refusal_that_repeats_is_recorded_on_a_doubling_backoff(caches: CacheMaker) -> None:
    store = caches.open()

    for _ in range(10):
        store.refuse(NotStored(NotStoredReason.POSITION, ""), request=1, key=b"k", position=1)
    store.flush()

    assert store.statistics().not_stored == {"position": 10}
    assert store.statistics().events["NotStored"] == 3


# These checks see a store that is wrong.


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_each_mutant_of_the_store_is_caught(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = CacheMaker(tmp_path)
    store = maker.open(mutant.settings)
    mutant.patch(monkeypatch)

    with pytest.raises(AssertionError):
        mutant.check(store)

    monkeypatch.undo()
    maker.abandon()
