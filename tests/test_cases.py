"""What broke in systems like this one, case by case: the fault's whole kind is to be impossible."""

import errno
import itertools
import os
import shutil
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
    boundary,
    bytes_of,
    core_of,
    expected_bytes,
    file_of,
    files_of,
    flip_byte,
    is_readable,
    key_of,
    leased,
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
    touch,
)
from hypothesis import given
from hypothesis import strategies as st

from walkback.journal.errors import PayloadDamagedError
from walkback.journal.words import Kind, NotStoredReason
from walkback.restore.identity import Namespace, block_chain
from walkback.restore.layout import Layout
from walkback.store.boundary import NotStored
from walkback.store.settings import MIB
from walkback.store.store import MutableStore

SMALL = replace(SETTINGS, budget_bytes=2 * MIB)
SECRET = bytes(range(32))


@pytest.fixture
def caches(tmp_path: Path) -> Generator[CacheMaker]:
    with made_caches(tmp_path) as maker:
        yield maker


def named(**fields: object) -> bytes:
    """The digest of a namespace with these fields and otherwise the same ones."""
    values: dict[str, object] = {
        "weights": bytes(32),
        "adapter": b"",
        "layout": Layout(leaves=()),
        "block_tokens": 256,
    }
    return Namespace(**(values | fields)).digest()  # type: ignore[arg-type]


# KV and state must belong together.


def test_reporting_one_entry_bad_reaches_all_that_was_computed_from_it(
    caches: CacheMaker,
) -> None:
    """Case 2."""
    store = caches.open()
    store_chain(store, "a", 4)

    store.operator.report_bad(Kind.SIDECAR, key_of("a", 1), "it loops")
    settle(store)

    assert live(store, Kind.BLOCK, "a") == [0, 1]
    assert live(store, Kind.SIDECAR, "a") == [0]
    assert payload_paths(caches.root) == named_paths(core_of(store).state)


def test_reporting_one_entry_bad_reaches_what_is_being_stored(caches: CacheMaker) -> None:
    """Case 2."""
    checks.bad_news_reaches_what_is_being_stored(caches.open())


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 256])
def test_positions_are_tokens_for_any_block_size(block_tokens: int) -> None:
    """Case 4."""
    tokens = list(range(1000))

    links = block_chain(tokens, namespace=NAMESPACE, secret=SECRET, block_tokens=block_tokens)

    assert [(link.start, link.end) for link in links] == [
        (start, start + block_tokens) for start in range(0, 1000 - block_tokens + 1, block_tokens)
    ]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_all_parts_of_a_boundary_are_committed_or_none_is(caches: CacheMaker, failing: int) -> None:
    """Cases 8 and 41."""
    store = caches.open()
    path = f"staging/00000001-{failing:08x}"
    files_of(store).hook = Failing("write", errno.ENOSPC, path=path)

    refusal = outcome(put(store, boundary("a", 1, block_count=2)))
    settle(store)

    assert refusal is not None
    assert live(store, Kind.BLOCK, "a") == live(store, Kind.SIDECAR, "a") == []
    assert payload_paths(caches.root) == set()


def test_a_pair_is_one_transaction(caches: CacheMaker) -> None:
    """Case 41."""
    store = caches.open()
    commits = store.statistics().commits

    store_one(store, boundary("a", 3, block_count=4))

    assert store.statistics().commits == commits + 1


def test_what_is_still_being_written_is_not_committed(caches: CacheMaker) -> None:
    """Case 10."""
    store = caches.open()
    gate = Gate("sync", "staging/00000001-00000002")
    files_of(store).hook = gate
    claim = put(store, boundary("a", 0))
    gate.await_thread()

    is_committed = key_of("a", 0) in core_of(store).state.blocks
    gate.open()

    assert not is_committed
    assert outcome(claim) is None


# Identity.


@given(st.text(max_size=8), st.binary(max_size=8), st.text(max_size=8), st.binary(max_size=8))
def test_no_two_sets_of_fields_have_one_digest(
    salt: str, adapter: bytes, other_salt: str, other_adapter: bytes
) -> None:
    """Case 21."""
    is_same = (salt, adapter) == (other_salt, other_adapter)

    digests = {
        named(salt=salt, adapter=adapter),
        named(salt=other_salt, adapter=other_adapter),
    }

    assert len(digests) == (1 if is_same else 2)


