"""Layer ``properties``: any history with crashes inside it, against a model that is trivial.

A crash is part of a rule: it comes at a step of that rule that is drawn, with a drawn part of what
was not durable, and others may follow inside the recoveries from it. Crashes between the rules
would hardly ever find anything. Keys collide on purpose: rules draw from few letters.
"""

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, reporting, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from walkback.journal.events import Missed, Restored
from walkback.journal.words import Kind, MissReason, NotStoredReason
from walkback.store import operator
from walkback.store.boundary import Boundary
from walkback.store.store import MutableStore

from .disk import Disk, Image
from .layer import Layer, MutableReport, in_a_line, state_of
from .lives import another_life, open_store, steady
from .portable import identity_of
from .recording import RecordingFiles
from .world import (
    LARGE_BYTES,
    SETTINGS,
    Between,
    EntryId,
    Legal,
    World,
    boundary,
    key,
    located,
    put,
    require_sound,
    settle,
    wait_for_refused,
)

# Histories at length, and rules in each.
_EXAMPLES = 1200
_STEPS = 14

QUICK = replace(SETTINGS, compact_every_events=12, journal_events_kept=4)
NAMESPACES = ("n", "m")


class Crash(NamedTuple):
    """Which luck decides at what step it ends, and what is left."""

    is_power_loss: bool
    seed: int


Crashes = list[Crash]

# The first ends a rule, each other the recovery from the one before it.
CRASH = st.builds(Crash, st.booleans(), st.integers(0, 2**32))
OFTEN = st.lists(CRASH, min_size=1, max_size=1) | st.lists(CRASH, max_size=2)
SELDOM = st.just(Crashes()) | st.just(Crashes()) | st.lists(CRASH, max_size=2)


