"""Any history with crashes inside it, against a model that is right because it is trivial.

A crash is part of a rule: it comes at a step of that rule that is drawn, with a drawn part of what
was not durable. Crashes between the rules would hardly ever find anything.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from crash_story import (
    SETTINGS,
    Between,
    EntryId,
    Legal,
    World,
    another_life,
    boundary,
    key,
    located,
    put,
    require_sound,
    settle,
)
from crashes import Disk, Image, RecordingFiles
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from walkback.journal.events import Missed, Restored
from walkback.journal.words import Kind, MissReason, NotStoredReason
from walkback.store.boundary import Boundary
from walkback.store.store import MutableStore

EXAMPLES = int(os.environ.get("WALKBACK_EXAMPLES") or 14)
STEPS = 12

QUICK = replace(SETTINGS, compact_every_events=12, journal_events_kept=4)
NAMESPACES = ("n", "m")


class Crash(NamedTuple):
    """When in a rule it ends, and what is left: ``position`` of 1 is after its last step."""

    position: float
    is_power_loss: bool
    seed: int


CRASHES = st.none() | st.builds(Crash, st.floats(0, 1), st.booleans(), st.integers(0, 2**16))


class Cache(RuleBasedStateMachine):
    """A store over a recorded disk, and the world that should be found in it."""

    # Names are paths, such as "nab": a namespace, then a letter for each block. Two rules that draw
    # the same parent and letter mean the same key.
    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.scratch = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        self.life = another_life(is_verified=False)
        self.life.__enter__()
        self.root = self.scratch / "0"
        self.root.mkdir()
        self.root_count = 1
        self.disk = Disk()
        self.disks: list[Disk] = []
        self.world = World()
        self.version = 0
        self.store: MutableStore | None = None

    # The rules.

    @initialize(crash=CRASHES)
    def begin(self, crash: Crash | None) -> None:
        self.change(self.open, self.world, crash)

    @rule(
        target=blocks,
        above=st.sampled_from(NAMESPACES) | blocks,
        letter=st.sampled_from("ab"),
        sizes=st.sampled_from([(1, 700), (5000, None), (0, 40), (513, 1)]),
        crash=CRASHES,
    )
    def store_boundary(
        self, above: str, letter: str, sizes: tuple[int, int | None], crash: Crash | None
    ) -> str:
        name = above + letter
        self.run(lambda: self.put(name, self.new_entries(name, *sizes)), crash)
        return name

    @rule(name=blocks, crash=CRASHES)
    def add_sidecar(self, name: str, crash: Crash | None) -> None:
        self.version += 1
        state = {(Kind.SIDECAR, key(name)): b"%d;" % self.version * 50}
        self.run(lambda: self.put(name, state), crash)

    @rule(name=blocks, crash=CRASHES)
    def replace_what_cannot_be_read(self, name: str, crash: Crash | None) -> None:
        """A repeated put writes nothing, unless a restore could not read what is there."""
        here = {k: v for k, v in self.world.entries.items() if k[1] == key(name) and v}
        if not here or self.is_orphan(name):
            return
        again = put(self.opened, self.boundary_of(name, here), here)
        assert again.is_empty
        for kind, _ in here:
            found = located(self.opened, kind, key(name))
            assert found is not None
            self.opened.damage.suspect(found)
        self.version += 1
        newer = dict.fromkeys(here, b"%d;" % self.version * 30)

        def act() -> World:
            claim = put(self.opened, self.boundary_of(name, newer), newer)
            assert claim.refusal is None, claim.refusal
            return self.world.with_entries(newer)

        self.run(act, crash)

    @rule(name=blocks, crash=CRASHES)
    def store_below_on_a_full_volume(self, name: str, crash: Crash | None) -> None:
        """Least recently used leaves have to go, as many as it takes, or the store is refused."""
        entries = self.new_entries(name + "c", 9000, 100)
        if self.is_orphan(name + "c") or entries.keys() & self.world.entries.keys():
            return

        def act() -> World:
            files = self.files
            files.room_bytes = files.used_bytes() + 10_000
            claim = put(self.opened, self.boundary_of(name + "c", entries), entries)
            settle(self.opened)
            files.room_bytes = None
            kept = {
                k: v for k, v in self.world.entries.items() if located(self.opened, *k) is not None
            }
            protected = {key(name[:end]) for end in range(2, len(name) + 1)} | self.world.pins
            assert all(k in kept for k in self.world.entries if k[1] in protected)
            quarantined = len(list((self.root / "quarantine").iterdir()))
            after = replace(self.world, entries=kept, quarantined=quarantined)
            return after if claim.refusal is not None else after.with_entries(entries)

        self.run(act, crash, lambda after: Between(self.world, after))

    @rule(name=blocks)
    def restore(self, name: str) -> None:
        """A use is noted and rides along, or is lost in a crash, which changes nothing to see."""
        if (Kind.SIDECAR, key(name)) in self.world.entries:
            event = Restored(
                request=1,
                tip=key(name)[:8],
                block_count=len(name) - 1,
                matched=1,
                endpoint=1,
                endpoint_tokens=4 * len(name) - 4,
                prompt_tokens=99,
                walkbacks=0,
                mixed_plan=False,
            )
            self.opened.note_restored(event, endpoint=key(name), sidecars_read=1)

    @rule(name=blocks, kind=st.sampled_from(Kind), crash=CRASHES)
    def quarantine(self, name: str, kind: Kind, crash: Crash | None) -> None:
        if not self.world.entries.get((kind, key(name))):
            return
        gone = [(each, key(name)) for each in Kind if each >= kind]
        without = self.world.without(*gone)
        aside = replace(without, quarantined=without.quarantined + 1)

        def act() -> World:
            found = located(self.opened, kind, key(name))
            assert found is not None
            self.opened.damage.quarantine(found, "for the test")
            return aside

        self.run(act, crash, lambda after: [self.world, without, aside])

    @rule(name=blocks, crash=CRASHES)
    def pin(self, name: str, crash: Crash | None) -> None:
        if (Kind.BLOCK, key(name)) in self.world.entries:
            self.change(
                lambda: self.opened.operator.pin(key(name)),
                replace(self.world, pins=self.world.pins | {key(name)}),
                crash,
            )

    @rule(name=blocks, crash=CRASHES)
    def unpin(self, name: str, crash: Crash | None) -> None:
        self.change(
            lambda: self.opened.operator.unpin(key(name)),
            replace(self.world, pins=self.world.pins - {key(name)}),
            crash,
        )

    @rule(name=blocks, crash=CRASHES)
    def report_bad(self, name: str, crash: Crash | None) -> None:
        path = key(name).rstrip(b".")
        self.change(
            lambda: self.opened.operator.report_bad(Kind.BLOCK, key(name), "for the test"),
            self.world.without(*(k for k in self.world.entries if k[1].startswith(path))),
            crash,
        )

    @rule(namespace=st.sampled_from(NAMESPACES), crash=CRASHES)
    def purge(self, namespace: str, crash: Crash | None) -> None:
        mine = namespace.encode()
        self.change(
            lambda: self.opened.operator.purge(key(namespace)),
            self.world.without(*(k for k in self.world.entries if k[1].startswith(mine))),
            crash,
        )

    @rule(count=st.integers(1, 15), crash=CRASHES)
    def miss_until_it_compacts(self, count: int, crash: Crash | None) -> None:
        def act() -> None:
            for number in range(count):
                self.opened.note_missed(
                    Missed(
                        request=number,
                        tip=b"tip",
                        block_count=1,
                        prompt_tokens=4,
                        walkbacks=0,
                        reason=MissReason.UNSEEN,
                        detail="",
                    )
                )
            self.opened.flush()

        self.change(act, self.world, crash)

    @rule(crash=CRASHES)
    def close_and_open(self, crash: Crash | None) -> None:
        def act() -> None:
            self.opened.close()
            self.open()

        self.change(act, self.world, crash)

    @invariant()
    def it_is_the_world(self) -> None:
        if self.store is not None:
            require_sound(self.store, self.root, [self.world])

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
        self.life.__exit__(None, None, None)
        shutil.rmtree(self.scratch)

    # What the rules are made of.

    @property
    def opened(self) -> MutableStore:
        assert self.store is not None
        return self.store

    @property
    def files(self) -> RecordingFiles:
        files = self.opened.files
        assert isinstance(files, RecordingFiles)
        return files

    def open(self) -> None:
        disk = self.disk
        self.store = MutableStore.open(
            self.root,
            QUICK,
            make_files=lambda root: RecordingFiles(
                root, disk, lambda step: self.disks.append(disk.copy())
            ),
        )

    def new_entries(
        self, name: str, block_bytes: int, sidecar_bytes: int | None
    ) -> dict[EntryId, bytes]:
        self.version += 1
        text = b"%d;" % self.version * 5000
        entries = {(Kind.BLOCK, key(name)): text[:block_bytes]}
        if sidecar_bytes is not None:
            entries[Kind.SIDECAR, key(name)] = text[:sidecar_bytes]
        return entries

    def boundary_of(self, name: str, entries: dict[EntryId, bytes]) -> Boundary:
        above = name[:-1] if len(name) > 2 else ""
        return boundary(name, entries, parent=above, depth=len(name) - 1, namespace=name[0])

    def is_orphan(self, name: str) -> bool:
        return len(name) > 2 and (Kind.BLOCK, key(name[:-1])) not in self.world.entries

    def put(self, name: str, entries: dict[EntryId, bytes]) -> World:
        missing = {k: v for k, v in entries.items() if k not in self.world.entries}
        claim = put(self.opened, self.boundary_of(name, entries), entries)
        assert claim.is_empty == (not missing)
        below = (Kind.BLOCK, key(name)) not in {**self.world.entries, **entries}
        if missing and (below or (self.is_orphan(name) and (Kind.BLOCK, key(name)) in missing)):
            assert claim.refusal is not None
            assert claim.refusal.reason is NotStoredReason.PARENT
            return self.world
        assert claim.refusal is None, claim.refusal
        return self.world.with_entries(missing)

    def change(self, act: Callable[[], object], after: World, crash: Crash | None) -> None:
        def acted() -> World:
            act()
            return after

        self.run(acted, crash)

    def run(
        self,
        act: Callable[[], World],
        crash: Crash | None,
        legal: Callable[[World], Legal] | None = None,
    ) -> None:
        """Do it, and then, if there is a crash, go back to where it was and come up from there."""
        self.disks.clear()
        self.disks.append(self.disk.copy())
        after = act()
        settle(self.opened)
        if crash is None:
            self.world = after
            return
        step = round(crash.position * (len(self.disks) - 1))
        is_over = step == len(self.disks) - 1
        worlds = legal(after) if legal is not None else [self.world, after]
        self.come_up(_image(self.disks[step], crash), [after] if is_over else worlds)

    def come_up(self, image: Image, legal: Legal) -> None:
        self.opened.close()
        self.store = None
        shutil.rmtree(self.root)
        self.root = self.scratch / str(self.root_count)
        self.root_count += 1
        image.write_to(self.root)
        self.disk = Disk.of(self.root)
        self.open()
        self.world = require_sound(self.opened, self.root, legal)


def _image(disk: Disk, crash: Crash) -> Image:
    if not crash.is_power_loss:
        return disk.died()
    randomness = random.Random(crash.seed)
    return randomness.choice(list(disk.lost_power(randomness, random_count=10)))


TestCache = Cache.TestCase
TestCache.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    database=None,
    derandomize=not os.environ.get("WALKBACK_EXAMPLES"),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