def test_a_salt_is_no_adapter_and_no_weights() -> None:
    """Case 21."""
    digests = [named(salt="abc"), named(adapter=b"abc"), named(weights=b"abc")]

    assert len({*digests}) == 3


@pytest.mark.parametrize("field", [{"weights": b"other weights"}, {"adapter": b"other adapter"}])
def test_other_weights_or_another_adapter_are_another_namespace(field: dict[str, bytes]) -> None:
    """Case 22."""
    assert named(**field) != named()


def test_keys_are_of_full_width_and_differ_for_any_token() -> None:
    """Case 23."""
    keys = {
        block_chain([token], namespace=NAMESPACE, secret=SECRET, block_tokens=1)[0].key
        for token in range(-1000, 1000)
    }

    assert len(keys) == 2000
    assert {len(key) for key in keys} == {32}


def test_shards_of_one_model_do_not_overwrite_each_other(caches: CacheMaker) -> None:
    """Case 26."""
    store = caches.open()
    shards = [named(rank=rank, world=2) for rank in range(2)]

    for rank, namespace in enumerate(shards):
        (link,) = block_chain([7] * 16, namespace=namespace, secret=SECRET, block_tokens=16)
        wanted = boundary(f"rank {rank}", 0, namespace=link.parent)
        store_one(store, wanted)

    assert len({*shards}) == 2
    assert [is_readable_in(store, f"rank {rank}") for rank in range(2)] == [True, True]


def is_readable_in(store: MutableStore, chain: str) -> bool:
    data = read(store, Kind.BLOCK, key_of(chain, 0))
    return data == expected_bytes(boundary(chain, 0), Kind.BLOCK)


def test_a_salt_survives_a_restart(caches: CacheMaker) -> None:
    """Case 28."""
    store = caches.open()
    mine, theirs = named(salt="mine"), named(salt="theirs")
    store_one(store, boundary("mine", 0, namespace=mine))
    store_one(store, boundary("theirs", 0, namespace=theirs))

    store = caches.reopen(store)

    blocks = core_of(store).state.blocks
    assert blocks[key_of("mine", 0)].namespace == mine
    assert blocks[key_of("theirs", 0)].namespace == theirs


# Atomicity and durability.


@pytest.mark.parametrize("step", ["create", "write", "sync", "rename", "sync directory", "commit"])
def test_a_crash_at_a_step_of_a_replacement_leaves_the_old_or_the_new(
    caches: CacheMaker, step: str
) -> None:
    """Case 33."""
    store = caches.open()
    store_one(store, boundary("a", 0))
    for kind in Kind:
        located = locate(store, kind, key_of("a", 0))
        assert located is not None
        store.damage.suspect(located)
    gate = Gate(step, "" if step in ("commit", "sync directory") else "staging")
    files_of(store).hook = gate
    claim = put(store, boundary("a", 0))
    gate.await_thread()

    after = caches.after_a_crash(store)
    gate.open()
    assert outcome(claim) is None
    settle(store)
    later = caches.after_a_crash(store)

    assert [is_readable(each, "a", 0) for each in (after, later)] == [True, True]
    assert core_of(after).state.blocks[key_of("a", 0)].generation == 1
    assert core_of(later).state.blocks[key_of("a", 0)].generation == 2
    for each in (after, later):
        settle(each)
        assert payload_paths(each.files.root) == named_paths(core_of(each).state)


def test_what_was_acknowledged_survives_the_death_of_the_process(caches: CacheMaker) -> None:
    """Case 35."""
    store = caches.open()
    store_chain(store, "a", 3)

    after = caches.after_a_crash(store)

    assert all(is_readable(after, "a", index) for index in range(3))


def test_the_index_after_a_restart_is_the_index_before(caches: CacheMaker) -> None:
    """Case 36."""
    store = caches.open()
    store_chain(store, "a", 3)
    touch(store, "a", 0)
    store.operator.pin(key_of("a", 2))
    before = records_of(core_of(store).state)

    after = records_of(core_of(caches.after_a_crash(store)).state)

    of_the_opening = {b"w", b"e"}
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} <= (
        of_the_opening
    )


