"""Opening a cache of many entries, against a scan of its files; lookups; the journal alone.

Each opening is a process of its own: this file is also what runs in it.
"""

import functools
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from measure import TOTAL, Arm, Row, Sample, compare, interleave

from walkback.journal.events import Committed, Event, Staged
from walkback.journal.words import Cause, FileName, Kind
from walkback.restore.candidates import match
from walkback.restore.identity import Chain, block_chain
from walkback.store.core import Clock
from walkback.store.lookup import Located, View
from walkback.store.recovery import OpenedCache, append, close_cache, open_cache
from walkback.store.settings import StoreSettings
from walkback.store.store import MutableStore

NAMESPACE = bytes(range(32))
SETTINGS = StoreSettings(budget_bytes=1 << 50, free_floor_bytes=0)
BLOCK_TOKENS = 256
BLOCKS_PER_SIDECAR = 8
# A prompt of 32,768 token ids.
CHAIN_BLOCKS = 128
# Half of what the compactor waits for: what a process that died leaves behind, on average.
TAIL_EVENTS = 2_500

_ENTRIES_PER_COMMIT = 1_000
_REPEATS = 20

SCAN = "scandir and stat of every file"
READ = "scandir, open and read 4 KiB of every file"


def measure_opening(
    directory: Path, *, entries: int, rounds: int, order: random.Random
) -> list[Row]:
    """``MutableStore.open`` in a fresh process, against one look at each of its files."""
    tail = min(TAIL_EVENTS // 2, entries // 4)
    closed, killed = directory / "closed", directory / "killed"
    make_cache(closed, entries=entries, tail=0)
    make_cache(killed, entries=entries, tail=tail)
    arms = [
        Arm(name="open after a clean close", run=lambda: _child("close", closed)),
        Arm(name="open after a kill", run=lambda: _child("kill", killed)),
        Arm(name="open after a power cut", run=lambda: _child("kill", killed, other_boot=True)),
        Arm(name=SCAN, run=lambda: _child("scan", closed)),
        Arm(name=READ, run=lambda: _child("read", closed)),
    ]
    samples = interleave(arms, rounds=rounds, order=order)
    return compare(
        f"open {entries:,} entries", samples, {arm.name: SCAN for arm in arms if arm.name != SCAN}
    )


def measure_lookup(directory: Path, *, rounds: int, order: random.Random) -> list[Row]:
    """Choosing an endpoint among 128 blocks, and keying them, against what others do for it."""
    make_cache(directory / "lookup", entries=10 * CHAIN_BLOCKS, tail=0)
    store = MutableStore.open(directory / "lookup", SETTINGS)
    # The last token of a prompt is left to compute.
    longer = chain_of(3).longer([3])
    token_ids = [random.getrandbits(17) for _ in range(CHAIN_BLOCKS * BLOCK_TOKENS)]
    paths = sorted(store.files.root.glob("blocks/*/*"))[:CHAIN_BLOCKS]

    def choose(view: View) -> tuple[int, list[Located]]:
        found = match(view, longer, needs_sidecar=True).candidate
        assert found is not None and found.endpoint == len(token_ids) and found.sidecar is not None
        return found.endpoint, [*found.blocks, found.sidecar]

    def look_up() -> None:
        _, lease = store.choose(choose)
        store.release(lease)

    def look_at_files() -> None:
        for path in paths:
            path.stat()

    def key() -> None:
        block_chain(token_ids, namespace=NAMESPACE, secret=store.secret, block_tokens=BLOCK_TOKENS)

    def key_as_text() -> None:
        digest = b""
        for start in range(0, len(token_ids), BLOCK_TOKENS):
            text = str(tuple(token_ids[start : start + BLOCK_TOKENS])).encode()
            digest = hashlib.sha256(digest + text).digest()

    stat, text = "stat of 128 files", "sha256 of their text, block by block"
    arms = [
        Arm(name="look up and lease 128 blocks", run=_repeated(look_up)),
        Arm(name=stat, run=_repeated(look_at_files)),
        Arm(name="key 32,768 token ids", run=_repeated(key)),
        Arm(name=text, run=_repeated(key_as_text)),
    ]
    try:
        samples = interleave(arms, rounds=rounds, order=order)
    finally:
        store.close()
    return compare("lookup", samples, {arms[0].name: stat, arms[2].name: text})


def measure_commit(directory: Path, *, rounds: int, order: random.Random) -> list[Row]:
    """One event pair in the journal, against a small file that is made durable."""
    opened = open_cache(directory / "commit", SETTINGS, clock=Clock(), versions="benchmark")
    numbers = itertools.count()
    index = directory / "index.json"
    folder = os.open(directory, os.O_RDONLY)

    def commit() -> None:
        append(opened.core, [*events_of(next(numbers), opened.core.epoch)])

    def rewrite() -> None:
        new = index.with_suffix(".new")
        with new.open("w") as file:
            json.dump({"key": "00" * 32, "bytes": 154_000_000}, file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(index)
        os.fsync(folder)

    name = "a file, fsync, rename, fsync"
    arms = [Arm(name="commit", run=_repeated(commit)), Arm(name=name, run=_repeated(rewrite))]
    try:
        return compare("commit", interleave(arms, rounds=rounds, order=order), {"commit": name})
    finally:
        os.close(folder)
        close_cache(opened, is_clean=True)


def make_cache(root: Path, *, entries: int, tail: int) -> None:
    """A cache of small real files under the journal of a large one.

    The last ``tail`` entries are in the journal only, not in its snapshot, and their epoch was
    never closed.
    """
    opened = open_cache(root, SETTINGS, clock=Clock(), versions="benchmark")
    _fill(opened, first=0, last=entries - tail)
    # Closing compacts, since so much is not in the snapshot.
    MutableStore(opened).close()
    if tail:
        opened = open_cache(root, SETTINGS, clock=Clock(), versions="benchmark")
        _fill(opened, first=entries - tail, last=entries)
        close_cache(opened, is_clean=False)


def _fill(opened: OpenedCache, *, first: int, last: int) -> None:
    core = opened.core
    for start in range(first, last, _ENTRIES_PER_COMMIT):
        events: list[Event] = []
        for number in range(start, min(start + _ENTRIES_PER_COMMIT, last)):
            staged, committed = events_of(number, core.epoch)
            events += [staged, committed]
            path = core.files.root / staged.file.path
            path.write_bytes(committed.header_digest)
        append(core, events)


def events_of(number: int, epoch: int) -> tuple[Staged, Committed]:
    """The events of entry ``number``: eight blocks and a sidecar, again and again, in chains."""
    chain_number, place = divmod(
        number, CHAIN_BLOCKS * (BLOCKS_PER_SIDECAR + 1) // BLOCKS_PER_SIDECAR
    )
    group, within = divmod(place, BLOCKS_PER_SIDECAR + 1)
    kind = Kind.SIDECAR if within == BLOCKS_PER_SIDECAR else Kind.BLOCK
    index = group * BLOCKS_PER_SIDECAR + min(within, BLOCKS_PER_SIDECAR - 1)
    link = chain_of(chain_number).links[index]
    nbytes = 153_960_448 if kind is Kind.SIDECAR else 16_793_600
    file = FileName(kind, epoch, number + 1)
    staged = Staged(
        kind=kind,
        key=link.key,
        generation=1,
        file=file,
        nbytes=nbytes,
        cause=Cause.PREFILL,
        restored_from=None,
    )
    committed = Committed(
        kind=kind,
        key=link.key,
        parent=link.parent,
        namespace=NAMESPACE,
        start=link.end if kind is Kind.SIDECAR else link.start,
        end=link.end,
        generation=1,
        file=file,
        nbytes=nbytes,
        allocated_bytes=nbytes,
        header_digest=blake3(link.key).digest(),
        plan_digest=blake3(index.to_bytes(8, "little")).digest(),
        prefill_seconds=1.5,
    )
    return staged, committed


@functools.cache
def chain_of(number: int) -> Chain:
    """The blocks of the made-up prompt ``number``."""
    ids = [number] * (CHAIN_BLOCKS * BLOCK_TOKENS)
    return Chain(ids, namespace=NAMESPACE, secret=bytes(32), block_tokens=BLOCK_TOKENS)


def _repeated(step: Callable[[], None]) -> Callable[[], Sample]:
    def run() -> Sample:
        started = time.perf_counter()
        for _ in range(_REPEATS):
            step()
        return {TOTAL: (time.perf_counter() - started) / _REPEATS}

    return run


# In a process of its own.


def _child(how: str, root: Path, *, other_boot: bool = False) -> Sample:
    if other_boot:
        # What a power cut leaves: nothing says that the file is what was committed.
        owner = json.loads((root / "OWNER").read_text())
        (root / "OWNER").write_text(json.dumps(owner | {"boot_id": "an earlier boot"}))
    command = [sys.executable, str(Path(__file__).resolve()), how, str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {TOTAL: float(done.stdout)}


def _scan(root: Path, look: Callable[[os.DirEntry[str]], None]) -> int:
    count = 0
    for kind in Kind:
        with os.scandir(root / kind.folder) as epochs:
            for epoch in epochs:
                with os.scandir(epoch) as files:
                    for file in files:
                        look(file)
                        count += 1
    return count


def _stat(file: "os.DirEntry[str]") -> None:
    file.stat()


def _read_beginning(file: "os.DirEntry[str]") -> None:
    with Path(file.path).open("rb") as opened:
        opened.read(4096)


def _main(how: str, root: Path) -> None:
    store: MutableStore | None = None
    started = time.perf_counter()
    if how in ("close", "kill"):
        store = MutableStore.open(root, SETTINGS)
    else:
        _scan(root, _read_beginning if how == "read" else _stat)
    print(time.perf_counter() - started, flush=True)
    if how == "kill":
        os._exit(0)
    if store is not None:
        store.close()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
