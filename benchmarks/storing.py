"""Storing: what a durable store costs, what it costs the calling thread, and the journal alone."""

# mlx's stubs leave some of their arguments untyped.
# pyright: reportUnknownMemberType=false

import fcntl
import os
import random
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
from measure import TOTAL, Arm, Row, Sample, compare, interleave
from payloads import (
    GRID,
    STOP,
    Shapes,
    arrays_of,
    live_cache,
    point_tensors,
    random_chain,
    stop_of,
)

from walkback.integration.recording import MutableRecording, Recorded
from walkback.journal.files import Files
from walkback.restore.materialise import bytes_of
from walkback.restore.plan import Plan, plan_start
from walkback.store.boundary import Claim
from walkback.store.settings import GIB, StoreSettings
from walkback.store.store import MutableStore

NAMESPACE = bytes(range(32))
SETTINGS = StoreSettings(budget_bytes=1 << 50, free_floor_bytes=GIB, staging_bytes=GIB)

SAVE = "mx.save_safetensors, fsync, rename, fsync"
MEMCPY = "memcpy into warm memory"


class TimedFiles(Files):
    """Files that count the seconds of publishing: renames and syncs of directories."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.publish_seconds = 0.0

    def rename(self, old: str, new: str) -> None:
        with self._timed():
            super().rename(old, new)

    def sync_directory(self, name: str) -> None:
        with self._timed():
            super().sync_directory(name)

    @contextmanager
    def _timed(self) -> Generator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.publish_seconds += time.perf_counter() - started


def measure_store(
    directory: Path, shapes: Shapes, *, rounds: int, order: random.Random
) -> list[Row]:
    """A durable store of one sidecar, against mlx's own file made durable."""
    layout = shapes.layout(with_kv=False)
    cache = live_cache(layout)
    arrays, tensors = arrays_of(cache), point_tensors(layout, cache)
    store = MutableStore.open(directory / "store", SETTINGS, make_files=TimedFiles)

    def stored() -> Sample:
        boundary = stop_of(layout, NAMESPACE, random_chain(NAMESPACE, store.secret))
        before, commit_before = _settled(store)
        started = time.perf_counter()
        claim = store.claim(boundary, request=1, producer="benchmark")
        assert isinstance(claim, Claim)
        store.reserve(claim)
        store.put(claim, [*[()] * (len(claim.writings) - 1), tensors], prefill_seconds=1.0)
        claim.settled.wait()
        total = time.perf_counter() - started
        assert claim.refusal is None, claim.refusal
        staged = claim.writings[-1].staged
        assert staged is not None and isinstance(store.files, TimedFiles)
        parts = {
            "write": staged.write_seconds,
            "hash wait": staged.hash_wait_seconds,
            "file sync": staged.sync_seconds,
            "publish": store.files.publish_seconds - before,
            "journal commit": store.statistics().commit_seconds - commit_before,
        }
        return {TOTAL: total} | parts | {"the rest": total - sum(parts.values())}

    def saved() -> Sample:
        _settled(store)
        started = time.perf_counter()
        save_durably(directory / "saved.safetensors", arrays)
        return {TOTAL: time.perf_counter() - started}

    arms = [Arm(name="store", run=stored), Arm(name=SAVE, run=saved)]
    try:
        return compare("store", interleave(arms, rounds=rounds, order=order), {"store": SAVE})
    finally:
        store.close()


def measure_capture(
    directory: Path, shapes: Shapes, *, rounds: int, order: random.Random
) -> list[Row]:
    """How long a stop holds the thread that prefills, against a copy of the same bytes."""
    layout = shapes.layout(with_kv=True)
    cache = live_cache(layout)
    arrays = list(arrays_of(cache).values())
    warm = memoryview(bytearray(sum(array.nbytes for array in arrays)))
    store = MutableStore.open(directory / "capture", SETTINGS, make_files=TimedFiles)

    def captured() -> Sample:
        recording = MutableRecording(
            Recorded(
                store=store,
                namespace=NAMESPACE,
                layout=layout,
                unsupported="",
                plan=Plan(GRID, STOP + 1),
                producer="benchmark",
                request=1,
                chain=random_chain(NAMESPACE, store.secret),
                endpoint=0,
                resumed_at=0,
                plan_digest=plan_start(GRID),
                restored_from=None,
                held=None,
            )
        )
        _settled(store)
        started = time.perf_counter()
        refusal = recording.stop(STOP, cache)
        total = time.perf_counter() - started
        assert refusal is None, refusal
        recording.finish()
        refusals = recording.wait()
        assert not refusals, refusals
        return {TOTAL: total}

    def copied() -> Sample:
        _settled(store)
        started = time.perf_counter()
        offset = 0
        for array in arrays:
            warm[offset : offset + array.nbytes] = bytes_of(array)
            offset += array.nbytes
        return {TOTAL: time.perf_counter() - started}

    arms = [Arm(name="capture", run=captured), Arm(name=MEMCPY, run=copied)]
    try:
        return compare("capture", interleave(arms, rounds=rounds, order=order), {"capture": MEMCPY})
    finally:
        store.close()


def save_durably(path: Path, arrays: Mapping[str, mx.array]) -> None:
    """What a careful script does without a cache: complete under its name, or not there."""
    new = path.with_name(f"new-{path.name}")
    mx.save_safetensors(str(new), dict(arrays))
    _sync(new)
    new.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _settled(store: MutableStore) -> tuple[float, float]:
    """Have store and disk do nothing; the seconds that publishing and commits have taken so far."""
    store.operator.purge(NAMESPACE)
    store.flush()
    store.settle_deletions()
    store.flush()
    os.sync()
    assert isinstance(store.files, TimedFiles)
    return store.files.publish_seconds, store.statistics().commit_seconds