def test_the_bytes_charged_after_a_restart_are_those_of_the_files(caches: CacheMaker) -> None:
    """Cases 37 and 63."""
    store = caches.open()
    store_chain(store, "a", 3, nbytes=5000)

    store = caches.reopen(store)

    on_disk = sum(
        (caches.root / path).stat().st_blocks * 512 for path in payload_paths(caches.root)
    )
    assert core_of(store).state.used_bytes == on_disk


@pytest.mark.parametrize("step", ["commit", "unlink", "sync directory"])
def test_a_crash_between_tombstone_and_unlink_leaves_no_stale_entry_and_no_file(
    caches: CacheMaker, step: str
) -> None:
    """Case 39."""
    store = caches.open()
    store_chain(store, "a", 2)
    gate = Gate(step)
    files_of(store).hook = gate
    with ThreadPoolExecutor() as pool:
        purging = pool.submit(store.operator.purge, NAMESPACE)
        gate.await_thread()
        after = caches.after_a_crash(store)
        gate.open()
        purging.result(WAIT_SECONDS)
    settle(after)

    is_committed = step != "commit"
    assert live(after, Kind.SIDECAR, "a") == ([] if is_committed else [0, 1])
    assert payload_paths(after.files.root) == named_paths(core_of(after).state)


@pytest.mark.parametrize("step", ["create", "write", "sync", "rename", "sync directory", "commit"])
def test_a_store_that_fails_at_any_step_shows_nothing(caches: CacheMaker, step: str) -> None:
    """Case 42."""
    store = caches.open()
    files_of(store).hook = Failing(step, errno.EIO)

    refusal = outcome(put(store, boundary("a", 0)))

    files_of(store).hook = None
    assert refusal is not None
    assert locate(store, Kind.BLOCK, key_of("a", 0)) is None
    after = caches.after_a_crash(store)
    assert live(after, Kind.BLOCK, "a") == live(after, Kind.SIDECAR, "a") == []
    assert payload_paths(after.files.root) == set()


def test_files_on_disk_are_what_the_journal_names_after_a_long_history(
    caches: CacheMaker,
) -> None:
    """Case 44."""
    store = caches.open(SMALL)
    for index in range(12):
        files_of(store).hook = Failing("sync", errno.EIO, path="staging", times=index % 2)
        put(store, boundary(f"chain {index}", 0))
        put(store, boundary(f"orphan {index}", 1))
        if index % 4 == 3:
            settle(store)
            store = caches.reopen(store, SMALL)
    settle(store)

    assert payload_paths(caches.root) == named_paths(core_of(store).state)


def test_renames_are_durable_before_the_commit_that_names_them(caches: CacheMaker) -> None:
    """Case 45."""
    checks.directories_are_synced_before_the_commit(caches.open())


# Integrity.


def test_any_flipped_byte_of_any_payload_is_found(caches: CacheMaker) -> None:
    """Case 48."""
    store = caches.open()
    store_one(store, boundary("a", 0, nbytes=2000))
    found: list[int] = []
    for kind in Kind:
        path = caches.root / file_of(store, kind, key_of("a", 0)).path
        offsets = [*range(0, path.stat().st_size, 487), path.stat().st_size - 1]
        for offset in offsets:
            flip_byte(path, offset)
            with pytest.raises(PayloadDamagedError):
                read(store, kind, key_of("a", 0))
            flip_byte(path, offset)
            found.append(offset)

    assert len(found) > 70
    assert read(store, Kind.BLOCK, key_of("a", 0)) is not None


