"""The course of a cache's life that its surroundings disturb: what it does, and what was promised.

A course is a list of acts. What a put acknowledged is promised from then on. An act that failed may
have happened or not.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cache_maker import Hook, HookedFiles

from walkback.journal.errors import WalkbackError
from walkback.journal.words import Kind
from walkback.store.boundary import Claim
from walkback.store.core import Clock
from walkback.store.lookup import Located
from walkback.store.store import MutableStore

from .restoring import heal, restored, restored_whole
from .specimen import PLACES, boundary_of, entries_of
from .world import SETTINGS, EntryId, key, located, settle, state_of, tensors_of, world_of

OpenFiles = Callable[[Path], HookedFiles]

FOLDERS = ("blocks", "sidecars", "staging", "quarantine", "archive", "backup", "journal")

_NOTHING: frozenset[bytes | None] = frozenset([None])


@dataclass(slots=True)
class Course:
    """A cache at ``root`` on its way, and the things ``outside`` that are none of its business.

    ``promised`` is what must be found under each key, None if nothing; several if an act failed.
    """

    root: Path
    outside: Path
    make_files: OpenFiles = HookedFiles
    store: MutableStore | None = None
    promised: dict[EntryId, frozenset[bytes | None]] = field(
        default_factory=dict[EntryId, frozenset[bytes | None]]
    )
    stored_count: int = 0
    failures: list[str] = field(default_factory=list[str])
    # What the disk does before each step.
    hook: Hook | None = None
    # What a clock that was set shows more than the one of this machine.
    wall_seconds: float = 0.0
    monotonic_seconds: float = 0.0

    def open(self) -> None:
        """Open it, if the surroundings let it."""
        clock = Clock(
            wall_ns=lambda: int((1e9 + self.wall_seconds) * 1e9),
            monotonic=lambda: time.monotonic() + self.monotonic_seconds,
        )
        try:
            self.store = MutableStore.open(
                self.root, SETTINGS, clock=clock, make_files=self._made_files
            )
        except (WalkbackError, OSError) as error:
            self.failures.append(f"open: {error!r}")

    def _made_files(self, root: Path) -> HookedFiles:
        def hook(step: str, name: str) -> None:
            if self.hook is not None:
                self.hook(step, name)

        files = self.make_files(root)
        files.hook = hook
        return files

    def close(self) -> None:
        store, self.store = self.store, None
        if store is not None:
            store.close()

    def may_lose(self, entries: Iterable[EntryId]) -> None:
        """The surroundings took these away; a block's sidecar goes with it."""
        for kind, name in entries:
            for each in Kind if kind is Kind.BLOCK else (kind,):
                if (each, name) in self.promised:
                    self.promised[each, name] |= _NOTHING

    def require_promised(self) -> None:
        """What is served was promised, what was promised is there, and the invariants hold.

        What may have been lost is stored again, so that nothing stays behind a hole.
        """
        store = self.store
        assert store is not None
        self.require_legal(restored_whole(store))
        for entry, legal in self.promised.items():
            is_there = state_of(store).entry(*entry) is not None
            assert is_there or None in legal, f"{entry} was lost"
        wanted = {entry: b"" for entry, legal in self.promised.items() if legal != _NOTHING}
        while stored := heal(store, wanted):
            self.promised |= {entry: frozenset([each]) for entry, each in stored.items()}
            self.require_legal(restored_whole(store))
        settle(store)
        violations = list(store.violations())
        assert not violations, violations
        found = world_of(store, self.root).entries
        for entry in found.keys() | self.promised.keys():
            content, legal = found.get(entry), self.promised.get(entry, _NOTHING)
            assert content in legal, f"{entry} is {content!r:.30}, promised was {legal!r:.80}"

    def require_legal(self, served: Mapping[EntryId, bytes]) -> None:
        """What was served was promised."""
        for entry, content in served.items():
            legal = self.promised.get(entry, _NOTHING)
            assert content in legal, f"{entry} was served as {content[:20]!r}"


PutRight = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Trouble:
    """``begin`` starts it and returns what puts it right; ``target`` must be there before.

    While a ``harmless`` one lasts nothing fails. After an ``offline`` one nothing is stored.
    """

    name: str
    begin: Callable[[Course], PutRight]
    target: Callable[[Course], bool] = lambda course: True
    is_harmless: bool = False
    is_offline: bool = False
    needs_open: bool = False
    make_files: Callable[[Path], HookedFiles] = HookedFiles


Act = Callable[[Course], None]


def put(course: Course, name: str, version: int) -> None:
    """Store both parts; what stands there already is replaced."""
    store, entries = course.store, entries_of(name, version)
    if store is None:
        return
    for kind in Kind:
        found = _located(store, kind, name)
        if found is not None:
            store.damage.suspect(found)
    claim = store.claim(boundary_of(name, entries), request=1, producer="test")
    if isinstance(claim, Claim) and not claim.is_empty:
        store.reserve(claim)
        store.put(claim, tensors_of(claim, entries), prefill_seconds=0.5)
        assert claim.settled.wait(30), f"{name} was never settled"
    if isinstance(claim, Claim) and claim.refusal is None:
        course.stored_count += 1
        written = {(each.part.kind, each.part.key) for each in claim.writings}
        for entry in written:
            course.promised[entry] = frozenset([entries[entry]])
    else:
        course.failures.append(f"put {name} {version}: {claim}")
        for entry, content in entries.items():
            course.promised[entry] = course.promised.get(entry, _NOTHING) | {content}


def report_bad(course: Course, name: str) -> None:
    """Drop a block and its sidecar."""
    store = course.store
    if store is not None:
        _drop(course, name, lambda: store.operator.report_bad(Kind.BLOCK, key(name), "for a test"))


def quarantine(course: Course, name: str) -> None:
    """Have a block put aside, with which its sidecar goes."""
    store = course.store
    found = None if store is None else _located(store, Kind.BLOCK, name)
    if store is not None and found is not None:
        _drop(course, name, lambda: store.damage.quarantine(found, "for a test"))


def read(course: Course) -> None:
    """Restore every prompt; nothing but what was promised is served."""
    store = course.store
    if store is not None:
        for name in PLACES:
            course.require_legal(restored(store, name))


def _drop(course: Course, name: str, act: Callable[[], None]) -> None:
    gone = [entry for entry in entries_of(name, 1) if entry in course.promised]
    assert course.store is not None
    before = course.store.statistics().events
    try:
        act()
    except WalkbackError as error:
        course.failures.append(f"drop {name}: {error!r}")
    events = course.store.statistics().events
    for entry in gone:
        is_recorded = any(
            events.get(each, 0) > before.get(each, 0) for each in ("ReportedBad", "Quarantined")
        )
        course.promised[entry] = _NOTHING if is_recorded else course.promised[entry] | _NOTHING


def _located(store: MutableStore, kind: Kind, name: str) -> Located | None:
    try:
        return located(store, kind, key(name))
    except WalkbackError:
        return None


ACTS: tuple[Act, ...] = (
    Course.open,
    partial(put, name="a1", version=1),
    partial(put, name="a2", version=1),
    partial(put, name="b2", version=1),
    partial(put, name="a1", version=2),
    partial(put, name="a3", version=1),
    partial(report_bad, name="b2"),
    partial(put, name="c1", version=1),
    read,
    Course.close,
    Course.open,
    partial(put, name="a2", version=2),
    partial(put, name="b2", version=3),
    partial(quarantine, name="c1"),
    partial(put, name="c1", version=2),
    partial(put, name="c2", version=1),
    read,
)

# How many acts there are until it is closed in between.
CLOSED = 1 + ACTS.index(Course.close)
