"""The facade, on tiny models of real architectures: what a caller sees, and what the disk gets."""

# mlx's stubs, mlx-lm's caches and its tokenizer wrapper leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import errno
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from cache_maker import Failing, Gate, HookedFiles, core_of, file_of, files_of, flip_byte
from mlx import nn
from mlx_lm.generate import generate_step as mlx_generate_step
from mlx_lm.generate import stream_generate as mlx_stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from zoo import CONFIGS, VOCAB, build, token_ids

import walkback
from walkback.integration.binding import BoundModel
from walkback.integration.cache import Cache
from walkback.integration.leaves import walk_leaves
from walkback.integration.restoration import Restoration
from walkback.integration.tiny import build_tiny_model, write_tiny_model
from walkback.journal.events import Event, Missed, NotStored, Record
from walkback.journal.words import Kind, MissReason, NotStoredReason
from walkback.restore.plan import Grid
from walkback.store.audit import Audit
from walkback.store.core import Mode
from walkback.store.settings import MIB, StoreSettings
from walkback.store.store import MutableStore

ROOT = Path(__file__).parent.parent

# lfm2, the quickest of the hybrids, gives the same bits under every plan on a CPU, so its stride
# may be this small.
BLOCK_TOKENS = 16
STRIDE = 32
PROMPT = token_ids(5 * STRIDE + 3)

GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "sliding_window_pattern": 3,
}


class Caches:
    """Opens caches over files that do as a test says, and holds each to its invariants."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "cache"
        self._opened: list[Cache] = []

    def open(
        self,
        *,
        block_tokens: int = BLOCK_TOKENS,
        checkpoint_tokens: int = STRIDE,
        staging_bytes: int | None = None,
        salt: str = "",
    ) -> Cache:
        settings = StoreSettings(
            budget_bytes=256 * MIB,
            free_floor_bytes=0,
            staging_bytes=256 * MIB if staging_bytes is None else staging_bytes,
            is_staging_fixed=staging_bytes is not None,
        )
        store = MutableStore.open(self.root, settings, make_files=HookedFiles)
        grid = Grid(block_tokens=block_tokens, checkpoint_tokens=checkpoint_tokens)
        cache = Cache(store, grid, salt=salt)
        self._opened.append(cache)
        return cache

    def close(self, *, is_checked: bool) -> None:
        for cache in self._opened:
            files_of(cache.store).hook = None
            if is_checked and cache.store.mode is Mode.WRITING:
                cache.flush()
                cache.store.settle_deletions()
                cache.flush()
                assert cache.violations() == []
            cache.close()

    def events(self) -> list[Event]:
        """Every event of the closed cache."""
        with Audit.open(self.root) as audit:
            return [each.event for each in audit.records() if isinstance(each, Record)]


@pytest.fixture
def caches(tmp_path: Path) -> Generator[Caches]:
    maker = Caches(tmp_path)
    is_checked = False
    try:
        yield maker
        is_checked = True
    finally:
        maker.close(is_checked=is_checked)


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {name: build(name) for name in ("lfm2", "llama", "rwkv7")}


@pytest.fixture
def cache(caches: Caches) -> Cache:
    return caches.open()


@pytest.fixture
def bound(cache: Cache, models: dict[str, nn.Module]) -> BoundModel:
    return cache.bind(models["lfm2"])


def run(
    bound: BoundModel, prompt: Sequence[int], *, max_tokens: int = 2, **options: Any
) -> tuple[Restoration, list[int]]:
    """Generate greedily, and wait until all of it is stored or refused."""
    restorations: list[Restoration] = []
    tokens = [
        int(token)
        for token, _ in bound.generate_step(
            prompt, max_tokens=max_tokens, on_restore=restorations.append, **options
        )
    ]
    restorations[0].recording.wait()
    return restorations[0], tokens


def plain(
    model: Any, prompt: Sequence[int], *, step: int = STRIDE, max_tokens: int = 2, **options: Any
) -> list[int]:
    """What mlx-lm alone generates."""
    generate: Any = mlx_generate_step
    generated = generate(
        mx.array(list(prompt)), model, prefill_step_size=step, max_tokens=max_tokens, **options
    )
    return [int(token) for token, _ in generated]


def restored(bound: BoundModel, prompt: Sequence[int]) -> Restoration:
    """A restore whose request ends there."""
    restoration = bound.restore(prompt)
    restoration.recording.finish()
    return restoration


def prefill(bound: BoundModel, restoration: Restoration, prompt: list[int], stop: int) -> None:
    """Go on with a request's cache up to a stop."""
    model: Any = bound.model
    start = restoration.recording.position
    model(mx.array([prompt[start:stop]]), cache=restoration.cache)
    mx.eval([leaf.state for leaf in restoration.cache])


def payload_files(cache: Cache) -> dict[str, int]:
    """Every payload file with its size."""
    root = cache.store.files.root
    return {
        str(path.relative_to(root)): path.stat().st_size
        for folder in ("blocks", "sidecars", "staging", "quarantine")
        for path in (root / folder).rglob("*")
        if path.is_file()
    }


def sidecar_path(cache: Cache, bound: BoundModel, prompt: Sequence[int], end: int) -> Path:
    key = next(link.key for link in bound.chain(prompt) if link.end == end)
    return cache.store.files.root / file_of(cache.store, Kind.SIDECAR, key).path


