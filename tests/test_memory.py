"""What a store keeps in memory does not depend on how much is stored."""

import subprocess
import sys
from pathlib import Path

BOUNDARY_BYTES = 4 << 20
STAGING_BYTES = 10 << 20

# The peak before and after storing argv[2] boundaries, of bytes that are new for each.
PROGRAM = """
import os, resource, sys
from pathlib import Path
from walkback.journal.words import Kind
from walkback.store.boundary import Boundary, Part
from walkback.store.settings import StoreSettings
from walkback.store.store import MutableStore
from walkback.store.tensors import Tensor, TensorSpec

count, nbytes, staging_bytes = map(int, sys.argv[2:5])
settings = StoreSettings(free_floor_bytes=0, budget_bytes=1 << 30, staging_bytes=staging_bytes)
unit = 1 if sys.platform == "darwin" else 1024
parent = namespace = b"n" * 32
with MutableStore.open(Path(sys.argv[1]), settings) as store:
    for index in range(count):
        key = index.to_bytes(32, "big")
        spec = TensorSpec(name="0/keys", dtype="U8", shape=(nbytes,))
        part = Part(kind=Kind.BLOCK, key=key, parent=parent, start=index, end=index + 1,
                    tensors=(spec,))
        claim = store.claim(
            Boundary(namespace=namespace, layout_digest=bytes(32), plan_digest=bytes(32),
                     position=index + 1, parts=(part,)),
            request=1, producer="a test")
        store.reserve(claim)
        tensor = Tensor(spec=spec, buffer=memoryview(os.urandom(nbytes)))
        store.put(claim, [[tensor]], prefill_seconds=0.0)
        del tensor
        parent = key
    store.flush()
    assert claim.refusal is None, claim.refusal
    high_water = store.statistics().staging_bytes_high_water
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, high_water)
"""


def peak_of(directory: Path, count: int) -> tuple[int, int]:
    """Peak RSS and staging high-water mark of a process that stores so many boundaries."""
    arguments = [str(directory / f"cache{count}"), str(count), str(BOUNDARY_BYTES)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments, str(STAGING_BYTES)],
        capture_output=True,
        text=True,
        check=True,
    )
    rss, high_water = map(int, done.stdout.split())
    return rss, high_water


def test_the_memory_of_a_process_does_not_grow_with_the_boundaries_it_stores(
    tmp_path: Path,
) -> None:
    few_rss, few_high_water = peak_of(tmp_path, 6)
    many_rss, many_high_water = peak_of(tmp_path, 60)

    assert few_high_water <= STAGING_BYTES
    assert many_high_water <= STAGING_BYTES
    # 54 boundaries more are 216 MiB; two of them are what the allocator may keep differently.
    assert many_rss - few_rss < 2 * BOUNDARY_BYTES