def test_every_length_that_a_file_can_be_cut_to_is_found(caches: CacheMaker) -> None:
    """Case 49."""
    store = caches.open()
    store_one(store, boundary("a", 0, nbytes=2000))
    path = caches.root / file_of(store, Kind.BLOCK, key_of("a", 0)).path
    whole = path.read_bytes()

    for length in [*range(0, len(whole), 499), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(PayloadDamagedError):
            read(store, Kind.BLOCK, key_of("a", 0))

    path.write_bytes(whole)
    assert read(store, Kind.BLOCK, key_of("a", 0)) is not None


def test_an_entry_reported_bad_is_never_offered_again_also_after_a_restart(
    caches: CacheMaker,
) -> None:
    """Case 52."""
    store = caches.open()
    store_chain(store, "a", 3)

    store.operator.report_bad(Kind.SIDECAR, key_of("a", 1), "it loops")
    store = caches.reopen(store)

    assert live(store, Kind.SIDECAR, "a") == [0]
    assert live(store, Kind.BLOCK, "a") == [0, 1]


# Budget, eviction, wear.


def test_a_long_chain_keeps_its_newest_checkpoint_as_long_as_anything_fits(
    caches: CacheMaker,
) -> None:
    """Case 16."""
    checks.newest_checkpoint_stays(caches.open(SMALL))


def test_a_store_does_not_evict_what_it_has_just_stored(caches: CacheMaker) -> None:
    """Case 56."""
    checks.store_keeps_what_it_stored(caches.open(SMALL))


def test_a_store_does_not_evict_what_a_running_restore_will_read(caches: CacheMaker) -> None:
    """Case 58."""
    checks.leased_prefix_survives(caches.open(SMALL))


def test_a_repeated_hit_writes_no_payload_byte(caches: CacheMaker) -> None:
    """Case 59."""
    store = caches.open()
    store_one(store, boundary("a", 0))
    written = store.statistics().payload_bytes_written

    for _ in range(5):
        touch(store, "a", 0)
        assert put(store, boundary("a", 0)).is_empty

    assert store.statistics().payload_bytes_written == written
    assert store.statistics().events["Staged"] == 2


def test_bytes_that_cannot_go_do_not_make_others_go_and_the_refusal_says_why(
    caches: CacheMaker, tmp_path: Path
) -> None:
    """Case 60."""
    store = caches.open(SMALL)
    store_chain(store, "stuck", 4)
    for index in range(4):
        path = file_of(store, Kind.BLOCK, key_of("stuck", index)).path
        os.link(caches.root / path, tmp_path / str(index))
    store.operator.purge(NAMESPACE)
    settle(store)
    store_one(store, boundary("a", 0, namespace=OTHER_NAMESPACE))

    need = 2 * MIB - 4 * CHARGE_BYTES
    refusal = outcome(put(store, boundary("b", 0, kinds=[Kind.BLOCK], nbytes=need)))
    settle(store)

    assert refusal is not None and refusal.reason is NotStoredReason.BUDGET
    assert f"{4 * CHARGE_BYTES} bytes belong to files whose deletion is refused" in refusal.detail
    assert is_readable(store, "a", 0)


def test_the_bytes_of_all_models_count_against_one_limit(caches: CacheMaker) -> None:
    """Case 62."""
    store = caches.open(SMALL)
    models = [bytes([index]) * 32 for index in range(3)]

    for index in range(18):
        store_one(store, boundary(f"chain {index}", 0, namespace=models[index % 3]))
    settle(store)

    on_disk = sum(path.stat().st_blocks * 512 for path in caches.root.rglob("*") if path.is_file())
    assert on_disk <= 2 * MIB + 16_384  # STORE, OWNER and HEAD are not charged


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 100_000])
def test_the_ledger_holds_allocated_bytes(caches: CacheMaker, nbytes: int) -> None:
    """Case 63."""
    store = caches.open()

    store_one(store, boundary("a", 0, kinds=[Kind.BLOCK], nbytes=nbytes))

    (path,) = payload_paths(caches.root)
    status = (caches.root / path).stat()
    charged = core_of(store).state.used_bytes
    assert charged >= status.st_blocks * 512
    assert charged >= status.st_size
    assert charged % 4096 == 0


def test_recency_after_a_replay_is_the_recency_before(caches: CacheMaker) -> None:
    """Case 65."""
    store = caches.open()
    for chain in "abcd":
        store_chain(store, chain, 2)
    for chain in "cab":
        touch(store, chain, 1)
    before = [leaf.key for leaf in core_of(store).state.coldest_leaves()]

    after = [leaf.key for leaf in core_of(caches.reopen(store)).state.coldest_leaves()]

    assert before == after == [key_of(chain, 1) for chain in "dcab"]


def test_the_bytes_of_a_prompt_grow_linearly(caches: CacheMaker) -> None:
    """Case 66."""
    store = caches.open()
    used: list[int] = [0]

    for index in range(6):
        store_one(store, boundary("a", index))
        used.append(core_of(store).state.used_bytes)

    assert {later - before for before, later in itertools.pairwise(used)} == {2 * CHARGE_BYTES}


