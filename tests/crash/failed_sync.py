"""Layer ``failed sync``: one sync fails, the cache goes on, and later the power is lost.

Linux takes the pages of a sync that failed for clean. Each sync of a short history fails once, and
each of LMDB's writes; a write of LMDB's meta page may then be on the disk or not. What an act was
refused may be there or not; what was acknowledged must be there, whatever failed before.
"""

import contextlib
import errno
import math
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from walkback.journal.errors import WalkbackError
from walkback.journal.words import Kind as Part
from walkback.store.boundary import Boundary, Claim
from walkback.store.store import MutableStore

from .interposer import ANY, SYNCS, Interposer, Kind, preloaded_environment, unavailable
from .judging import Case, judge_all
from .layer import Layer, MutableReport, state_of
from .libc import judge
from .lives import deletions_in_turn, open_store, scratch_directory, steady
from .losses import lost_power
from .pages import PagedImage, PageDisk
from .processes import ending_of
from .recording import ActingFiles
from .story import Worlds
from .trace import Call, calls_of
from .tracing import (
    CACHE,
    NOTHING,
    Moment,
    Told,
    identity_of,
    moments_of,
    run_with_interposer,
)
from .world import (
    SETTINGS,
    EntryId,
    World,
    boundary,
    difference,
    key,
    located,
    pair,
    settle,
    tensors_of,
    world_of,
)

# It compacts, seals a segment and writes a backup within a few acts.
_SETTINGS = replace(SETTINGS, compact_every_events=12)
# Of the moments after the fault the first ones are looked at, and so many of the others.
_FIRST_MOMENTS = 12
_LATER_MOMENTS = 12
# Of what a moment may leave: with none of what is not durable, with all but what is taken for
# clean, and some more.
_IMAGES = 8
# What takes longer than this waits for something else.
_PATIENCE_SECONDS = 0.5
# Histories are told and looked at in batches, for their traces take memory.
_BATCH = 16


class Fault(NamedTuple):
    """The n-th call of a kind fails; ``is_late`` if it may have had its effect."""

    kind: Kind
    number: int
    is_late: bool = False

    def __str__(self) -> str:
        kind = "sync" if self.kind is SYNCS else "write"
        return f"{kind} {self.number} failed{' late' if self.is_late else ''}"


NO_FAULT = Fault(ANY, 0)


class Endurance:
    """A history that goes on when it is refused something.

    ``possible`` are the worlds of which one must be found if the power is lost now, ``world`` is
    what the running store shows.
    """

    def __init__(self, root: Path, announce: Callable[[Worlds], None]) -> None:
        self._root = root
        self._announce = announce
        self._store: MutableStore | None = None
        self.world = World()
        self.possible: Worlds = NOTHING

    @property
    def store(self) -> MutableStore:
        assert self._store is not None
        return self._store

    def open(self) -> None:
        """Open, at the second try if need be. From there on it is certain what is there."""
        for _ in range(2):
            try:
                self._store = open_store(self._root, ActingFiles, _SETTINGS)
                break
            except (OSError, WalkbackError):
                continue
        self._see()
        self._expect((self.world,))

    def close(self) -> None:
        # What went wrong the next opening will see.
        with contextlib.suppress(OSError, WalkbackError):
            self.store.close()
        self._store = None

    def act(self, change: Callable[[], bool], *worlds: World) -> None:
        """Do what leads through these worlds; ``change`` says whether it was acknowledged."""
        before = self.possible
        # Nothing of it says where a file is that was on its way into quarantine.
        counts = sorted({world.quarantined for world in (*before, *worlds)})
        ends = [replace(world, quarantined=count) for world in worlds for count in counts]
        self._expect((*before, *ends))
        try:
            is_acknowledged = change()
            # A deletion whose commit failed rides with the next.
            self.store.settle_deletions(_PATIENCE_SECONDS)
            self.store.flush()
            settle(self.store)
        except (OSError, WalkbackError):
            is_acknowledged = False
        if is_acknowledged:
            self._expect(ends[-len(counts) :])
        self._see()

    def put(self, name: str, version: int = 1, *, parent: str = "", depth: int) -> None:
        entries = pair(name, version)
        wanted = boundary(name, entries, parent=parent, depth=depth)
        self.act(lambda: _put(self.store, wanted, entries), self.world.with_entries(entries))

    def _expect(self, worlds: Sequence[World]) -> None:
        self.possible = tuple(
            world for index, world in enumerate(worlds) if world not in worlds[:index]
        )
        self._announce(self.possible)

    def _see(self) -> None:
        found = world_of(self.store, self._root)
        assert found in self.possible, difference(found, self.possible)
        self.world = found


def _put(store: MutableStore, wanted: Boundary, entries: dict[EntryId, bytes]) -> bool:
    claim = store.claim(wanted, request=1, producer="test")
    # Nothing is put if it is refused at once, or if what was to be replaced is still there.
    if not isinstance(claim, Claim) or claim.is_empty:
        return False
    store.reserve(claim)
    store.put(claim, tensors_of(claim, entries), prefill_seconds=0.5)
    assert claim.settled.wait(30)
    return claim.refusal is None


def endure(root: Path, announce: Callable[[Worlds], None]) -> None:
    """Three epochs in which it stores, replaces, pins, quarantines, purges, reports and deletes."""
    told = Endurance(root, announce)
    told.open()
    told.put("a1", depth=1)
    told.put("a2", parent="a1", depth=2)
    told.put("b2", parent="a1", depth=2)
    told.close()
    told.open()
    _suspect(told, "a2")
    told.put("a2", 2, parent="a1", depth=2)
    _pin(told, "a1")
    _quarantine(told, "a2")
    told.put("a2", 3, parent="a1", depth=2)
    _report_bad(told, "b2")
    told.put("c1", depth=1)
    told.close()
    told.open()
    told.put("c2", parent="c1", depth=2)
    told.close()


