"""A restore that does not hold its caller: who reads, who may cancel, and what is let go of."""

# mlx's stubs and mlx-lm's caches leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import gc
import logging
import threading
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from cache_maker import Gate, HookedFiles, core_of, file_of, files_of, flip_byte, wait_until
from mlx import nn
from zoo import build, token_ids

from walkback.integration.binding import BoundModel
from walkback.integration.cache import Cache
from walkback.integration.leaves import walk_leaves
from walkback.integration.restoration import Restoration
from walkback.journal.errors import PayloadDamagedError
from walkback.journal.events import Missed, Record, Restored
from walkback.journal.words import Kind, MissReason
from walkback.restore.materialise import MutableAssembly
from walkback.restore.plan import Grid
from walkback.store.audit import Audit
from walkback.store.settings import MIB, StoreSettings
from walkback.store.store import MutableStore

PROMPT = token_ids(100)
TURN_ENDS = (21, 90)


@pytest.fixture
def cache(tmp_path: Path) -> Generator[Cache]:
    settings = StoreSettings(budget_bytes=256 * MIB, free_floor_bytes=0, staging_bytes=256 * MIB)
    store = MutableStore.open(tmp_path / "cache", settings, make_files=HookedFiles)
    grid = Grid(block_tokens=16, checkpoint_tokens=32, merge_tokens=4)
    with Cache(store, grid, salt="") as cache:
        yield cache
        files_of(store).hook = None
        gc.collect()
        # A reader lets go of what was cancelled when it has come that far.
        wait_until(lambda: is_let_go(cache), "everything is let go of")
        assert_let_go(cache)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("lfm2")


@pytest.fixture
def bound(cache: Cache, model: nn.Module) -> BoundModel:
    """A model whose prompt is stored."""
    bound = cache.bind(model)
    restorations: list[Restoration] = []
    list(
        bound.generate_step(
            PROMPT, max_tokens=1, turn_ends=TURN_ENDS, on_restore=restorations.append
        )
    )
    assert restorations[0].recording.wait() == []
    cache.flush()
    return bound


def assert_let_go(cache: Cache) -> None:
    """No file is leased, no key is held, no claim is read."""
    gc.collect()
    core = core_of(cache.store)
    with core.lock:
        assert not core.overlay.leased
        assert not core.overlay.held
        assert all(not each.claim.readers for each in core.overlay.in_flight.values())


def is_let_go(cache: Cache) -> bool:
    core = core_of(cache.store)
    with core.lock:
        return not core.overlay.leased and not core.overlay.held


def bytes_of_leaves(cache: Iterable[Any]) -> list[bytes]:
    found: list[bytes] = []
    for _, leaf in walk_leaves(list(cache)):
        arrays = leaf.cache if hasattr(leaf, "cache") else [leaf.keys, leaf.values]
        for array in arrays:
            rows = array if hasattr(leaf, "cache") else array[:, :, : leaf.offset]
            found.append(bytes(memoryview(cast(Any, mx.contiguous(rows).view(mx.uint8)))))
    return found


def test_a_caller_goes_on_while_its_restore_waits_for_the_disk(
    cache: Cache, bound: BoundModel
) -> None:
    expected = bound.restore(PROMPT)
    gate = Gate("open", "sidecars/")
    files_of(cache.store).hook = gate

    pending = bound.start_restore(PROMPT, turn_ends=TURN_ENDS)
    gate.await_thread()
    is_ready_early = pending.is_ready
    # The generating thread computes meanwhile.
    model: Any = bound.model
    mx.eval(model(mx.array([PROMPT[:8]]), cache=bound.make_cache()))
    gate.open()

    assert pending.wait(10)
    found = pending.finish()
    assert not is_ready_early
    assert (found.endpoint, found.reason) == (96, None)
    assert bytes_of_leaves(found.cache) == bytes_of_leaves(expected.cache)
    for each in (found, expected):
        each.recording.finish()


