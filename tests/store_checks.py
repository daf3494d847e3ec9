"""Checks of an open store that the store passes and that its mutants have to fail."""

import errno
from concurrent.futures import ThreadPoolExecutor

from cache_maker import (
    BLOCK_BYTES,
    CHARGE_BYTES,
    NAMESPACE,
    WAIT_SECONDS,
    Failing,
    Gate,
    boundary,
    bytes_of,
    claimed,
    core_of,
    expected_bytes,
    file_of,
    files_of,
    is_readable,
    key_of,
    leased,
    live,
    locate,
    outcome,
    payload_paths,
    put,
    settle,
    store_one,
    tensors_for,
    wait_until,
)

from walkback.journal.events import Evicted
from walkback.journal.words import EvictReason, Kind, NotStoredReason
from walkback.store.boundary import NotStored
from walkback.store.core import Mode
from walkback.store.store import MutableStore


def reservation_is_kept_for_readers(store: MutableStore) -> None:
    """A reservation is released when its last reader is gone, and once."""
    gate = Gate("create", "staging")
    files_of(store).hook = gate
    claim = put(store, boundary("a", 0))
    gate.await_thread()
    located, lease = leased(store, Kind.BLOCK, key_of("a", 0))
    _, second = leased(store, Kind.SIDECAR, key_of("a", 0))
    gate.open()
    assert outcome(claim) is None

    assert store.statistics().staging_bytes == 2 * BLOCK_BYTES
    store.release(second)
    assert store.statistics().staging_bytes == 2 * BLOCK_BYTES
    assert located is not None
    assert bytes_of(store, located) == expected_bytes(boundary("a", 0), Kind.BLOCK)
    assert all(len(writing.tensors) == 1 for writing in claim.writings)
    store.release(lease)
    store.release(lease)
    assert store.statistics().staging_bytes == 0
    assert all(not writing.tensors for writing in claim.writings)


def leased_file_stays(store: MutableStore) -> None:
    store_one(store, boundary("a", 0))
    located, lease = leased(store, Kind.BLOCK, key_of("a", 0))
    assert located is not None
    store.operator.purge(NAMESPACE)
    wait_until(lambda: len(core_of(store).state.doomed) <= 1, "the sidecar is deleted")

    assert located.file is not None and is_file(store, located.file.path)
    assert bytes_of(store, located) == expected_bytes(boundary("a", 0), Kind.BLOCK)
    assert locate(store, Kind.BLOCK, key_of("a", 0)) is None
    store.release(lease)
    settle(store)
    assert payload_paths(store.files.root) == set()


def deletions_are_synced(store: MutableStore) -> None:
    """A folder that did not sync after an unlink is synced before Deleted is recorded."""
    store_one(store, boundary("a", 0, kinds=[Kind.BLOCK]))
    files_of(store).hook = Failing("sync directory", errno.EIO, path="blocks", times=1)
    doomed_by_purge(store)
    assert core_of(store).state.used_bytes == CHARGE_BYTES
    files_of(store).hook = None
    files_of(store).log.clear()
    wait_until(lambda: not core_of(store).state.doomed, "the deletion is done again")
    steps = [step for step, name in files_of(store).log if name in ("", "blocks/00000001")]
    assert steps.index("sync directory") < steps.index("commit")


def reinstating_a_condemned_file(store: MutableStore) -> None:
    """A file that has to give its room back while it is being verified is not reinstated."""
    store_one(store, boundary("a", 0, kinds=[Kind.BLOCK]))
    file = file_of(store, Kind.BLOCK, key_of("a", 0))
    quarantined(store, "a")
    gate = Gate("open", "quarantine")
    files_of(store).hook = gate
    with ThreadPoolExecutor() as pool:
        reinstating = pool.submit(store.operator.reinstate, file)
        gate.await_thread()
        for index in range(14):
            store_one(store, boundary(f"chain {index}", 0))
        store.flush()
        gate.open()
        error = reinstating.exception(WAIT_SECONDS)
    settle(store)
    assert store.mode is Mode.WRITING
    kept = file in core_of(store).state.quarantined
    is_live = locate(store, Kind.BLOCK, key_of("a", 0)) is not None
    assert (error is None) == is_live
    assert not is_live or is_file(store, file.path)
    assert not kept or is_file(store, file.quarantine_path)


def choose_sidecar(store: MutableStore, generation: int) -> None:
    """Make the sidecar a victim whose tombstone still rides."""
    core = core_of(store)
    with core.lock:
        core.overlay.victims.add((Kind.SIDECAR, key_of("a", 0)))
        core.ride(
            Evicted(
                kind=Kind.SIDECAR,
                key=key_of("a", 0),
                generation=generation,
                reason=EvictReason.THINNED,
                policy="",
                budget_bytes=0,
                need_bytes=0,
            )
        )