def sidecar_ends(cache: Cache) -> list[int]:
    return sorted(entry.end for entry in cache.store.entries(Kind.SIDECAR))


def bytes_of_leaves(cache: Iterable[Any]) -> list[bytes]:
    """All that a cache of an mlx-lm model holds, up to its position."""
    found: list[bytes] = []
    for _, leaf in walk_leaves(list(cache)):
        arrays = leaf.cache if hasattr(leaf, "cache") else [leaf.keys, leaf.values]
        for array in arrays:
            rows = array if hasattr(leaf, "cache") else array[:, :, : leaf.offset]
            found.append(bytes_of_array(rows))
    return found


def bytes_of_array(array: mx.array) -> bytes:
    return bytes(memoryview(cast(Any, mx.contiguous(array).view(mx.uint8))))


# Endpoints.


@pytest.mark.parametrize(
    ("block_tokens", "checkpoint_tokens"), [(16, 16), (16, 32), (8, 32), (16, 48)]
)
@pytest.mark.parametrize("name", ["lfm2", "rwkv7"])
def test_a_prompt_resumes_at_the_last_checkpoint_that_leaves_a_token_to_compute(
    name: str,
    block_tokens: int,
    checkpoint_tokens: int,
    caches: Caches,
    models: dict[str, nn.Module],
) -> None:
    prompt = PROMPT[: 3 * checkpoint_tokens + 3]
    cache = caches.open(block_tokens=block_tokens, checkpoint_tokens=checkpoint_tokens)
    bound = cache.bind(models[name])
    run(bound, prompt)

    endpoints = {n: restored(bound, prompt[:n]).endpoint for n in range(1, len(prompt) + 1)}

    assert endpoints == {
        n: (n - 1) // checkpoint_tokens * checkpoint_tokens for n in range(1, len(prompt) + 1)
    }


@pytest.mark.parametrize(("block_tokens", "checkpoint_tokens"), [(16, 16), (16, 32), (8, 32)])
def test_a_model_without_point_state_resumes_after_the_last_block_that_leaves_a_token(
    block_tokens: int, checkpoint_tokens: int, caches: Caches, models: dict[str, nn.Module]
) -> None:
    prompt = PROMPT[: 3 * checkpoint_tokens + 3]
    cache = caches.open(block_tokens=block_tokens, checkpoint_tokens=checkpoint_tokens)
    bound = cache.bind(models["llama"])
    run(bound, prompt)

    endpoints = {n: restored(bound, prompt[:n]).endpoint for n in range(1, len(prompt) + 1)}

    assert endpoints == {
        n: (n - 1) // block_tokens * block_tokens for n in range(1, len(prompt) + 1)
    }


@pytest.mark.parametrize("token_count", [32, 33, 63, 64, 65, 96, 97])
@pytest.mark.parametrize("name", ["lfm2", "rwkv7"])
def test_a_prompt_stores_a_checkpoint_at_each_multiple_below_its_last_token(
    name: str, token_count: int, cache: Cache, models: dict[str, nn.Module]
) -> None:
    """At the end of a prompt mlx-lm has fed one token more, which rwkv7's state cannot tell."""
    run(cache.bind(models[name]), PROMPT[:token_count])

    assert sidecar_ends(cache) == list(range(STRIDE, token_count, STRIDE))
    assert cache.statistics().not_stored == {}


def test_the_last_checkpoint_is_there_after_a_restart(
    caches: Caches, models: dict[str, nn.Module]
) -> None:
    cache = caches.open()
    run(cache.bind(models["lfm2"]), PROMPT[:97])
    cache.close()

    found = restored(caches.open().bind(models["lfm2"]), PROMPT[:97])

    assert (found.endpoint, found.uncached, found.reason) == (96, 1, None)


def test_closing_stores_what_was_captured(caches: Caches, models: dict[str, nn.Module]) -> None:
    cache = caches.open()
    bound = cache.bind(models["lfm2"])
    list(bound.generate_step(PROMPT, max_tokens=1))

    cache.close()

    assert restored(caches.open().bind(models["lfm2"]), PROMPT).endpoint == 5 * STRIDE


@pytest.mark.parametrize("ruin", [Path.unlink, flip_byte])
def test_without_its_newest_sidecar_a_prompt_resumes_one_checkpoint_earlier(
    ruin: Callable[[Path], None], cache: Cache, bound: BoundModel
) -> None:
    run(bound, PROMPT)
    ruin(sidecar_path(cache, bound, PROMPT, 5 * STRIDE))

    first, second = restored(bound, PROMPT), restored(bound, PROMPT)

    assert (first.endpoint, first.walkbacks) == (4 * STRIDE, 1)
    assert (second.endpoint, second.walkbacks) == (4 * STRIDE, 0)


def test_a_missing_sidecar_is_repaired_by_the_next_run(cache: Cache, bound: BoundModel) -> None:
    run(bound, PROMPT)
    before = set(payload_files(cache))
    sidecar_path(cache, bound, PROMPT, 5 * STRIDE).unlink()

    run(bound, PROMPT)

    assert restored(bound, PROMPT).endpoint == 5 * STRIDE
    new = set(payload_files(cache)) - before
    assert len(new) == 1
    assert new.pop().startswith("sidecars/")