def test_an_entry_evicted_while_it_is_read_and_stored_again_has_another_file(
    caches: CacheMaker,
) -> None:
    """Case 68."""
    store = caches.open()
    store_one(store, boundary("a", 0))
    located, lease = leased(store, Kind.BLOCK, key_of("a", 0))
    assert located is not None
    store.operator.purge(NAMESPACE)

    store_one(store, boundary("a", 0))

    assert file_of(store, Kind.BLOCK, key_of("a", 0)) != located.file
    assert bytes_of(store, located) == expected_bytes(boundary("a", 0), Kind.BLOCK)
    store.release(lease)
    settle(store)
    assert is_readable(store, "a", 0)


def test_chain_roots_outlive_all_that_descends_from_them(caches: CacheMaker) -> None:
    """Case s1."""
    store = caches.open(SMALL)
    store_chain(store, "a", 6)
    for index in range(7):
        store_one(store, boundary(f"chain {index}", 0))
        settle(store)
        kept = live(store, Kind.BLOCK, "a")
        assert kept == list(range(len(kept)))


def test_no_sidecar_outlives_its_block(caches: CacheMaker) -> None:
    """Case s2."""
    store = caches.open(SMALL)
    store_chain(store, "a", 4)
    located = locate(store, Kind.BLOCK, key_of("a", 1))
    assert located is not None
    store.damage.quarantine(located, "a test")
    for index in range(10):
        store_one(store, boundary(f"chain {index}", 0))
    settle(store)

    state = core_of(store).state
    assert state.sidecars.keys() <= state.blocks.keys()


def test_a_limit_exceeded_at_the_start_converges(caches: CacheMaker) -> None:
    """Case s3."""
    store = caches.open()
    store_chain(store, "a", 20)

    store = caches.reopen(store, SMALL)
    settle(store)

    assert store.statistics().charged_bytes <= 2 * MIB
    kept = live(store, Kind.SIDECAR, "a")
    assert kept == list(range(len(kept))) and kept


# Races, liveness, silence.


def test_a_file_removed_under_us_is_an_error_to_the_reader_and_no_failure_of_the_eviction(
    caches: CacheMaker,
) -> None:
    """Case 69."""
    store = caches.open()
    store_one(store, boundary("a", 0))
    for path in payload_paths(caches.root):
        (caches.root / path).unlink()

    with pytest.raises(FileNotFoundError):
        read(store, Kind.BLOCK, key_of("a", 0))
    store.operator.purge(NAMESPACE)
    settle(store)

    assert core_of(store).state.used_bytes == 0
    store_one(store, boundary("a", 0))


def test_a_failed_read_retracts_the_entry(caches: CacheMaker) -> None:
    """Case 70."""
    store = caches.open()
    store_chain(store, "a", 2)
    located = locate(store, Kind.BLOCK, key_of("a", 1))
    assert located is not None and located.file is not None
    (caches.root / located.file.path).unlink()

    store.damage.lose(located, "it was not there")
    store.damage.lose(located, "it was not there")

    assert live(store, Kind.BLOCK, "a") == live(store, Kind.SIDECAR, "a") == [0]
    assert store.statistics().events["Lost"] == 1


@pytest.mark.parametrize("reason", [*NotStoredReason])
def test_every_refusal_is_counted_and_recorded_with_its_reason(
    caches: CacheMaker, reason: NotStoredReason
) -> None:
    """Case 73."""
    store = caches.open()

    store.refuse(NotStored(reason, "a test"), request=1, key=bytes(32), position=1)
    store.flush()

    assert store.statistics().not_stored == {reason.value: 1}
    assert store.statistics().events["NotStored"] == 1


def test_two_writers_of_one_key_never_share_a_name(caches: CacheMaker) -> None:
    """Case 77."""
    store = caches.open()
    created: list[str] = []

    def hook(step: str, name: str) -> None:
        if step == "create":
            created.append(name)

    files_of(store).hook = hook
    store_one(store, boundary("a", 0))
    store.operator.purge(NAMESPACE)
    store_one(store, boundary("a", 0))
    store = caches.reopen(store)
    files_of(store).hook = hook
    store.operator.purge(NAMESPACE)
    store_one(store, boundary("a", 0))

    names = [name for name in created if name.startswith("staging")]
    assert len(names) == len({*names}) == 6


