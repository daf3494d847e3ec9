"""Many threads at one store: nothing deadlocks, nothing is lost, and the invariants hold."""

import random
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cache_maker import (
    BLOCK_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    SETTINGS,
    CacheMaker,
    boundary,
    bytes_of,
    core_of,
    expected_bytes,
    is_readable,
    key_of,
    leased,
    live,
    locate,
    made_caches,
    outcome,
    put,
    store_one,
    tensors_for,
)

from walkback.journal.words import Kind, NotStoredReason
from walkback.store.boundary import Claim, NotStored
from walkback.store.core import Mode
from walkback.store.settings import MIB
from walkback.store.store import MutableStore

SMALL = replace(SETTINGS, budget_bytes=2 * MIB, staging_bytes=3 * BLOCK_BYTES)
JOIN_SECONDS = 60.0


@pytest.fixture
def caches(tmp_path: Path) -> Generator[CacheMaker]:
    with made_caches(tmp_path) as maker:
        yield maker


def in_threads(*bodies: Callable[[], None]) -> None:
    """Run all at once; the first error of any of them is raised."""
    barrier = threading.Barrier(len(bodies))

    def run(body: Callable[[], None]) -> None:
        barrier.wait()
        body()

    with ThreadPoolExecutor(len(bodies)) as pool:
        for future in [pool.submit(run, body) for body in bodies]:
            future.result(JOIN_SECONDS)


def put_chain(store: MutableStore, chain: str, count: int, claims: list[Claim]) -> None:
    for index in range(count):
        claims.append(put(store, boundary(chain, index)))


def test_one_prefix_put_by_many_threads_is_stored_once(caches: CacheMaker) -> None:
    store = caches.open(replace(SETTINGS, staging_bytes=3 * BLOCK_BYTES))
    claims: list[Claim] = []

    in_threads(*[lambda: put_chain(store, "a", 8, claims)] * 4)

    assert {outcome(claim) for claim in claims} == {None}
    store.flush()
    assert store.statistics().boundaries_stored == 8
    assert all(is_readable(store, "a", index) for index in range(8))


def test_prefixes_put_at_the_cap_all_come_to_an_end(caches: CacheMaker) -> None:
    """Case 75, a4."""
    store = caches.open(SMALL)
    claims: list[Claim] = []

    in_threads(*[lambda name=name: put_chain(store, name, 8, claims) for name in "abc"])

    reasons = {refusal.reason for claim in claims if (refusal := outcome(claim)) is not None}
    assert reasons <= {NotStoredReason.BUDGET, NotStoredReason.PARENT}
    assert store.mode is Mode.WRITING
    assert core_of(store).overlay.reserved_bytes == core_of(store).staging_bytes == 0


def test_items_larger_than_the_staging_bound_pass_one_at_a_time(caches: CacheMaker) -> None:
    """Case 75."""
    store = caches.open(replace(SETTINGS, staging_bytes=1))
    claims: list[Claim] = []

    in_threads(*[lambda name=name: put_chain(store, name, 4, claims) for name in "abc"])

    assert {outcome(claim) for claim in claims} == {None}
    assert store.statistics().staging_bytes_high_water == 2 * BLOCK_BYTES


def test_closing_while_others_put_settles_everything_and_keeps_what_was_acknowledged(
    caches: CacheMaker,
) -> None:
    """Case 88."""
    store = caches.open(replace(SETTINGS, staging_bytes=3 * BLOCK_BYTES))
    stored: list[tuple[str, int, Claim]] = []

    def put_until_closed(chain: str) -> None:
        for index in range(1000):
            claim = store.claim(boundary(chain, index), request=1, producer="")
            if isinstance(claim, NotStored):
                assert claim.reason is NotStoredReason.CLOSED
                return
            store.reserve(claim)
            store.put(claim, tensors_for(claim), prefill_seconds=0.0)
            stored.append((chain, index, claim))

    def close() -> None:
        time.sleep(0.1)
        store.close()

    in_threads(lambda: put_until_closed("a"), lambda: put_until_closed("b"), close)

    outcomes = [(chain, index, outcome(claim)) for chain, index, claim in stored]
    reasons = {refusal.reason for _, _, refusal in outcomes if refusal is not None}
    assert reasons <= {NotStoredReason.CLOSED, NotStoredReason.PARENT}
    store = caches.open()
    acknowledged = [(chain, index) for chain, index, refusal in outcomes if refusal is None]
    assert acknowledged
    assert all(is_readable(store, chain, index) for chain, index in acknowledged)


def test_what_is_leased_can_be_read_whatever_is_evicted_meanwhile(caches: CacheMaker) -> None:
    """Case 58."""
    store = caches.open(SMALL)
    store_one(store, boundary("a", 0))
    is_over = threading.Event()
    reads = 0

    def write() -> None:
        try:
            for index in range(25):
                outcome(put(store, boundary(f"chain {index % 12}", 0)))
        finally:
            is_over.set()

    def read_all() -> None:
        nonlocal reads
        while not is_over.is_set():
            for index in range(12):
                chain = f"chain {index}"
                located, lease = leased(store, Kind.BLOCK, key_of(chain, 0))
                try:
                    if located is not None:
                        found = bytes_of(store, located)
                        assert found == expected_bytes(boundary(chain, 0), Kind.BLOCK)
                        reads += 1
                finally:
                    store.release(lease)

    in_threads(write, read_all)

    assert reads > 20


def test_stores_evictions_purges_and_damage_at_once_keep_the_invariants(
    caches: CacheMaker,
) -> None:
    store = caches.open(SMALL)

    def put_at_random(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(20):
            chain = chance.choice("abcd")
            index = len(live(store, Kind.BLOCK, chain, 20))
            namespace = OTHER_NAMESPACE if chain == "d" else NAMESPACE
            outcome(put(store, boundary(chain, index, namespace=namespace)))

    def break_at_random(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(18):
            chain, index, kind = chance.choice("abcd"), chance.randrange(4), chance.choice([*Kind])
            located = locate(store, kind, key_of(chain, index))
            match chance.randrange(6):
                case 0:
                    store.operator.purge(OTHER_NAMESPACE)
                case 1:
                    store.operator.report_bad(kind, key_of(chain, index), "a test")
                case 2:
                    store.operator.pin(key_of(chain, index))
                    store.operator.unpin(key_of(chain, index))
                case _ if located is not None and located.file is not None:
                    store.damage.quarantine(located, "a test")
                case _:
                    store.flush()

    in_threads(
        lambda: put_at_random(1),
        lambda: put_at_random(2),
        lambda: break_at_random(3),
    )

    assert store.mode is Mode.WRITING, store.mode_detail