def test_every_leaf_of_a_restored_cache_stands_at_the_endpoint(
    cache: Cache, models: dict[str, nn.Module]
) -> None:
    bound = cache.bind(models["llama"])
    run(bound, PROMPT)

    found = restored(bound, PROMPT)

    offsets = {int(leaf.offset) for _, leaf in walk_leaves(found.cache)}
    assert offsets == {found.endpoint} == {5 * STRIDE}


def test_an_endpoint_inside_a_stride_realigns_at_the_next_stop(
    cache: Cache, models: dict[str, nn.Module]
) -> None:
    bound = cache.bind(models["llama"])
    run(bound, PROMPT)
    other = [*PROMPT[:50], *token_ids(60, seed=9)]

    found, tokens = run(bound, other)

    assert found.endpoint == 48
    assert tokens == plain(models["llama"], other)
    ends = sorted(entry.end for entry in cache.store.entries(Kind.BLOCK))
    assert ends == sorted([*range(16, 161, 16), 64, 80, 96])


# What is written, and how often.


def test_a_repeated_hit_writes_no_payload_byte(cache: Cache, bound: BoundModel) -> None:
    run(bound, PROMPT)
    files, statistics = payload_files(cache), cache.statistics()

    found, _ = run(bound, PROMPT)
    cache.flush()

    assert found.endpoint == 5 * STRIDE
    assert payload_files(cache) == files
    assert cache.statistics().payload_bytes_written == statistics.payload_bytes_written > 0


@pytest.mark.parametrize("name", ["lfm2", "llama", "rwkv7"])
def test_the_bytes_of_a_prompt_grow_linearly(
    name: str, caches: Caches, models: dict[str, nn.Module]
) -> None:
    cache = caches.open()
    bound = cache.bind(models[name])
    sizes: list[int] = []
    for strides, seed in ((1, 11), (2, 12), (6, 13)):
        before = sum(payload_files(cache).values())
        run(bound, token_ids(strides * STRIDE + 1, seed=seed))
        sizes.append(sum(payload_files(cache).values()) - before)

    assert sizes[0] > 0
    assert sizes == [sizes[0], 2 * sizes[0], 6 * sizes[0]]


def test_a_boundary_that_two_requests_reach_is_written_once(
    cache: Cache, bound: BoundModel
) -> None:
    gate = Gate("create", "staging/")
    files_of(cache.store).hook = gate
    requests = [bound.restore(PROMPT), bound.restore(PROMPT)]
    for request in requests:
        prefill(bound, request, PROMPT, STRIDE)
        assert request.recording.stop(STRIDE, request.cache) is None
    gate.open()

    refusals = [request.recording.wait() for request in requests]

    assert refusals == [[], []]
    cache.flush()
    assert cache.statistics().boundaries_stored == 1
    assert len(payload_files(cache)) == STRIDE // BLOCK_TOKENS + 1
    for request in requests:
        request.recording.finish()


def test_the_second_request_goes_on_from_a_boundary_that_the_first_still_stores(
    cache: Cache, bound: BoundModel
) -> None:
    gate = Gate("create", "staging/")
    files_of(cache.store).hook = gate
    first = bound.restore(PROMPT)
    prefill(bound, first, PROMPT, STRIDE)
    first.recording.stop(STRIDE, first.cache)
    gate.await_thread()

    second = bound.restore(PROMPT)
    prefill(bound, second, PROMPT, 2 * STRIDE)
    second.recording.stop(2 * STRIDE, second.cache)
    gate.open()

    assert second.endpoint == STRIDE
    assert [*first.recording.wait(), *second.recording.wait()] == []
    first.recording.finish()
    second.recording.finish()
    assert sidecar_ends(cache) == [STRIDE, 2 * STRIDE]


def stride_bytes(bound: BoundModel) -> int:
    assert bound.layout is not None
    return bound.layout.block_nbytes(0, STRIDE) + bound.layout.point_nbytes()


@pytest.mark.parametrize("strides", [4, 12])
def test_memory_that_waits_for_the_disk_stays_within_its_bound(
    strides: int, caches: Caches, models: dict[str, nn.Module]
) -> None:
    probe = caches.open()
    bound_bytes = stride_bytes(probe.bind(models["lfm2"])) * 3 // 2
    probe.close()
    cache = caches.open(staging_bytes=bound_bytes)
    files_of(cache.store).hook = slow_sync

    run(cache.bind(models["lfm2"]), token_ids(strides * STRIDE + 1))

    statistics = cache.statistics()
    assert bound_bytes * 2 // 3 <= statistics.staging_bytes_high_water <= bound_bytes
    assert statistics.boundaries_stored == strides
    assert statistics.backpressure_seconds > 0
    assert statistics.staging_bytes == 0


def slow_sync(step: str, _name: str) -> None:
    if step == "sync":
        time.sleep(0.005)


def test_a_checkpoint_larger_than_the_bound_passes_alone(
    caches: Caches, models: dict[str, nn.Module]
) -> None:
    cache = caches.open(staging_bytes=1)
    bound = cache.bind(models["lfm2"])

    run(bound, PROMPT)

    assert cache.statistics().staging_bytes_high_water == stride_bytes(bound)
    assert sidecar_ends(cache) == [1 * STRIDE, 2 * STRIDE, 3 * STRIDE, 4 * STRIDE, 5 * STRIDE]