def test_a_refusal_is_no_commit_and_takes_kv_and_state_together(caches: CacheMaker) -> None:
    """Case 82."""
    store = caches.open(SMALL)

    claim = put(store, boundary("a", 0, nbytes=MIB))
    refusal = outcome(claim)

    assert refusal is not None and refusal.reason is NotStoredReason.BUDGET
    assert "Committed" not in store.statistics().events
    assert core_of(store).overlay.reserved_bytes == 0
    assert payload_paths(caches.root) == set()


def test_a_fresh_root_and_a_relative_root_both_open(
    caches: CacheMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 85."""
    monkeypatch.chdir(tmp_path)
    settings = replace(SETTINGS, budget_bytes=None)

    store = caches.open(settings, root=Path("relative"))
    monkeypatch.chdir("/")
    store_one(store, boundary("a", 0))
    store.close()

    assert (tmp_path / "relative" / "STORE").exists()
    again = caches.open(settings, root=tmp_path / "relative")
    assert is_readable(again, "a", 0)


def test_a_transient_read_error_leaves_the_entry_there(caches: CacheMaker) -> None:
    """Case 89."""
    store = caches.open()
    store_one(store, boundary("a", 0))
    files_of(store).hook = Failing("open", errno.EIO, path="blocks", times=1)
    located = locate(store, Kind.BLOCK, key_of("a", 0))
    assert located is not None

    with pytest.raises(OSError, match="injected"):
        read(store, Kind.BLOCK, key_of("a", 0))
    store.damage.suspect(located)

    assert is_readable(store, "a", 0)
    assert "Quarantined" not in store.statistics().events


@pytest.mark.parametrize("step", ["rename", "sync directory", "commit"])
def test_an_abort_while_the_writer_publishes_neither_loses_nor_leaks_the_file(
    caches: CacheMaker, step: str
) -> None:
    """Case a1."""
    store = caches.open()
    gate = Gate(step)
    files_of(store).hook = gate
    claim = put(store, boundary("a", 0))
    gate.await_thread()

    store.cancel(claim, NotStored(NotStoredReason.ABORTED, "the client left"))
    gate.open()

    assert outcome(claim) is None
    assert is_readable(store, "a", 0)
    assert payload_paths(caches.root) == named_paths(core_of(store).state)


def test_a_directory_that_a_cleanup_removed_is_a_refusal_with_a_reason_and_no_half_pair(
    caches: CacheMaker,
) -> None:
    """Case a2."""
    store = caches.open()
    store_one(store, boundary("a", 0))
    shutil.rmtree(caches.root / "staging")

    refusal = outcome(put(store, boundary("a", 1)))
    (caches.root / "staging").mkdir(mode=0o700)

    assert refusal is not None and refusal.reason is NotStoredReason.WRITE_FAILED
    assert live(store, Kind.BLOCK, "a") == live(store, Kind.SIDECAR, "a") == [0]


def test_a_saturated_queue_leaves_no_hole_in_a_chain(caches: CacheMaker) -> None:
    """Case a3."""
    store = caches.open(replace(SETTINGS, staging_bytes=2 * BLOCK_BYTES))

    claims = [put(store, boundary("a", index)) for index in range(12)]

    assert [outcome(claim) for claim in claims] == [None] * 12
    assert live(store, Kind.SIDECAR, "a") == list(range(12))


def test_a_deletion_at_the_cap_does_not_wait_for_the_write_that_waits_for_it(
    caches: CacheMaker,
) -> None:
    """Case a4."""
    store = caches.open(replace(SMALL, staging_bytes=2 * BLOCK_BYTES, room_wait_seconds=10.0))

    claims = [put(store, boundary(f"chain {index}", 0)) for index in range(25)]

    assert [outcome(claim) for claim in claims] == [None] * 25


def test_changing_a_setting_and_closing_drop_nothing_that_was_put(caches: CacheMaker) -> None:
    """Cases a5 and 88."""
    store = caches.open()
    claims = [put(store, boundary("a", index)) for index in range(4)]

    store.operator.set_budget(32 * MIB)
    claims += [put(store, boundary("a", index)) for index in range(4, 8)]
    store.close()

    assert [outcome(claim) for claim in claims] == [None] * 8
    store = caches.open()
    assert live(store, Kind.SIDECAR, "a") == list(range(8))
    assert is_readable(store, "a", 7)
