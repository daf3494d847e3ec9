"""Caches for tests: the real store over real files and LMDB, with made-up tensors and no mlx."""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

from blake3 import blake3

from walkback.journal.events import Restored
from walkback.journal.files import Files, FileStatus, Transaction
from walkback.journal.log_reader import LogReader
from walkback.journal.state import State
from walkback.journal.words import FileName, Kind
from walkback.store.boundary import Boundary, Claim, NotStored, Part
from walkback.store.core import Clock, MutableCore
from walkback.store.lookup import Lease, Located, View
from walkback.store.settings import MIB, StoreSettings
from walkback.store.store import MutableStore
from walkback.store.tensors import Tensor, TensorSpec
from walkback.store.verify import opened

NAMESPACE = blake3(b"namespace").digest()
OTHER_NAMESPACE = blake3(b"another namespace").digest()
BLOCK_TOKENS = 16
# One payload with its header of 16 KiB is charged 80 KiB.
BLOCK_BYTES = 64_000
CHARGE_BYTES = 81_920

SETTINGS = StoreSettings(budget_bytes=64 * MIB, free_floor_bytes=0, room_wait_seconds=5.0)

WAIT_SECONDS = 20.0

Hook = Callable[[str, str], None]


# Files that do as a test says.


class HookedFiles(Files):
    """Calls ``hook(step, name)`` before each step; what the hook raises, the step raises.

    ``log`` lists the steps taken. ``free`` takes the place of the volume's free bytes.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.hook: Hook | None = None
        self.log: list[tuple[str, str]] = []
        self.free: Callable[[], int] | None = None
        # "after": the real commit happens and then fails.
        self.after_commit: Hook | None = None
        self._named: dict[int, str] = {}

    def _step(self, step: str, name: str) -> None:
        if self.hook is not None:
            self.hook(step, name)
        self.log.append((step, name))

    def make_directory(self, name: str) -> None:
        self._step("make", name)
        super().make_directory(name)

    def sync_directory(self, name: str) -> None:
        self._step("sync directory", name)
        super().sync_directory(name)

    def names(self, name: str = "") -> list[str]:
        self._step("list", name)
        return super().names(name)

    def create(self, name: str) -> int:
        self._step("create", name)
        descriptor = super().create(name)
        self._named[descriptor] = name
        return descriptor

    def open(self, name: str) -> int:
        self._step("open", name)
        return super().open(name)

    def write(self, descriptor: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        self._step("write", self._named.get(descriptor, ""))
        super().write(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        self._step("sync", self._named.get(descriptor, ""))
        super().sync(descriptor)

    def close_file(self, descriptor: int) -> None:
        self._named.pop(descriptor, None)
        super().close_file(descriptor)

    def rename(self, old: str, new: str) -> None:
        self._step("rename", old)
        super().rename(old, new)

    def unlink(self, name: str) -> None:
        self._step("unlink", name)
        super().unlink(name)

    def status(self, name: str) -> FileStatus | None:
        self._step("status", name)
        return super().status(name)

    def commit(self, transaction: Transaction) -> None:
        self._step("commit", "")
        super().commit(transaction)
        if self.after_commit is not None:
            self.after_commit("commit", "")

    def free_bytes(self) -> int:
        return super().free_bytes() if self.free is None else self.free()


class Failing:
    """A hook: raises ``error`` for a step under a path, the first ``times`` times or always."""

    def __init__(self, step: str, code: int, *, path: str = "", times: int | None = None) -> None:
        self.count = 0
        self._step = step
        self._code = code
        self._path = path
        self._times = times

    def __call__(self, step: str, name: str) -> None:
        if step != self._step or not name.startswith(self._path):
            return
        self.count += 1
        if self._times is None or self.count <= self._times:
            raise OSError(self._code, "injected", name)


class Gate:
    """A hook: the first thread that takes a step under a path waits until the gate is opened."""

    def __init__(self, step: str, path: str = "") -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()
        self._step = step
        self._path = path

    def __call__(self, step: str, name: str) -> None:
        if step == self._step and name.startswith(self._path):
            self.reached.set()
            assert self._opened.wait(WAIT_SECONDS), "nobody opened the gate"

    def await_thread(self) -> None:
        assert self.reached.wait(WAIT_SECONDS), f"no thread came to {self._step} {self._path}"

    def open(self) -> None:
        self._opened.set()


# Chains of boundaries.


def key_of(chain: str, index: int) -> bytes:
    """The key of block ``index`` of a chain; of two chains all keys differ."""
    return blake3(f"{chain}/{index}".encode()).digest()


def content(part: Part, spec: TensorSpec) -> bytes:
    """What a payload holds: every byte is a function of its kind, key and place."""
    seed = part.kind.word.encode() + part.key + spec.name.encode()
    return blake3(seed).digest(length=spec.nbytes)


def boundary(
    chain: str,
    index: int,
    *,
    kinds: Iterable[Kind] = tuple(Kind),
    block_count: int = 1,
    nbytes: int = BLOCK_BYTES,
    namespace: bytes = NAMESPACE,
    parent: bytes | None = None,
) -> Boundary:
    """The stop after block ``index`` of a chain, with the ``block_count`` blocks that end there."""
    parts: list[Part] = []
    for each in range(index - block_count + 1, index + 1):
        above = key_of(chain, each - 1) if each else (namespace if parent is None else parent)
        parts.append(
            Part(
                kind=Kind.BLOCK,
                key=key_of(chain, each),
                parent=above,
                start=each * BLOCK_TOKENS,
                end=(each + 1) * BLOCK_TOKENS,
                tensors=(TensorSpec(name="kv", dtype="U8", shape=(nbytes,)),) if nbytes else (),
            )
        )
    position = (index + 1) * BLOCK_TOKENS
    sidecar = Part(
        kind=Kind.SIDECAR,
        key=key_of(chain, index),
        parent=parts[-1].parent,
        start=position,
        end=position,
        tensors=(TensorSpec(name="state", dtype="U8", shape=(nbytes or 64,)),),
    )
    return Boundary(
        namespace=namespace,
        layout_digest=bytes(32),
        plan_digest=bytes(16),
        position=position,
        parts=tuple(part for part in (*parts, sidecar) if part.kind in kinds),
    )


def tensors_for(claim: Claim) -> list[list[Tensor]]:
    """The bytes that a claim asks for."""
    return [
        [
            Tensor(spec=spec, buffer=memoryview(content(writing.part, spec)))
            for spec in writing.part.tensors
        ]
        for writing in claim.writings
    ]


# What a test does to a store.


def core_of(store: MutableStore) -> MutableCore:
    return store._core  # pyright: ignore[reportPrivateUsage]


def files_of(store: MutableStore) -> HookedFiles:
    assert isinstance(store.files, HookedFiles)
    return store.files


def claimed(store: MutableStore, wanted: Boundary, *, restored_from: int | None = None) -> Claim:
    claim = store.claim(wanted, request=1, producer="a test", restored_from=restored_from)
    assert isinstance(claim, Claim), claim
    return claim


def put(store: MutableStore, wanted: Boundary) -> Claim:
    """Claim, reserve and hand over, without waiting."""
    claim = claimed(store, wanted)
    if not claim.is_empty:
        store.reserve(claim)
        store.put(claim, tensors_for(claim), prefill_seconds=0.5)
    return claim


def outcome(claim: Claim) -> NotStored | None:
    """Wait for a claim's outcome."""
    assert claim.settled.wait(WAIT_SECONDS), "the claim was never settled"
    return claim.refusal