def test_an_abort_waits_until_the_store_has_let_go_of_the_buffers(
    cache: Cache, bound: BoundModel
) -> None:
    gate = Gate("create", "staging/")
    files_of(cache.store).hook = gate
    request = bound.restore(PROMPT)
    prefill(bound, request, PROMPT, STRIDE)
    request.recording.stop(STRIDE, request.cache)
    gate.await_thread()
    is_held = cache.statistics().staging_bytes
    opener = threading.Timer(0.1, gate.open)
    opener.start()

    request.recording.abort()

    assert is_held == stride_bytes(bound)
    assert not opener.is_alive() or opener.finished.is_set()
    assert cache.statistics().staging_bytes == 0
    assert sidecar_ends(cache) == [STRIDE]


def test_a_recording_that_is_over_stores_nothing_and_says_so(
    cache: Cache, bound: BoundModel
) -> None:
    request = restored(bound, PROMPT)
    prefill(bound, request, PROMPT, STRIDE)

    refusal = request.recording.stop(STRIDE, request.cache)

    assert refusal is not None
    assert refusal.reason is NotStoredReason.ABORTED
    assert payload_files(cache) == {}


@pytest.mark.parametrize("position", [0, len(PROMPT) + 1])
def test_a_stop_at_which_no_prefix_of_the_prompt_ends_is_refused(
    position: int, cache: Cache, bound: BoundModel
) -> None:
    request = bound.restore(PROMPT)

    refusal = request.recording.stop(position, request.cache)

    request.recording.finish()
    assert refusal is not None
    assert refusal.reason is NotStoredReason.OFF_GRID
    assert cache.statistics().not_stored == {"off_grid": 1}


def test_a_refusal_that_came_early_is_still_told_at_the_end(
    cache: Cache, bound: BoundModel
) -> None:
    """The recording forgot what was refused before its next stop."""
    files_of(cache.store).hook = Failing("write", errno.ENOSPC, path="staging/", times=1)
    request = bound.restore(PROMPT)
    prefill(bound, request, PROMPT, STRIDE)
    request.recording.stop(STRIDE, request.cache)
    cache.flush()
    prefill(bound, request, PROMPT, 2 * STRIDE)
    request.recording.stop(2 * STRIDE, request.cache)

    reasons = [each.reason for each in request.recording.wait()]

    request.recording.finish()
    assert reasons == [NotStoredReason.DISK_FULL, NotStoredReason.PARENT]
    assert [each.reason for each in request.recording.wait()] == reasons


# Who may change what.


def test_a_restored_cache_is_the_callers_and_changes_nothing_that_is_stored(
    bound: BoundModel,
) -> None:
    run(bound, PROMPT)
    first, second = restored(bound, PROMPT), restored(bound, PROMPT)
    before = bytes_of_leaves(second.cache)

    prefill(bound, first, PROMPT, len(PROMPT))

    assert bytes_of_leaves(second.cache) == before
    assert bytes_of_leaves(restored(bound, PROMPT).cache) == before
    assert bytes_of_leaves(first.cache) != before


def test_a_cache_that_goes_on_changes_nothing_that_was_captured(
    cache: Cache, bound: BoundModel
) -> None:
    """The writer is held up until the live cache is far beyond the captured stop."""
    run(bound, PROMPT)
    expected = bytes_of_leaves(restored(bound, PROMPT[: STRIDE + 1]).cache)
    cache.store.operator.purge(bound.namespace)
    gate = Gate("create", "staging/")
    files_of(cache.store).hook = gate
    request = bound.restore(PROMPT)
    prefill(bound, request, PROMPT, STRIDE)
    request.recording.stop(STRIDE, request.cache)
    model: Any = bound.model
    for token in PROMPT[STRIDE : STRIDE + 8]:
        mx.eval(model(mx.array([[token]]), cache=request.cache))

    gate.open()
    request.recording.abort()

    assert bytes_of_leaves(restored(bound, PROMPT[: STRIDE + 1]).cache) == expected


# Refusals to store what is not sound.


def test_state_that_is_not_finite_is_refused(cache: Cache, bound: BoundModel) -> None:
    request = bound.restore(PROMPT)
    prefill(bound, request, PROMPT, STRIDE)
    slots = next(leaf.cache for _, leaf in walk_leaves(request.cache) if hasattr(leaf, "cache"))
    slots[0] = mx.where(mx.arange(slots[0].shape[-1]) == 3, mx.array(float("nan")), slots[0])
    slots[0] = slots[0].astype(mx.bfloat16)

    refusal = request.recording.stop(STRIDE, request.cache)

    request.recording.finish()
    assert refusal is not None
    assert refusal.reason is NotStoredReason.NON_FINITE
    assert payload_files(cache) == {}
    assert core_of(cache.store).staging_bytes == 0


def test_layers_that_stand_at_different_positions_are_refused(
    cache: Cache, bound: BoundModel
) -> None:
    request = bound.restore(PROMPT)
    prefill(bound, request, PROMPT, STRIDE)
    leaf = [leaf for _, leaf in walk_leaves(request.cache) if hasattr(leaf, "offset")][-1]
    leaf.offset -= 1

    refusal = request.recording.stop(STRIDE, request.cache)

    request.recording.finish()
    assert refusal is not None
    assert refusal.reason is NotStoredReason.POSITION
    assert "31" in refusal.detail and "32" in refusal.detail
    assert payload_files(cache) == {}