def test_a_wait_ends_when_its_time_is_over(cache: Cache, bound: BoundModel) -> None:
    gate = Gate("open", "sidecars/")
    files_of(cache.store).hook = gate
    pending = bound.start_restore(PROMPT)

    assert not pending.wait(0.05)

    gate.open()
    pending.finish().recording.finish()


def test_what_was_read_on_one_thread_goes_on_as_if_it_had_been_read_on_this_one(
    bound: BoundModel,
) -> None:
    direct, pending = bound.restore(PROMPT), bound.start_restore(PROMPT)
    model: Any = bound.model

    logits: list[bytes] = []
    for found in (direct, pending.finish()):
        output = model(mx.array([PROMPT[found.endpoint :]]), cache=found.cache)
        mx.eval(output)
        logits.append(bytes(memoryview(cast(Any, mx.contiguous(output).view(mx.uint8)))))
        found.recording.finish()

    assert logits[0] == logits[1]


def test_a_restore_may_begin_on_any_thread(bound: BoundModel) -> None:
    started: list[Any] = []
    thread = threading.Thread(target=lambda: started.append(bound.start_restore(PROMPT)))
    thread.start()
    thread.join()

    found = started[0].finish()

    found.recording.finish()
    assert found.endpoint == 96


def test_many_restores_of_one_prompt_are_under_way_at_once(bound: BoundModel) -> None:
    pending = [bound.start_restore(PROMPT) for _ in range(6)]

    found = [each.finish() for each in pending]

    for each in found:
        each.recording.finish()
    assert {each.endpoint for each in found} == {96}


# Giving up.


def test_cancelling_a_restore_that_is_ready_lets_go_of_its_files(
    cache: Cache, bound: BoundModel
) -> None:
    pending = bound.start_restore(PROMPT)
    assert pending.wait(10)
    assert not is_let_go(cache)

    pending.cancel()
    pending.cancel()

    assert is_let_go(cache)


def test_cancelling_a_restore_that_reads_lets_go_when_the_disk_has_answered(
    cache: Cache, bound: BoundModel
) -> None:
    gate = Gate("open", "sidecars/")
    files_of(cache.store).hook = gate
    pending = bound.start_restore(PROMPT)
    gate.await_thread()

    pending.cancel()

    assert not is_let_go(cache)
    gate.open()
    wait_until(lambda: is_let_go(cache), "the lease is released")


def test_a_cancelled_restore_is_a_miss_to_whoever_finishes_it_and_to_the_journal(
    cache: Cache, bound: BoundModel
) -> None:
    pending = bound.start_restore(PROMPT)
    pending.wait(10)
    pending.cancel()

    found = pending.finish()

    found.recording.finish()
    assert (found.endpoint, found.reason) == (0, MissReason.ABORTED)
    assert cache.statistics().misses == {"empty": 1, "aborted": 1}


def test_cancelling_what_is_finished_changes_nothing(cache: Cache, bound: BoundModel) -> None:
    pending = bound.start_restore(PROMPT)
    found = pending.finish()

    pending.cancel()

    assert found.endpoint == 96
    # Its recording still holds the tip.
    assert not is_let_go(cache)
    found.recording.finish()
    assert is_let_go(cache)


@pytest.mark.parametrize("round_index", range(20))
def test_a_cancel_at_any_moment_releases_once(
    round_index: int, cache: Cache, bound: BoundModel
) -> None:
    """A second release would end somebody else's lease of the same file."""
    other = bound.start_restore(PROMPT)
    assert other.wait(10)
    leased = dict(core_of(cache.store).overlay.leased)
    pending = bound.start_restore(PROMPT)
    threading.Event().wait(round_index * 0.0003)

    pending.cancel()

    wait_until(lambda: pending.is_ready, "its reader is done")
    assert dict(core_of(cache.store).overlay.leased) == leased
    other.cancel()