def store_one(store: MutableStore, wanted: Boundary) -> None:
    """Store a boundary for good."""
    refusal = outcome(put(store, wanted))
    assert refusal is None, refusal


def store_chain(
    store: MutableStore, chain: str, count: int, *, first: int = 0, nbytes: int = BLOCK_BYTES
) -> None:
    """Store ``count`` boundaries of a chain, each with its sidecar, parents first."""
    for index in range(first, first + count):
        store_one(store, boundary(chain, index, nbytes=nbytes))


def locate(store: MutableStore, kind: Kind, key: bytes) -> Located | None:
    """What a lookup sees of an entry, not leased any more."""
    located, lease = leased(store, kind, key)
    store.release(lease)
    return located


def leased(store: MutableStore, kind: Kind, key: bytes) -> tuple[Located | None, Lease]:
    """What a lookup sees of an entry, and the lease that keeps it."""

    def choose(view: View) -> tuple[Located | None, list[Located]]:
        found = view.block(key) if kind is Kind.BLOCK else view.sidecar(key)
        return found, [] if found is None else [found]

    return store.choose(choose)


def read(store: MutableStore, kind: Kind, key: bytes) -> bytes | None:
    """The data of an entry, verified; None if there is no such entry."""
    located, lease = leased(store, kind, key)
    try:
        return None if located is None else bytes_of(store, located)
    finally:
        store.release(lease)


def bytes_of(store: MutableStore, located: Located) -> bytes:
    """Read what was located, as a restore does."""
    if located.tensors is not None:
        return b"".join(tensor.buffer for tensor in located.tensors)
    assert located.file is not None
    path, digest = located.file.path, located.header_digest
    with opened(store.files, path, nbytes=located.nbytes, expected=digest) as payload:
        buffer = bytearray(located.nbytes - payload.header.data_offset)
        payload.read_data([memoryview(buffer)])
        return bytes(buffer)


def expected_bytes(wanted: Boundary, kind: Kind) -> bytes:
    """What the last part of a kind of a boundary holds."""
    part = [each for each in wanted.parts if each.kind is kind][-1]
    return b"".join(content(part, spec) for spec in part.tensors)


def is_readable(store: MutableStore, chain: str, index: int) -> bool:
    """Whether block and sidecar of a boundary are there, with the right bytes."""
    wanted = boundary(chain, index)
    return all(
        read(store, kind, key_of(chain, index)) == expected_bytes(wanted, kind) for kind in Kind
    )