class Cache(RuleBasedStateMachine):
    """A store over a recorded disk, and the world that should be found in it."""

    # Names are paths, such as "nab": a namespace, then a letter for each block. Two rules that draw
    # the same parent and letter mean the same key.
    blocks = Bundle("blocks")
    report: ClassVar[MutableReport]

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
        self.skipped_seconds = 0
        self.store: MutableStore | None = None

    # The rules.

    @initialize(
        target=blocks,
        prompts=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    )
    def begin(self, prompts: list[str]) -> Any:
        """A new cache, with something in it."""
        self.open()
        for letters in prompts:
            for end in range(1, len(letters) + 1):
                name = NAMESPACES[0] + letters[:end]
                self.world = self.put(name, self.new_entries(name, 90 * end, 70))
        return multiple(*(NAMESPACES[0] + letters for letters in prompts))

    @rule(
        target=blocks,
        above=st.sampled_from(NAMESPACES) | blocks,
        letter=st.sampled_from("ab"),
        sizes=st.sampled_from([(1, 700), (5000, None), (0, 40), (513, 1)]),
        crashes=OFTEN,
    )
    def store_boundary(
        self, above: str, letter: str, sizes: tuple[int, int | None], crashes: Crashes
    ) -> str:
        name = above + letter
        self.store_it(lambda: self.put(name, self.new_entries(name, *sizes)), crashes)
        return name

    @rule(
        target=blocks,
        above=st.sampled_from(NAMESPACES) | blocks,
        letters=st.text("ab", min_size=1, max_size=4),
        crashes=OFTEN,
    )
    def store_prompt(self, above: str, letters: str, crashes: Crashes) -> str:
        """Boundary after boundary, each below the one before."""
        worlds = [self.world]

        def act() -> World:
            for end in range(len(above) + 1, len(above + letters) + 1):
                name = (above + letters)[:end]
                worlds.append(self.put(name, self.new_entries(name, 60 * end, 50), worlds[-1]))
            return worlds[-1]

        self.store_it(act, crashes, lambda after: worlds)
        return above + letters

    @rule(name=blocks, crashes=OFTEN)
    def add_sidecar(self, name: str, crashes: Crashes) -> None:
        self.version += 1
        state = {(Kind.SIDECAR, key(name)): b"%d;" % self.version * 50}
        self.store_it(lambda: self.put(name, state), crashes)

    @rule(name=blocks, crashes=OFTEN)
    def replace_what_cannot_be_read(self, name: str, crashes: Crashes) -> None:
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

        self.store_it(act, crashes)

    @rule(name=blocks, crashes=OFTEN)
    def store_below_on_a_full_volume(self, name: str, crashes: Crashes) -> None:
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
            after = self.remaining(*(key(name[:end]) for end in range(2, len(name) + 1)))
            return after if claim.refusal is not None else after.with_entries(entries)

        self.store_it(act, crashes, lambda after: Between(self.world, after))

    @rule(name=blocks, crashes=SELDOM)
    def restore(self, name: str, crashes: Crashes) -> None:
        """A use rides along with the next commit, or is lost, which changes nothing to see."""
        if (Kind.SIDECAR, key(name)) not in self.world.entries:
            return

        def act() -> None:
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
            if crashes:
                self.opened.flush()

        self.change(act, self.world, crashes)

    @rule(share=st.sampled_from([0.0, 0.4, 0.8]), crashes=SELDOM)
    def lower_the_budget(self, share: float, crashes: Crashes) -> None:
        """Entries go until it is kept, whatever is pinned or was stored last stays."""
        before = self.opened.statistics()
        used_bytes = before.holdings.used_bytes
        budget = before.charged_bytes - used_bytes + round(used_bytes * share)

        def act() -> World:
            self.opened.operator.set_budget(max(budget, 1))
            settle(self.opened)
            after = self.remaining()
            self.opened.operator.set_budget(LARGE_BYTES)
            return after

        self.run(act, crashes, lambda after: Between(self.world, after))

    @rule(name=blocks, crashes=SELDOM)
    def refuse_a_deletion(self, name: str, crashes: Crashes) -> None:
        """The file stays, charged, and goes when it can."""
        if not self.world.entries.get((Kind.BLOCK, key(name))):
            return

        def act() -> World:
            found = located(self.opened, Kind.BLOCK, key(name))
            assert found is not None and found.file is not None
            self.files.refused.add(found.file.path)
            self.opened.operator.report_bad(Kind.BLOCK, key(name), "for the test")
            settle(self.opened)
            holdings = self.opened.statistics().holdings
            assert holdings.refused_count == 1
            assert holdings.doomed_bytes == found.nbytes // 4096 * 4096 + 4096
            self.files.refused.clear()
            # It is tried again after a while, which is at most an hour.
            self.skipped_seconds += 3600
            wait_for_refused(self.opened)
            return self.without_what_is_below(name)

        self.run(act, crashes)

    @rule(name=blocks, kind=st.sampled_from(Kind), crashes=SELDOM)
    def quarantine(self, name: str, kind: Kind, crashes: Crashes) -> None:
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

        self.run(act, crashes, lambda after: [self.world, without, aside])

    @rule(name=blocks, crashes=SELDOM)
    def pin(self, name: str, crashes: Crashes) -> None:
        if (Kind.BLOCK, key(name)) in self.world.entries:
            self.change(
                lambda: self.opened.operator.pin(key(name)),
                replace(self.world, pins=self.world.pins | {key(name)}),
                crashes,
            )

    @rule(name=blocks, crashes=SELDOM)
    def unpin(self, name: str, crashes: Crashes) -> None:
        self.change(
            lambda: self.opened.operator.unpin(key(name)),
            replace(self.world, pins=self.world.pins - {key(name)}),
            crashes,
        )

    @rule(name=blocks, crashes=SELDOM)
    def report_bad(self, name: str, crashes: Crashes) -> None:
        self.change(
            lambda: self.opened.operator.report_bad(Kind.BLOCK, key(name), "for the test"),
            self.without_what_is_below(name),
            crashes,
        )

    @rule(namespace=st.sampled_from(NAMESPACES), crashes=SELDOM)
    def purge(self, namespace: str, crashes: Crashes) -> None:
        mine = namespace.encode()
        self.change(
            lambda: self.opened.operator.purge(key(namespace)),
            self.world.without(*(k for k in self.world.entries if k[1].startswith(mine))),
            crashes,
        )

    @rule(count=st.integers(1, 15), crashes=SELDOM)
    def miss_until_it_compacts(self, count: int, crashes: Crashes) -> None:
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

        self.change(act, self.world, crashes)

    @rule(crashes=SELDOM)
    def close_and_open(self, crashes: Crashes) -> None:
        def act() -> None:
            self.opened.close()
            self.open()

        self.change(act, self.world, crashes)

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
        self.store = open_store(
            self.root,
            lambda root: RecordingFiles(root, disk, lambda step: self.disks.append(disk.copy())),
            QUICK,
            lambda: time.monotonic() + self.skipped_seconds,
        )

    def remaining(self, *kept_keys: bytes) -> World:
        """The world after evictions: what they chose to leave, which is all that had to stay.

        Pinned entries had to, and blocks of ``kept_keys``, whose sidecars may be thinned.
        """
        kept = {k: v for k, v in self.world.entries.items() if located(self.opened, *k) is not None}
        for kind, name in self.world.entries.keys() - kept.keys():
            assert name not in self.world.pins, f"{name!r} is pinned, and was evicted"
            assert kind is Kind.SIDECAR or name not in kept_keys, f"{name!r} is in use"
        quarantined = len(list((self.root / "quarantine").iterdir()))
        return replace(self.world, entries=kept, quarantined=quarantined)

    def without_what_is_below(self, name: str) -> World:
        path = name.encode()
        return self.world.without(*(k for k in self.world.entries if k[1].startswith(path)))

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

    def is_orphan(self, name: str, world: World | None = None) -> bool:
        entries = (world or self.world).entries
        return len(name) > 2 and (Kind.BLOCK, key(name[:-1])) not in entries

    def put(self, name: str, entries: dict[EntryId, bytes], world: World | None = None) -> World:
        """Store it where the world is ``world``, and the world after it."""
        world = world or self.world
        missing = {k: v for k, v in entries.items() if k not in world.entries}
        claim = put(self.opened, self.boundary_of(name, entries), entries)
        assert claim.is_empty == (not missing)
        block = (Kind.BLOCK, key(name))
        is_below_nothing = block not in {**world.entries, **entries}
        if missing and (is_below_nothing or (self.is_orphan(name, world) and block in missing)):
            assert claim.refusal is not None
            assert claim.refusal.reason is NotStoredReason.PARENT
            return world
        assert claim.refusal is None, claim.refusal
        return world.with_entries(missing)

    def change(self, act: Callable[[], object], after: World, crashes: Crashes) -> None:
        def acted() -> World:
            act()
            return after

        self.run(acted, crashes)

    def store_it(
        self,
        act: Callable[[], World],
        crashes: Crashes,
        legal: Callable[[World], Legal] | None = None,
    ) -> None:
        """As ``run``, for a rule that stores."""
        self.run(act, crashes, legal, "inside a store")

    def run(
        self,
        act: Callable[[], World],
        crashes: Crashes,
        legal: Callable[[World], Legal] | None = None,
        kind: str = "inside another rule",
    ) -> None:
        """Do it, and then, if there is a crash, go back to where it was and come up from there."""
        self.disks.clear()
        self.disks.append(self.disk.copy())
        after = act()
        settle(self.opened)
        if not crashes:
            self.world = after
            return
        crash, *inner = crashes
        disk, is_over = self.end_of(crash)
        worlds = legal(after) if legal is not None else [self.world, after]
        kind = "between rules" if is_over else kind
        self.come_up(_image(disk, crash), [after] if is_over else worlds, inner, kind)

    def end_of(self, crash: Crash) -> tuple[Disk, bool]:
        """The disk at the crash, and whether all that was to be done was done."""
        step = random.Random(crash.seed).randrange(len(self.disks))
        return self.disks[step], step == len(self.disks) - 1

    def come_up(self, image: Image, legal: Legal, crashes: Crashes, kind: str) -> None:
        """Recover, and crash in that as often as is drawn; what is found at last must be legal."""
        self.report.looked(state_of(image.identity, identity_of(legal)), "crashes", kind)
        self.opened.close()
        self.store = None
        shutil.rmtree(self.root)
        self.root = self.scratch / str(self.root_count)
        self.root_count += 1
        image.write_to(self.root)
        self.disk = Disk.of(self.root)
        self.disks.clear()
        self.open()
        if not crashes:
            self.world = require_sound(self.opened, self.root, legal)
            return
        settle(self.opened)
        wait_for_refused(self.opened)
        crash, *inner = crashes
        self.come_up(_image(self.end_of(crash)[0], crash), legal, inner, "inside recovery")