def _suspect(told: Endurance, name: str) -> None:
    for kind in Part:
        found = located(told.store, kind, key(name))
        if found is not None:
            told.store.damage.suspect(found)


def _pin(told: Endurance, name: str) -> None:
    def pin() -> bool:
        told.store.operator.pin(key(name))
        return True

    if (Part.BLOCK, key(name)) in told.world.entries:
        told.act(pin, replace(told.world, pins=frozenset([key(name)])))


def _quarantine(told: Endurance, name: str) -> None:
    """Nothing says that it is done, so it may or may not be, until the next opening."""
    found = located(told.store, Part.BLOCK, key(name))
    if found is None:
        return

    def quarantine() -> bool:
        told.store.damage.quarantine(found, "it was wrong")
        return False

    gone = told.world.without(*pair(name))
    told.act(quarantine, gone, replace(gone, quarantined=gone.quarantined + 1))


def _report_bad(told: Endurance, name: str) -> None:
    def report_bad() -> bool:
        told.store.operator.report_bad(Part.BLOCK, key(name), "it was wrong")
        return True

    if (Part.BLOCK, key(name)) in told.world.entries:
        told.act(report_bad, told.world.without(*pair(name)))


def told_with_fault(directory: Path, fault: Fault) -> bytes:
    """The history, traced, with this fault in it, pickled."""
    interposer = Interposer()
    worlds: list[Worlds] = []

    def announce(legal: Worlds) -> None:
        interposer.mark(str(len(worlds)))
        worlds.append(legal)

    directory.mkdir()
    interposer.watch(directory)
    interposer.fail_at(fault.number, errno.EIO, kind=fault.kind, is_late=fault.is_late)
    interposer.start_trace()
    with steady(), deletions_in_turn():
        endure(directory / CACHE, announce)
    return pickle.dumps(Told(interposer.take_trace(), worlds))


def told_with_faults(directory: Path, faults: Sequence[Fault]) -> list[Told | str]:
    """The history with each of these faults, told by a process of its own; or what it died of."""
    outcomes: list[Told | str] = []
    for number, fault in enumerate(faults):
        ending = ending_of(partial(told_with_fault, directory / str(number), fault))
        outcomes.append(ending.problem or pickle.loads(ending.said))
    return outcomes


def faults_in(calls: Sequence[Call]) -> list[Fault]:
    """What can fail in a history that had these calls without a fault."""
    faults: list[Fault] = []
    syncs = writes = 0
    for call in calls:
        if call.kind & SYNCS:
            syncs += 1
            faults.append(Fault(SYNCS, syncs))
        elif call.kind is Kind.WRITE:
            writes += 1
            if call.path.endswith("data.mdb"):
                faults.append(Fault(Kind.WRITE, writes))
                if call.is_durable:
                    faults.append(Fault(Kind.WRITE, writes, is_late=True))
    return faults


def survey(report: MutableReport, fault: Fault, told: Told) -> Iterator[Case]:
    """What power losses after the fault may leave, as far as the report takes it."""
    calls = [call for call in calls_of(told.trace) if call.kind is not Kind.MARK]
    moments = moments_of(PageDisk(), told, NOTHING)
    # It is met in every telling, since until then all of them are the same.
    first = next(index for index, call in enumerate(calls) if call.error)
    randomness = random.Random(f"{report.effort.seed} {fault}")
    later = moments[first + _FIRST_MOMENTS :]
    later = randomness.sample(later, min(len(later), _LATER_MOMENTS))
    for moment in [*moments[first : first + _FIRST_MOMENTS], *later]:
        worlds = identity_of(moment.legal)
        for image in _images_at(moment, randomness):
            state = report.takes(image.identity, worlds)
            if state is not None:
                label = f"{fault}, after '{moment.step}', {image.label}"
                yield Case(state, label, (), partial(judge, image, moment.legal, False))


def _images_at(moment: Moment, randomness: random.Random) -> list[PagedImage]:
    first, second, *others = (*lost_power(moment.disk, randomness, random_count=4), None)
    images = [first, second, *randomness.sample(others, min(len(others), _IMAGES - 2))]
    return [image for image in images if image is not None]


def run(report: MutableReport) -> None:
    """Each fault, and power losses after it."""
    effort = report.effort
    if (reason := unavailable()) is not None:
        report.skipped = reason
        return
    with steady(), scratch_directory() as scratch:
        environment = preloaded_environment(scratch)

        def told(faults: Sequence[Fault]) -> list[Told | str]:
            place = scratch / f"told{len(report.histories)}"
            place.mkdir()
            for fault in faults:
                report.told(*fault)
            return run_with_interposer(environment, effort.mutant, told_with_faults, place, faults)

        [plain] = told([NO_FAULT])
        assert isinstance(plain, Told), plain
        faults = faults_in(list(calls_of(plain.trace)))
        randomness = random.Random(effort.seed)
        count = len(faults) if effort.only else math.ceil(effort.share * len(faults))
        chosen = iter(randomness.sample(faults, count))
        while batch := list(islice(chosen, _BATCH)):
            for fault, outcome in zip(batch, told(batch), strict=True):
                if isinstance(outcome, str):
                    report.failed(state_of("told", *fault), f"{fault}: {outcome}")
                else:
                    judge_all(report, survey(report, fault, outcome), scratch)
                if report.is_over:
                    return


LAYER = Layer("failed sync", run, quick_share=0.06, full_share=0.6)
