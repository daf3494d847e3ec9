"""What a restore sees: live entries and payloads on their way, and how it keeps them from going."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..journal.entries import Entry
from ..journal.words import FileName, Kind
from .boundary import Writing
from .core import MutableCore
from .overlay import Kept
from .staging import release_memory
from .tensors import Tensor

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A payload that can be read: from its file, or while it is being stored from its buffers.

    ``sequence`` is its Committed's, 0 while there is none.
    """

    kind: Kind
    key: bytes
    parent: bytes
    namespace: bytes
    start: int
    end: int
    generation: int
    file: FileName | None
    nbytes: int
    header_digest: bytes
    plan_digest: bytes
    sequence: int
    tensors: Sequence[Tensor] | None = None


class View:
    """The entries as a lookup may see them. Valid only inside ``MutableStore.choose``."""

    def __init__(self, core: MutableCore) -> None:
        self._core = core
        # Lengths of the blocks in flight by their parents, looked up once.
        self._on_their_way: dict[bytes, set[int]] | None = None

    def namespaces(self) -> dict[bytes, tuple[tuple[str, str], ...]]:
        """The fields of every namespace that was ever bound."""
        return self._core.state.namespaces

    def block_count(self, namespace: bytes | None = None) -> int:
        """How many blocks are live, in all or in one namespace."""
        state = self._core.state
        return len(state.blocks) if namespace is None else state.population[namespace]

    def block(self, key: bytes) -> Located | None:
        return self._find(Kind.BLOCK, key)

    def sidecar(self, key: bytes) -> Located | None:
        return self._find(Kind.SIDECAR, key)

    def goes_on(self, key: bytes) -> bool:
        """Whether other blocks stand below a live one."""
        entry = self._core.state.blocks.get(key)
        return entry is not None and entry.child_count > 0

    def short_lengths(self, parent: bytes) -> list[int]:
        """The lengths of blocks below a block that may be tails, longest first, without repeats."""
        if self._on_their_way is None:
            self._on_their_way = {}
            for (kind, _), each in self._core.overlay.in_flight.items():
                part = each.writing.part
                if kind is Kind.BLOCK and each.writing.is_handed_over:
                    lengths = self._on_their_way.setdefault(part.parent, set())
                    lengths.add(part.end - part.start)
        stored = self._core.state.short_lengths(parent)
        if arriving := self._on_their_way.get(parent):
            return sorted({*stored, *arriving}, reverse=True)
        return stored

    def _find(self, kind: Kind, key: bytes) -> Located | None:
        overlay = self._core.overlay
        on_its_way = overlay.in_flight.get((kind, key))
        if on_its_way is not None and on_its_way.writing.is_handed_over:
            return _located_writing(on_its_way.writing)
        entry = self._core.state.entry(kind, key)
        if entry is None or (kind, key) in overlay.victims:
            return None
        return _located_entry(entry)


class Lease:
    """Keeps what somebody reads or builds on from being evicted, unlinked or released.

    Whoever has it releases it. One that is lost on the way, by an error for example, ends all the
    same, a moment after it is garbage.
    """

    __slots__ = ("_dropped", "kept")

    def __init__(self, kept: Kept, dropped: deque[Kept]) -> None:
        self.kept = kept
        self._dropped = dropped

    def __del__(self) -> None:
        # This may run anywhere, in the middle of what holds the lock too: so it only notes it.
        if not self.kept.is_over:
            self._dropped.append(self.kept)


def lease_keys(core: MutableCore, keys: tuple[bytes, ...]) -> Lease:
    """Keep these blocks and their sidecars from being victims. Needs the lock."""
    core.overlay.hold(keys)
    return Lease(Kept(keys=keys), core.overlay.dropped)


def lease_choice(
    core: MutableCore, choose: Callable[[View], tuple[Choice, Sequence[Located]]]
) -> tuple[Choice, Lease]:
    """Choose what to read and lease it. Needs the lock, so that nothing goes in between."""
    choice, located = choose(View(core))
    kept = Kept(
        keys=tuple(each.key for each in located),
        files=tuple(each.file for each in located if each.file is not None),
    )
    core.overlay.hold(kept.keys)
    core.overlay.leased.update(kept.files)
    for each in located:
        if each.tensors is not None:
            claim = core.overlay.in_flight[each.kind, each.key].claim
            claim.readers += 1
            kept.claims.append(claim)
    return choice, Lease(kept, core.overlay.dropped)


def release_lease(core: MutableCore, lease: Lease) -> None:
    """End a lease. Needs the lock. Releasing twice is harmless."""
    _end(core, lease.kept)


def end_dropped_leases(core: MutableCore) -> None:
    """End the leases that became garbage. Needs the lock."""
    while core.overlay.dropped:
        _end(core, core.overlay.dropped.popleft())


def _end(core: MutableCore, kept: Kept) -> None:
    if kept.is_over:
        return
    kept.is_over = True
    core.overlay.let_go(kept.keys)
    for file in kept.files:
        core.overlay.leased[file] -= 1
        if not core.overlay.leased[file]:
            del core.overlay.leased[file]
    for claim in kept.claims:
        claim.readers -= 1
        release_memory(core, claim)
    core.lock.notify_all()


def _located_entry(entry: Entry) -> Located:
    return Located(
        kind=entry.kind,
        key=entry.key,
        parent=entry.parent,
        namespace=entry.namespace,
        start=entry.start,
        end=entry.end,
        generation=entry.generation,
        file=entry.file,
        nbytes=entry.nbytes,
        header_digest=entry.header_digest,
        plan_digest=entry.plan_digest,
        sequence=entry.sequence,
    )


def _located_writing(writing: Writing) -> Located:
    part, description = writing.part, writing.description
    return Located(
        kind=part.kind,
        key=part.key,
        parent=part.parent,
        namespace=description.namespace,
        start=part.start,
        end=part.end,
        generation=writing.generation,
        file=None,
        nbytes=part.nbytes,
        header_digest=b"",
        plan_digest=description.plan_digest,
        sequence=0,
        tensors=writing.tensors,
    )