def live(store: MutableStore, kind: Kind, chain: str, count: int = 100) -> list[int]:
    """The indices of a chain whose entries a lookup sees."""
    return [
        index for index in range(count) if locate(store, kind, key_of(chain, index)) is not None
    ]


def touch(store: MutableStore, chain: str, index: int) -> None:
    """Restore from a boundary, as far as the store is concerned, and make that durable."""
    entry = core_of(store).state.blocks[key_of(chain, index)]
    event = Restored(
        request=1,
        tip=entry.key[:8],
        block_count=index + 1,
        matched=entry.sequence,
        endpoint=entry.sequence,
        endpoint_tokens=entry.end,
        prompt_tokens=entry.end + 1,
        walkbacks=0,
        mixed_plan=False,
    )
    store.note_restored(event, endpoint=entry.key, sidecars_read=1)
    store.flush()


def settle(store: MutableStore) -> None:
    """Let everything come to rest: commits, deletions, and the commits of the deletions."""
    store.flush()
    store.settle_deletions(WAIT_SECONDS)
    store.flush()


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"it never came to pass: {what}"
        time.sleep(0.002)


def records_of(state: State) -> dict[bytes, bytes]:
    return dict(state.records())


def replayed(root: Path) -> State:
    """The state that the journal of a closed cache yields."""
    with contextlib.closing(Files(root)) as files:
        log = LogReader.open_to_read(files)
        try:
            return log.load()
        finally:
            log.close()


def payload_paths(root: Path) -> set[str]:
    """Every payload file below a root, in place, staged or put aside."""
    return {
        str(path.relative_to(root))
        for folder in ("blocks", "sidecars", "staging", "quarantine")
        for path in (root / folder).rglob("*")
        if path.is_file()
    }


def named_paths(state: State) -> set[str]:
    """Every payload file that a state names as live."""
    entries = (*state.blocks.values(), *state.sidecars.values())
    return {entry.file.path for entry in entries if entry.file is not None}


def file_of(store: MutableStore, kind: Kind, key: bytes) -> FileName:
    entry = core_of(store).state.entry(kind, key)
    assert entry is not None and entry.file is not None
    return entry.file


def flip_byte(path: Path, offset: int = -1) -> None:
    """Change one byte of a file."""
    damaged = bytearray(path.read_bytes())
    damaged[offset] ^= 0xFF
    path.write_bytes(damaged)


class SkippedTime:
    """A clock that can be moved forward."""

    def __init__(self) -> None:
        self.skipped = 0.0
        self.clock = Clock(monotonic=lambda: time.monotonic() + self.skipped)

    def skip(self, store: MutableStore, seconds: float) -> None:
        """Let time pass, and tell whoever waits."""
        core = core_of(store)
        with core.lock:
            self.skipped += seconds
            core.lock.notify_all()


class CacheMaker:
    """Opens caches below a directory, and holds each of them to the invariants at the end."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "cache"
        self._stores: list[MutableStore] = []

    def open(
        self,
        settings: StoreSettings = SETTINGS,
        *,
        root: Path | None = None,
        clock: Clock | None = None,
        make_files: Callable[[Path], HookedFiles] = HookedFiles,
    ) -> MutableStore:
        root = root or self.root
        store = MutableStore.open(root, settings, clock=clock, make_files=make_files)
        self._stores.append(store)
        return store

    def reopen(self, store: MutableStore, settings: StoreSettings = SETTINGS) -> MutableStore:
        """Close a store in order and open its cache again."""
        store.close()
        return self.open(settings, root=store.files.root)

    def after_a_crash(
        self, store: MutableStore, settings: StoreSettings = SETTINGS
    ) -> MutableStore:
        """Open a copy of the disk as it is now: to it the process died here."""
        root = store.files.root
        copy = root.with_name(f"{root.name}.{len(self._stores)}")
        shutil.copytree(root, copy)
        return self.open(settings, root=copy)

    def abandon(self) -> None:
        """Close what is open, for a test that failed already."""
        for store in self._stores:
            files = files_of(store)
            files.hook = files.after_commit = files.free = None
            store.close()

    def check(self) -> None:
        """Every cache keeps the invariants, and its journal replays to the state that it ran."""
        last = {store.files.root: store for store in self._stores}
        for store in self._stores:
            files = files_of(store)
            files.hook = files.after_commit = files.free = None
            if files.descriptor >= 0:
                settle(store)
                found = list(store.violations())
                assert not found, found
                store.close()
        for root, store in last.items():
            if (root / "journal").exists() and not core_of(store).log.is_unsettled:
                assert records_of(replayed(root)) == records_of(core_of(store).state)


@contextlib.contextmanager
def made_caches(directory: Path) -> Generator[CacheMaker]:
    """A maker whose caches are checked at the end, unless the test failed already."""
    maker = CacheMaker(directory)
    try:
        yield maker
    except BaseException:
        maker.abandon()
        raise
    maker.check()