def test_a_cache_of_another_layout_is_refused(
    cache: Cache, bound: BoundModel, models: dict[str, nn.Module]
) -> None:
    request = bound.restore(PROMPT)

    refusal = request.recording.stop(STRIDE, make_prompt_cache(models["llama"]))

    request.recording.finish()
    assert refusal is not None
    assert refusal.reason is NotStoredReason.LAYOUT
    assert payload_files(cache) == {}


def test_a_capture_that_fails_in_an_unforeseen_way_does_not_stop_the_request(
    cache: Cache, bound: BoundModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such stream")

    monkeypatch.setattr("walkback.integration.recording.capture", fail)

    _, tokens = run(bound, PROMPT)

    assert tokens == plain(bound.model, PROMPT)
    assert cache.statistics().not_stored == {"failed": 5}
    assert core_of(cache.store).staging_bytes == 0
    assert not core_of(cache.store).overlay.in_flight


def test_what_could_not_be_given_back_is_given_back_when_the_recording_ends(
    cache: Cache, bound: BoundModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that nobody settles keeps its blocks from ever being stored, and its memory."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    restoration = bound.restore(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr("walkback.integration.recording.capture", fail)
        patch.setattr(MutableStore, "cancel", fail)
        with pytest.raises(RuntimeError, match="injected"):
            restoration.recording.stop(STRIDE, restoration.cache)
    assert core_of(cache.store).overlay.in_flight

    restoration.recording.finish()

    core = core_of(cache.store)
    assert not core.overlay.in_flight and not core.overlay.held
    assert core.staging_bytes == 0


def test_a_model_whose_cache_cannot_be_stored_generates_and_says_why_it_stores_nothing(
    caches: Caches,
) -> None:
    model = build_tiny_model(GEMMA3)
    cache = caches.open()

    bound = cache.bind(model)
    found, tokens = run(bound, PROMPT)

    assert tokens == plain(model, PROMPT)
    assert (found.endpoint, found.reason) == (0, MissReason.UNSUPPORTED_LAYOUT)
    assert "RotatingKVCache" in found.detail
    assert payload_files(cache) == {}
    assert cache.statistics().not_stored == {"unsupported_layout": 5}
    cache.close()
    events = caches.events()
    refusals = [each for each in events if isinstance(each, NotStored)]
    assert {each.reason for each in refusals} == {NotStoredReason.UNSUPPORTED_LAYOUT}
    assert "RotatingKVCache" in refusals[0].detail
    missed = [each.reason for each in events if isinstance(each, Missed)]
    assert missed == [MissReason.UNSUPPORTED_LAYOUT]


# Misses.


def test_a_restore_that_fails_in_an_unforeseen_way_is_a_miss_in_the_journal(
    caches: Caches, cache: Cache, bound: BoundModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(bound, PROMPT)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("walkback.integration.restoration.MutableAssembly", fail)

    found, tokens = run(bound, PROMPT)

    assert (found.endpoint, found.reason) == (0, MissReason.FAILED)
    assert "out of memory" in found.detail
    assert tokens == plain(bound.model, PROMPT)
    cache.close()
    last = [each for each in caches.events() if isinstance(each, Missed)][-1]
    assert (last.reason, last.prompt_tokens) == (MissReason.FAILED, len(PROMPT))


def test_another_tenant_gets_nothing_and_the_same_one_does_after_a_restart(
    caches: Caches, models: dict[str, nn.Module]
) -> None:
    cache = caches.open(salt="one")
    run(cache.bind(models["lfm2"]), PROMPT)
    cache.close()
    cache = caches.open(salt="two")
    other = restored(cache.bind(models["lfm2"]), PROMPT)
    cache.close()

    same = restored(caches.open(salt="one").bind(models["lfm2"]), PROMPT)

    assert (other.endpoint, other.reason) == (0, MissReason.OTHER_NAMESPACE)
    assert other.detail.endswith("differs in salt")
    assert same.endpoint == 5 * STRIDE


def test_weights_that_changed_under_the_same_name_are_a_miss_that_says_so(
    caches: Caches, tmp_path: Path
) -> None:
    cache = caches.open()
    found: list[Restoration] = []
    for seed in (0, 1):
        write_tiny_model(tmp_path / "model", config=CONFIGS["lfm2"], seed=seed)
        model = build_tiny_model(CONFIGS["lfm2"], seed=seed)
        bound = cache.bind(model, tmp_path / "model")
        found += [run(bound, PROMPT)[0], restored(bound, PROMPT)]

    assert [each.endpoint for each in found] == [0, 5 * STRIDE, 0, 5 * STRIDE]
    assert found[2].reason is MissReason.OTHER_NAMESPACE
    assert found[2].detail.endswith("differs in weights")


def test_an_adapter_is_part_of_who_may_use_an_entry(
    caches: Caches, models: dict[str, nn.Module], tmp_path: Path
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    weights = {"a": mx.ones((2, 2))}
    mx.save_safetensors(str(tmp_path / "adapter" / "adapters.safetensors"), weights)
    cache = caches.open()
    run(cache.bind(models["lfm2"]), PROMPT)

    found = restored(cache.bind(models["lfm2"], adapter=tmp_path / "adapter"), PROMPT)

    assert found.reason is MissReason.OTHER_NAMESPACE
    assert found.detail.endswith("differs in adapter")


def test_another_stride_serves_what_was_stored_and_says_that_plans_are_mixed(
    caches: Caches, models: dict[str, nn.Module]
) -> None:
    cache = caches.open(checkpoint_tokens=STRIDE)
    run(cache.bind(models["lfm2"]), PROMPT)
    cache.close()

    found = restored(caches.open(checkpoint_tokens=2 * STRIDE).bind(models["lfm2"]), PROMPT)

    assert found.endpoint == 5 * STRIDE
    assert found.mixed_plan


def test_what_happened_is_in_the_statistics(cache: Cache, bound: BoundModel) -> None:
    run(bound, PROMPT)
    run(bound, PROMPT)
    cache.flush()

    statistics = cache.statistics()

    assert (statistics.restores, statistics.sidecars_read) == (1, 1)
    assert statistics.misses == {"empty": 1}
    assert statistics.boundaries_stored == 5
    assert statistics.holdings.sidecar_count == 5
    assert statistics.holdings.block_count == 10
    assert (statistics.events["Restored"], statistics.events["Missed"]) == (1, 1)


# Generation.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_bits": 4}, "kv_bits"),
        ({"draft_model": object()}, "draft_model"),
        ({"prompt_cache": []}, "prompt_cache"),
        ({"max_kv_size": 64}, "max_kv_size"),
        ({"input_embeddings": mx.zeros((1, 1))}, "input_embeddings"),
        ({"prefill_step_size": 2 * STRIDE}, "prefill_step_size is 64, and checkpoint_tokens 32"),
    ],
)
def test_an_option_that_changes_the_cache_is_refused_by_name(
    options: dict[str, Any], words: str, bound: BoundModel
) -> None:
    with pytest.raises(walkback.SettingsError, match=words):
        next(bound.generate_step(PROMPT, **options))
    with pytest.raises(walkback.SettingsError, match=words):
        next(bound.stream_generate(object(), PROMPT, **options))


def test_options_that_say_what_is_so_anyway_are_taken(bound: BoundModel) -> None:
    _, tokens = run(
        bound, PROMPT, prefill_step_size=STRIDE, kv_bits=None, max_kv_size=None, prompt_cache=None
    )

    assert tokens == plain(bound.model, PROMPT)


@pytest.mark.parametrize("as_array", [False, True])
def test_a_prompt_is_a_list_or_an_array_of_token_ids(as_array: bool, bound: BoundModel) -> None:
    prompt: Any = mx.array(PROMPT) if as_array else PROMPT

    assert run(bound, prompt)[1] == run(bound, prompt)[1] == plain(bound.model, PROMPT)


def test_a_prompt_without_tokens_or_with_two_dimensions_is_an_error(bound: BoundModel) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        next(bound.generate_step([]))
    with pytest.raises(ValueError, match="one dimension"):
        next(bound.generate_step(mx.array([[1, 2]])))


def test_logits_processors_see_the_whole_prompt_after_a_restore_too(bound: BoundModel) -> None:
    seen: list[list[int]] = []

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append([int(each) for each in tokens])  # pyright: ignore[reportArgumentType]
        return logits

    run(bound, PROMPT, max_tokens=1, logits_processors=[look])
    cold = list(seen)
    seen.clear()
    found, _ = run(bound, PROMPT, max_tokens=1, logits_processors=[look])

    assert found.endpoint == 5 * STRIDE
    assert cold[0] == PROMPT
    assert seen == cold


def test_a_repetition_penalty_gives_the_same_tokens_cold_and_warm(bound: BoundModel) -> None:
    def penalised(generate: Callable[..., list[int]], subject: Any) -> list[int]:
        processors = make_logits_processors(repetition_penalty=3.0, repetition_context_size=200)
        return generate(subject, PROMPT, max_tokens=24, logits_processors=processors)

    cold = penalised(lambda *a, **k: run(*a, **k)[1], bound)
    warm = penalised(lambda *a, **k: run(*a, **k)[1], bound)

    assert cold == warm == penalised(plain, bound.model)
    assert cold != plain(bound.model, PROMPT, max_tokens=24)


def test_progress_counts_the_whole_prompt(bound: BoundModel) -> None:
    run(bound, PROMPT)
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    run(bound, PROMPT, prompt_progress_callback=progress)

    assert seen == [(160, 163), (162, 163), (163, 163)]


def test_a_generator_that_is_closed_early_keeps_what_was_captured(
    cache: Cache, bound: BoundModel
) -> None:
    generated = bound.generate_step(PROMPT, max_tokens=100)
    next(generated)

    generated.close()
    cache.flush()

    assert restored(bound, PROMPT).endpoint == 5 * STRIDE
    assert not core_of(cache.store).overlay.held


# One word for each id of the vocabulary. No word begins like a special one.
WORDS = ["<end>", "<begin>", *(f"w{each}" for each in range(2, VOCAB))]


def tokenizer() -> Any:
    made = Tokenizer(WordLevel({word: each for each, word in enumerate(WORDS)}, unk_token="<end>"))
    made.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", bos_token="<begin>")


def test_streaming_text_gives_what_mlx_lm_gives_cold_and_warm(bound: BoundModel) -> None:
    text = " ".join(WORDS[each] for each in PROMPT)
    expected = list(
        mlx_stream_generate(bound.model, tokenizer(), text, max_tokens=6, prefill_step_size=STRIDE)
    )
    restorations: list[Restoration] = []

    cold, warm = (
        list(bound.stream_generate(tokenizer(), text, max_tokens=6, on_restore=restorations.append))
        for _ in range(2)
    )

    assert [each.endpoint for each in restorations] == [0, 5 * STRIDE]
    for responses in (cold, warm):
        assert [(each.text, each.token) for each in responses] == [
            (each.text, each.token) for each in expected
        ]
        assert responses[-1].finish_reason == expected[-1].finish_reason == "length"
        assert {each.prompt_tokens for each in responses} == {len(PROMPT)}
    assert bytes_of_array(warm[0].logprobs) == bytes_of_array(expected[0].logprobs)


# When the disk is not there, or full, or somebody else's.


def test_generation_goes_on_when_the_directory_is_deleted_meanwhile(
    caches: Caches, cache: Cache, bound: BoundModel
) -> None:
    def delete(done: int, _total: int) -> None:
        if done == 2 * STRIDE:
            cache.flush()
            shutil.rmtree(caches.root)

    _, tokens = run(bound, PROMPT, prompt_progress_callback=delete)

    assert tokens == plain(bound.model, PROMPT)
    found, again = run(bound, PROMPT)
    assert (found.endpoint, found.reason) == (0, MissReason.OFFLINE)
    assert again == tokens
    assert set(cache.statistics().not_stored) == {"offline"}
    assert not caches.root.exists()


def test_generation_goes_on_when_the_disk_is_full_and_stores_when_it_is_not(
    cache: Cache, bound: BoundModel
) -> None:
    files_of(cache.store).hook = Failing("write", errno.ENOSPC, path="staging/")

    _, tokens = run(bound, PROMPT)

    assert tokens == plain(bound.model, PROMPT)
    assert payload_files(cache) == {}
    assert set(cache.statistics().not_stored) <= {"disk_full", "parent"}
    files_of(cache.store).hook = None
    run(bound, PROMPT)
    assert restored(bound, PROMPT).endpoint == 5 * STRIDE


def test_a_model_can_be_bound_while_the_journal_takes_nothing(
    cache: Cache, models: dict[str, nn.Module]
) -> None:
    files_of(cache.store).hook = Failing("commit", errno.ENOSPC)

    found, tokens = run(cache.bind(models["llama"]), PROMPT)

    assert found.reason is MissReason.EMPTY
    assert tokens == plain(models["llama"], PROMPT)
    files_of(cache.store).hook = None


def test_a_model_can_be_bound_to_a_cache_that_went_offline(
    caches: Caches, cache: Cache, models: dict[str, nn.Module]
) -> None:
    shutil.rmtree(caches.root)
    cache.store.go_offline()

    found, tokens = run(cache.bind(models["llama"]), PROMPT)

    assert found.reason is MissReason.OFFLINE
    assert tokens == plain(models["llama"], PROMPT)


def test_a_second_process_is_told_who_holds_the_cache(caches: Caches, cache: Cache) -> None:
    code = (
        "import sys, walkback\n"
        "try:\n"
        "    walkback.open_cache(sys.argv[1])\n"
        "except walkback.CacheLockedError as error:\n"
        "    print(error.pid, error)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, str(caches.root)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    assert done.stdout.startswith(f"{os.getpid()} ")
    assert f"process {os.getpid()}" in done.stdout
    assert cache.store.mode is Mode.WRITING


def test_a_closed_cache_still_generates(cache: Cache, bound: BoundModel) -> None:
    cache.close()

    found, tokens = run(bound, PROMPT)

    assert found.reason is MissReason.CLOSED
    assert tokens == plain(bound.model, PROMPT)
    cache.close()


# Threads.


def test_no_thread_of_the_store_runs_code_that_knows_mlx(
    caches: Caches, models: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only ``integration`` and ``restore.materialise`` import mlx; tests/test_architecture.py."""
    monkeypatch.setattr("walkback.restore.reading._PARALLEL_BYTES", 1)
    calls: set[tuple[str, str]] = set()

    def watch(frame: Any, _kind: str, _argument: Any) -> None:
        calls.add((threading.current_thread().name, frame.f_globals.get("__name__", "")))

    threading.setprofile(watch)
    try:
        cache = caches.open()
        bound = cache.bind(models["lfm2"])
        found = [run(bound, PROMPT)[0].endpoint for _ in range(2)]
        cache.close()
    finally:
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]

    assert found == [0, 5 * STRIDE]
    assert ("walkback-writer", "walkback.store.stage") in calls
    assert ("walkback-journal", "walkback.journal.log") in calls
    assert ("walkback-read_0", "walkback.restore.reader") in calls
    assert not [
        (thread, module)
        for thread, module in calls
        if module.startswith(("mlx", "walkback.integration", "walkback.restore.materialise"))
    ]


def test_what_crosses_to_the_writer_is_bytes_that_cannot_be_written_to(
    cache: Cache, bound: BoundModel
) -> None:
    gate = Gate("create", "staging/")
    files_of(cache.store).hook = gate
    request = bound.restore(PROMPT)
    prefill(bound, request, PROMPT, STRIDE)
    request.recording.stop(STRIDE, request.cache)

    core = core_of(cache.store)
    with core.lock:
        tensors = [
            tensor for each in core.overlay.in_flight.values() for tensor in each.writing.tensors
        ]

    gate.open()
    request.recording.abort()
    assert len(tensors) > 4
    assert {type(each.buffer) for each in tensors} == {memoryview}
    assert all(each.buffer.readonly for each in tensors)


# The package.


def test_importing_walkback_loads_neither_mlx_nor_lmdb() -> None:
    code = (
        "import sys, walkback; print(sorted({'mlx', 'mlx_lm', 'lmdb', 'cbor2'} & {*sys.modules}))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    assert done.stdout == "[]\n"


def test_every_public_name_is_there() -> None:
    resolved = {name: getattr(walkback, name) for name in walkback.__all__}

    assert all(getattr(each, "__name__", name) == name for name, each in resolved.items())
    assert set(walkback.__all__) <= set(dir(walkback))
    assert sorted(walkback.__all__) == walkback.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = walkback.nothing  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]


def test_a_cache_opened_by_its_public_name_works(
    tmp_path: Path, models: dict[str, nn.Module]
) -> None:
    with walkback.open_cache(
        tmp_path / "cache",
        budget_bytes=64 * MIB,
        free_floor_bytes=0,
        block_tokens=BLOCK_TOKENS,
        checkpoint_tokens=STRIDE,
    ) as cache:
        bound = cache.bind(models["lfm2"])
        for token, logprobs in walkback.generate_step(bound, PROMPT, max_tokens=1):
            assert (type(token), logprobs.shape) == (int, (VOCAB,))
        cache.flush()

        assert restored(bound, PROMPT).endpoint == 5 * STRIDE
        assert cache.violations() == []


@pytest.mark.parametrize(
    "options",
    [
        {"block_tokens": 0},
        {"block_tokens": 16, "checkpoint_tokens": 24},
        {"budget_bytes": 1},
        {"staging_bytes": -1},
        {"free_floor_bytes": -1},
    ],
)
def test_settings_that_make_no_sense_make_no_directory(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(walkback.SettingsError):
        walkback.open_cache(tmp_path / "cache", **options)

    assert list(tmp_path.iterdir()) == []


def test_mlx_lm_is_as_it_was_for_whoever_does_not_call_walkback(tmp_path: Path) -> None:
    """It is opted into by calling it: nothing of mlx-lm is replaced, with a cache open or not."""
    code = """
import sys
from pathlib import Path
import mlx_lm.generate
from mlx_lm.models import cache
modules = [sys.modules["mlx_lm.generate"], cache]
before = [dict(vars(module)) for module in modules]
import walkback
from zoo import build
with walkback.open_cache(Path(sys.argv[1]) / "cache", free_floor_bytes=0) as opened:
    opened.bind(build("lfm2"))
    sys.exit([dict(vars(module)) for module in modules] != before)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}

    assert subprocess.run(command, env=environment, check=False).returncode == 0


def test_a_prompt_that_is_none_names_what_is_wrong_with_it(cache: Cache) -> None:
    bound = cache.bind(build("lfm2"))

    for prompt, words in (
        ([1, 2, 1.5], "token id 2 is 1.5"),
        ([1, None], "token id 1 is None"),
        ("text", "not str"),
        (None, "not NoneType"),
        (np.zeros((2, 2), np.int32), "not 2"),
    ):
        with pytest.raises(ValueError, match=words):
            bound.restore(cast(Any, prompt))


def test_a_numpy_prompt_is_taken_as_mlx_lm_takes_it(cache: Cache) -> None:
    bound = cache.bind(build("lfm2"))
    prompt = token_ids(40)

    of_list = [token for token, _ in bound.generate_step(prompt, max_tokens=4)]
    of_array = [
        token for token, _ in bound.generate_step(cast(Any, np.array(prompt)), max_tokens=4)
    ]

    assert of_array == of_list


def test_a_closed_cache_binds_nothing(cache: Cache) -> None:
    cache.close()

    with pytest.raises(walkback.CacheClosedError):
        cache.bind(build("lfm2"))


def test_a_model_that_is_not_what_its_files_say_has_a_namespace_of_its_own(
    cache: Cache, tmp_path: Path
) -> None:
    """Adapter layers in memory, or the directory of another model: never the base model's KV."""
    directory = tmp_path / "model"
    write_tiny_model(directory, config=CONFIGS["lfm2"])
    model = build("lfm2")
    as_filed = cache.bind(model, directory).namespace

    cast(Any, model).layers[0].extra = nn.Linear(2, 2)
    changed = cache.bind(model, directory).namespace

    assert changed != as_filed


def test_a_recording_that_nobody_finishes_lets_go_when_it_is_garbage(cache: Cache) -> None:
    bound = cache.bind(build("lfm2"))
    list(bound.generate_step(PROMPT, max_tokens=1))
    cache.flush()

    restorations = [bound.restore(PROMPT) for _ in range(3)]
    assert sum(core_of(cache.store).overlay.held.values()) == 3
    del restorations
    gc.collect()
    cache.statistics()

    assert not core_of(cache.store).overlay.held
