"""Restoring: verified, into buffers that a model can use, from a warm page cache and a cold one."""

# mlx's stubs leave some of their arguments untyped.
# pyright: reportUnknownMemberType=false

import gc
import random
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from measure import TOTAL, Arm, Row, Sample, compare, interleave
from payloads import (
    GRID,
    STOP,
    Shapes,
    arrays_of,
    drop_from_page_cache,
    fresh_cache,
    live_cache,
    random_chain,
    stop_of,
)
from storing import NAMESPACE, SETTINGS, save_durably

from walkback.integration.capture import capture
from walkback.restore.choosing import Lookup
from walkback.restore.layout import Layout
from walkback.restore.materialise import MutableAssembly
from walkback.restore.plan import Plan
from walkback.restore.walkback import Resumed, resume
from walkback.store.boundary import Claim
from walkback.store.store import MutableStore

LOAD = "mx.load, mx.eval (not verified)"

IS_COLD_MEASURED = sys.platform != "darwin"


def measure_restore(
    directory: Path, shapes: Shapes, *, with_kv: bool, rounds: int, order: random.Random
) -> list[Row]:
    """A restore of a sidecar, or of all blocks with it, against mlx's own file of the same."""
    topic = "restore of blocks and sidecar" if with_kv else "restore of a sidecar"
    layout = shapes.layout(with_kv=with_kv)
    cache = live_cache(layout)
    saved = directory / f"{topic}.safetensors"
    save_durably(saved, arrays_of(cache))
    store = MutableStore.open(directory / topic, SETTINGS)
    lookup = _stored(store, layout, cache)
    payloads = [
        path for kind in ("blocks", "sidecars") for path in store.files.root.glob(f"{kind}/*/*")
    ]

    def resumed() -> Resumed[list[Any]]:
        outcome = resume(
            store,
            lookup,
            make_assembly=lambda endpoint: MutableAssembly(
                layout, endpoint=endpoint, capacity_tokens=endpoint
            ),
            finish=lambda assembly: assembly.finish(lambda: fresh_cache(layout)),
        )
        assert isinstance(outcome, Resumed), outcome
        return outcome

    def restored(*, cold: bool) -> Sample:
        _collect(payloads if cold else [])
        started = time.perf_counter()
        outcome = resumed()
        total = time.perf_counter() - started
        # Two readers at once count their seconds twice.
        return {TOTAL: total, "header": outcome.header_seconds, "bytes": outcome.bytes_seconds}

    def loaded(*, cold: bool) -> Sample:
        _collect([saved] if cold else [])
        started = time.perf_counter()
        mx.eval(mx.load(str(saved)))
        return {TOTAL: time.perf_counter() - started}

    rows: list[Row] = []
    try:
        _require_equal(arrays_of(resumed().made), arrays_of(cache))
        for cold in (False, True) if IS_COLD_MEASURED else (False,):
            arms = [
                Arm(name="restore", run=lambda cold=cold: restored(cold=cold)),
                Arm(name=LOAD, run=lambda cold=cold: loaded(cold=cold)),
            ]
            samples = interleave(arms, rounds=rounds, order=order)
            name = f"{topic}, {'cold' if cold else 'warm'}"
            rows += compare(name, samples, {"restore": LOAD})
    finally:
        store.close()
    return rows


def _stored(store: MutableStore, layout: Layout, cache: list[Any]) -> Lookup:
    """Store a stop, and return the lookup of a prompt that continues it."""
    chain = random_chain(NAMESPACE, store.secret)
    claim = store.claim(stop_of(layout, NAMESPACE, chain), request=1, producer="benchmark")
    assert isinstance(claim, Claim)
    store.reserve(claim)
    ranges = [(link.start, link.end) for link in chain.links]
    captured = capture(cache, layout, position=STOP, ranges=ranges, with_point=True)
    store.put(claim, [*captured.blocks, captured.point], prefill_seconds=1.0)
    claim.settled.wait()
    assert claim.refusal is None, claim.refusal
    return Lookup(
        request=1,
        namespace=NAMESPACE,
        fields=(),
        layout=layout,
        chain=chain.longer([0]),
        plan=Plan(GRID, STOP + 1),
    )


def _collect(cold: list[Path]) -> None:
    """Give back what the run before holds, and have these files come from the disk."""
    gc.collect()
    mx.clear_cache()
    for path in cold:
        drop_from_page_cache(path)


def _require_equal(restored: dict[str, mx.array], stored: dict[str, mx.array]) -> None:
    assert restored.keys() == stored.keys()
    for name, array in stored.items():
        assert mx.array_equal(restored[name], array), f"{name} was not restored as it was"