def _image(disk: Disk, crash: Crash) -> Image:
    return disk.draw(random.Random(~crash.seed)) if crash.is_power_loss else disk.died()


def run(report: MutableReport) -> None:
    """Draw histories until there are enough."""
    effort = report.effort
    machine = type("Cache", (Cache,), {"report": report})
    count = max(4, round(_EXAMPLES * effort.share / effort.parts))
    said: list[str] = []
    for number in range(count):
        report.told(effort.part, number)
    with (
        steady(),
        pytest.MonkeyPatch.context() as patch,
        reporting.with_reporter(lambda text: said.append(str(text))),
    ):
        # A cache of few small files has to be made to evict, too.
        patch.setattr(operator, "MIB", 1)
        try:
            run_state_machine_as_test(
                seed(effort.seed * 1000 + effort.part)(machine),
                settings=settings(
                    max_examples=count,
                    stateful_step_count=_STEPS,
                    deadline=None,
                    database=None,
                    report_multiple_bugs=False,
                    phases=[Phase.generate, *([] if effort.until_failure else [Phase.shrink])],
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
                ),
            )
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is what is looked for
            steps = [*getattr(error, "__notes__", []), *said]
            what = "\n".join([in_a_line(error), *steps])
            report.failed_when_drawn(what.replace("\n", "\n    "))


LAYER = Layer("properties", run, quick_share=0.01)