def test_a_restore_that_nobody_finishes_or_cancels_lets_go_when_it_is_garbage(
    cache: Cache, bound: BoundModel
) -> None:
    pending = bound.start_restore(PROMPT)
    assert pending.wait(10)
    assert not is_let_go(cache)

    del pending
    gc.collect()
    cache.statistics()

    assert is_let_go(cache)


# What goes wrong.


@pytest.mark.parametrize(
    "call",
    [
        "walkback.store.store.MutableStore.hold",
        "walkback.store.store.MutableStore.release",
        "walkback.store.store.MutableStore.note_restored",
        "walkback.integration.depths.MutableDepths.note",
        "walkback.integration.recording.MutableRecording.__init__",
    ],
)
@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_restore_that_fails_after_it_was_read_keeps_nothing(
    call: str,
    is_adopted: bool,
    cache: Cache,
    bound: BoundModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pending = bound.start_restore(PROMPT, beyond=90 if is_adopted else 0)
    mine = bound.make_cache()
    assert pending.wait(10)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        if call.endswith("release"):
            # Then it is the garbage collector that lets go, and a log keeps the frames.
            patch.setattr(logging.getLogger("walkback"), "disabled", True)
        with contextlib.suppress(RuntimeError):
            found = pending.adopt(mine, 90) if is_adopted else pending.finish()
            found.recording.finish()
    pending.cancel()
    del pending
    gc.collect()
    cache.statistics()

    assert is_let_go(cache)


def test_a_reader_walks_back_by_itself(cache: Cache, bound: BoundModel) -> None:
    key = next(link.key for link in bound.chain(PROMPT) if link.end == 96)
    flip_byte(cache.store.files.root / file_of(cache.store, Kind.SIDECAR, key).path)

    found = bound.start_restore(PROMPT).finish()

    found.recording.finish()
    assert (found.endpoint, found.walkbacks) == (90, 1)


def test_a_state_that_turns_out_not_to_be_finite_walks_back_on_the_finishing_thread(
    bound: BoundModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = MutableAssembly.finish

    def finish(self: MutableAssembly, make_cache: Any) -> list[Any]:
        if self.endpoint == 96:
            raise PayloadDamagedError("slot 0 holds a value that is not finite")
        return real(self, make_cache)

    monkeypatch.setattr(MutableAssembly, "finish", finish)
    pending = bound.start_restore(PROMPT)
    assert pending.wait(10)

    found = pending.finish()

    found.recording.finish()
    assert (found.endpoint, found.walkbacks) == (90, 1)


def test_a_reader_that_fails_is_a_miss(
    cache: Cache, bound: BoundModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for the buffers")

    monkeypatch.setattr("walkback.integration.restoration.MutableAssembly", fail)

    found = bound.start_restore(PROMPT).finish()

    found.recording.finish()
    assert (found.endpoint, found.reason) == (0, MissReason.FAILED)
    assert "no room" in found.detail
    assert is_let_go(cache)


def test_a_restore_that_is_finished_after_the_close_has_what_it_read(
    cache: Cache, bound: BoundModel
) -> None:
    pending = bound.start_restore(PROMPT)
    assert pending.wait(10)

    cache.close()

    found = pending.finish()
    found.recording.finish()
    assert found.endpoint == 96


def test_a_restore_that_begins_after_the_close_is_a_miss_and_starts_no_thread(
    cache: Cache, bound: BoundModel
) -> None:
    cache.close()
    threads = set(threading.enumerate())

    found = bound.start_restore(PROMPT).finish()

    found.recording.finish()
    assert found.reason is MissReason.CLOSED
    assert set(threading.enumerate()) <= threads


def test_a_close_does_not_wait_for_a_restore_that_nobody_finishes(
    cache: Cache, bound: BoundModel
) -> None:
    pending = [bound.start_restore(PROMPT) for _ in range(4)]

    cache.close()

    for each in pending:
        each.cancel()


def test_each_restore_is_told_to_the_journal_once(cache: Cache, bound: BoundModel) -> None:
    root = cache.store.files.root
    bound.start_restore(PROMPT).finish().recording.finish()
    bound.start_restore(token_ids(100, seed=9)).finish().recording.finish()

    cache.close()

    with Audit.open(root) as audit:
        events = [each.event for each in audit.records() if isinstance(each, Record)]
    told = [each for each in events if isinstance(each, Restored | Missed)]
    assert [type(each) for each in told] == [Missed, Restored, Missed]


# A caller that has a cache of its own.


@pytest.mark.parametrize(("beyond", "endpoint"), [(0, 96), (90, 96), (95, 96)])
def test_what_is_deeper_than_the_callers_own_cache_is_read(
    beyond: int, endpoint: int, bound: BoundModel
) -> None:
    found = bound.start_restore(PROMPT, beyond=beyond).finish()

    found.recording.finish()
    assert found.endpoint == endpoint


@pytest.mark.parametrize("beyond", [96, 99])
def test_what_is_not_deeper_than_the_callers_own_cache_is_not_read(
    beyond: int, cache: Cache, bound: BoundModel
) -> None:
    pending = bound.start_restore(PROMPT, beyond=beyond)
    assert pending.wait(10)
    assert is_let_go(cache)

    found = pending.finish()

    found.recording.finish()
    assert (found.endpoint, found.reason) == (0, MissReason.IN_MEMORY)


def test_a_cache_of_the_callers_own_is_recorded_from_where_it_stands(
    cache: Cache, bound: BoundModel
) -> None:
    """Nothing of the first hundred tokens of this prompt was ever told to walkback."""
    prompt = token_ids(140, seed=7)
    model: Any = bound.model
    mine = bound.make_cache()
    mx.eval(model(mx.array([prompt[:70]]), cache=mine))

    found = bound.start_restore(prompt, turn_ends=[120], beyond=70).adopt(mine, 70)
    position = 70
    for stop in found.stops:
        model(mx.array([prompt[position:stop]]), cache=found.cache)
        mx.eval([leaf.state for leaf in found.cache])
        assert found.recording.stop(stop, found.cache) is None
        position = stop
    found.recording.finish()
    assert found.recording.wait() == []

    assert (found.cache, found.endpoint, found.stops) == (mine, 70, (96, 120, 128))
    again = bound.restore(prompt[:121])
    again.recording.finish()
    assert again.endpoint == 120
    assert bytes_of_leaves(again.cache)[0] == bytes_of_leaves_at(bound, prompt, 120)[0]


def test_a_prompt_that_memory_serves_is_used_on_disk_too(cache: Cache, bound: BoundModel) -> None:
    """Or a conversation would be evicted from the disk for being asked for all the time."""
    at_32, at_96 = (bound.chain(PROMPT)[end // 16 - 1].key for end in (32, 96))
    touches: list[list[bytes]] = []
    for prompt, endpoint in ((PROMPT[:60], 40), (PROMPT, 99), (PROMPT[:60], 59)):
        request = bound.start_restore(prompt, beyond=endpoint).adopt(bound.make_cache(), endpoint)
        request.recording.finish()
        with core_of(cache.store).lock:
            touches.append(list(core_of(cache.store).overlay.touches))

    assert touches == [[at_32], [at_32, at_96], [at_96, at_32]]


def bytes_of_leaves_at(bound: BoundModel, prompt: list[int], stop: int) -> list[bytes]:
    """What plain prefill leaves in a cache at a position; lfm2 is free of plans."""
    model: Any = bound.model
    cache = bound.make_cache()
    mx.eval(model(mx.array([prompt[:stop]]), cache=cache))
    return bytes_of_leaves(cache)


def test_a_cache_of_the_callers_own_that_came_from_here_goes_on_with_its_plan(
    bound: BoundModel,
) -> None:
    first = bound.restore(PROMPT[:91])
    first.recording.finish()

    found = bound.start_restore(PROMPT, turn_ends=TURN_ENDS, beyond=90).adopt(first.cache, 90)

    found.recording.finish()
    assert not found.mixed_plan