def quarantined(store: MutableStore, chain: str, index: int = 0) -> str:
    """Put the block of a boundary in quarantine, and return where its file is then."""
    located = locate(store, Kind.BLOCK, key_of(chain, index))
    assert located is not None and located.file is not None
    store.damage.quarantine(located, "a test")
    settle(store)
    return located.file.quarantine_path


def is_file(store: MutableStore, path: str) -> bool:
    return (store.files.root / path).is_file()


def doomed_by_purge(store: MutableStore) -> None:
    store.operator.purge(NAMESPACE)
    settle(store)


def directories_are_synced_before_the_commit(store: MutableStore) -> None:
    """Both folders of every rename are synced after it and before the commit."""
    files_of(store).log.clear()
    store_one(store, boundary("a", 0))
    log = files_of(store).log
    last_rename = max(index for index, (step, _) in enumerate(log) if step == "rename")
    commit = [step for step, _ in log].index("commit")
    synced = {name for step, name in log[last_rename:commit] if step == "sync directory"}
    assert synced == {"staging", "blocks/00000001", "sidecars/00000001"}


def store_keeps_what_it_stored(store: MutableStore) -> None:
    """A store over the budget does not make room with the entry that it just stored."""
    for index in range(20):
        store_one(store, boundary(f"chain {index}", 0))
        settle(store)
        assert is_readable(store, f"chain {index}", 0)


def leased_prefix_survives(store: MutableStore) -> None:
    """What a running restore is about to read is there when it does."""
    store_one(store, boundary("a", 0))
    leases = [leased(store, kind, key_of("a", 0)) for kind in Kind]
    for index in range(14):
        store_one(store, boundary(f"chain {index}", 0))
    settle(store)
    for kind, (located, lease) in zip(Kind, leases, strict=True):
        assert located is not None
        assert bytes_of(store, located) == expected_bytes(boundary("a", 0), kind)
        store.release(lease)


def children_wait_for_their_parent(store: MutableStore) -> None:
    """What is put before its parent is stored with it, and not lost."""
    parent = claimed(store, boundary("a", 0))
    children = [put(store, boundary("a", index)) for index in (1, 2)]
    wait_until(lambda: len(core_of(store).awaiting_parent) == 2, "the children wait")
    assert core_of(store).staging_bytes == 0
    # Whatever is settled meanwhile has the journal thread look at them again.
    store_one(store, boundary("b", 0))
    assert len(core_of(store).awaiting_parent) == 2
    store.reserve(parent)
    store.put(parent, tensors_for(parent), prefill_seconds=0.0)
    assert [outcome(claim) for claim in (parent, *children)] == [None, None, None]
    assert all(is_readable(store, "a", index) for index in range(3))


def damage_of_half_a_chosen_pair_is_recorded(store: MutableStore) -> None:
    """A block is quarantined although its sidecar has a tombstone that is not durable yet."""
    store_one(store, boundary("a", 0))
    located = locate(store, Kind.BLOCK, key_of("a", 0))
    sidecar = core_of(store).state.sidecars[key_of("a", 0)]
    assert located is not None
    choose_sidecar(store, sidecar.generation)
    files_of(store).hook = Failing("commit", errno.ENOSPC, times=1)
    store.damage.quarantine(located, "a test")
    settle(store)
    assert store.mode is Mode.WRITING
    assert live(store, Kind.BLOCK, "a") == live(store, Kind.SIDECAR, "a") == []


def newest_checkpoint_stays(store: MutableStore) -> None:
    """A chain longer than the budget keeps its newest checkpoint while anything else can go."""
    count = 0
    while (refusal := outcome(put(store, boundary("a", count)))) is None:
        settle(store)
        assert live(store, Kind.SIDECAR, "a")[-1:] == [count]
        count += 1
    assert refusal.reason is NotStoredReason.BUDGET
    assert count > 15


def bad_news_reaches_what_is_being_stored(store: MutableStore) -> None:
    """What descends from a bad entry and is on its way when that is reported is refused."""
    store_one(store, boundary("a", 0))
    gate = Gate("create", "staging")
    files_of(store).hook = gate
    claims = [put(store, boundary("a", index)) for index in (1, 2)]
    gate.await_thread()
    store.operator.report_bad(Kind.SIDECAR, key_of("a", 0), "it loops")
    gate.open()
    refusals = [outcome(claim) for claim in claims]
    assert all(isinstance(each, NotStored) for each in refusals)
    assert live(store, Kind.BLOCK, "a") == [0]
