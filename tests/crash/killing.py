"""Layer ``kill``: real deaths. A process that tells the story is killed at every change it makes.

A server tells the story, and before each opening, when no thread runs, it forks children that go on
with a copy of the cache. Each is killed with SIGKILL before, after or in the middle of one change.
The server opens what it left, and judges that by what the child announced last. Some such openings
are killed themselves, at every change that they make.

What was written stays written when only a process dies: this layer is blind to what is not synced.
"""

import gc
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .interposer import preloaded_environment, unavailable
from .layer import Layer, MutableReport
from .lives import open_store, require_recovery, scratch_directory, steady
from .processes import Ending, Forked, ending_of, fork, leave, run_apart
from .recording import ActingFiles
from .story import Story, Worlds, tell
from .weapons import AtTheSeam, BelowLmdb, Death, Weapon, deaths_of
from .world import settle, wait_for_refused

# Relative to the working directory, so that a forked child finds its own cache under this name.
_CACHE = Path("cache")

# Openings that are killed themselves, for each weapon.
_RECOVERIES = 40
_RANDOM_MOMENTS = 12
# Every how manieth cache is opened a second time.
_REPEAT_EVERY = 4


@dataclass(frozen=True, slots=True)
class Killed:
    """What a process left that was killed, and the worlds of which one must be found."""

    identity: tuple[object, ...]
    how: str
    root: Path
    legal: Worlds

    @property
    def is_inside_a_store(self) -> bool:
        return len({len(world.entries) for world in self.legal}) > 1


class MutableTelling:
    """The story, told in the working directory. It knows when no cache is open and no thread runs.

    ``announced`` is the same in every telling, and so are the steps between two openings.
    """

    def __init__(self, weapon: Weapon) -> None:
        self.weapon = weapon
        self.announced: list[Worlds] = []
        self.openings = 0
        self._files: ActingFiles | None = None

    def tell(self) -> None:
        tell(_CACHE, self._make_files, self.announce)

    def announce(self, worlds: Worlds) -> None:
        if self._files is None or self._files.descriptor < 0:
            self.before_opening()
            self.openings += 1
        self.announced.append(worlds)

    def before_opening(self) -> None: ...

    def _make_files(self, root: Path) -> ActingFiles:
        self._files = self.weapon.make_files(root)
        return self._files


class MutableRehearsal(MutableTelling):
    """Writes down what the story announces, and the steps from one opening to the next."""

    def __init__(self, weapon: Weapon) -> None:
        super().__init__(weapon)
        self.steps: list[list[str]] = []

    def tell(self) -> None:
        super().tell()
        self.steps.append(self.weapon.steps())

    def before_opening(self) -> None:
        if self.openings:
            self.steps.append(self.weapon.steps())
        self.weapon.aim(_CACHE.absolute(), None)


class MutableServer(MutableTelling):
    """Tells the story once more and forks victims, in which it goes on telling until it dies."""

    def __init__(self, report: MutableReport, rehearsal: MutableRehearsal, scratch: Path) -> None:
        super().__init__(rehearsal.weapon)
        # Copies of what some victims left, as it was before it was judged.
        self.kept: list[Killed] = []
        self._report = report
        self._rehearsal = rehearsal
        self._scratch = scratch
        self._to_keep = _some_of_each_kind(rehearsal.steps, report)
        # Where a victim says that it announced something; no descriptor in who is none.
        self._voice = -1

    def tell(self) -> None:
        try:
            super().tell()
        except BaseException as error:
            self._leave_if_victim(error)
            raise
        self._leave_if_victim(None)

    def announce(self, worlds: Worlds) -> None:
        super().announce(worlds)
        if self._voice >= 0:
            _say_so(self._voice)

    def before_opening(self) -> None:
        # One that was still not killed has fewer steps than the rehearsal.
        self._leave_if_victim(None)
        for death in deaths_of(self._rehearsal.steps[self.openings]):
            is_kept = (self.openings, death) in self._to_keep
            state = self._report.takes(self.weapon.name, self.openings, *death)
            if self._report.is_over or (state is None and not is_kept):
                continue
            forked = fork()
            if not isinstance(forked, Forked):
                self._be_victim(forked, death)
                return
            self._bury(forked.ending(), death, state, is_kept=is_kept)

    def _be_victim(self, voice: int, death: Death) -> None:
        self._voice = voice
        home = self._scratch / "victim"
        home.mkdir()
        if _CACHE.exists():
            shutil.copytree(_CACHE, home / _CACHE)
        os.chdir(home)
        # The rehearsal looked at each of its worlds, which takes half of the time.
        setattr(Story, "_require_the_world", _require_nothing)  # noqa: B010 - it is private
        self.weapon.aim(_CACHE.absolute(), death)

    def _leave_if_victim(self, error: BaseException | None) -> None:
        if self._voice >= 0:
            leave(self._voice, error)

    def _bury(self, ending: Ending, death: Death, state: bytes | None, *, is_kept: bool) -> None:
        home = self._scratch / "victim"
        step = self._rehearsal.steps[self.openings][death.number - 1]
        killed = Killed(
            (self.weapon.name, self.openings, *death),
            f"{death.when.name.lower()} '{step}', opening {self.openings}",
            home / _CACHE,
            _legal_after(ending, self._rehearsal.announced[len(self.announced) :]),
        )
        if is_kept and ending.was_killed:
            root = self._scratch / f"kept{len(self.kept)}"
            self.kept.append(Killed(killed.identity, killed.how, root, killed.legal))
            _copy(killed.root, root)
        if state is not None:
            judge(self._report, state, killed, ending, self.weapon.name)
        shutil.rmtree(home)


def judge(report: MutableReport, state: bytes, killed: Killed, ending: Ending, *kinds: str) -> None:
    """Open what a process left. One that was not killed is no state, unless it failed."""
    problem = ending.problem
    if ending.was_killed:
        report.looked(state, *kinds, *(("inside a store",) if killed.is_inside_a_store else ()))
        is_repeated = len(report.states) % _REPEAT_EVERY == 0
        problem = None
        try:
            require_recovery(killed.root, killed.legal, is_verified=False, is_repeated=is_repeated)
        except Exception as error:  # noqa: BLE001 - whatever the product raises is what was wrong
            problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        report.failed(state, f"killed {killed.how}: {problem}")


def kill_recoveries(report: MutableReport, kept: list[Killed], weapon: Weapon) -> None:
    """Kill the openings of caches that were left by a kill."""
    for outer in kept:
        report.told(weapon.name, *outer.identity)
        root = outer.root.with_name("recovering") / _CACHE
        steps = _in_a_copy(outer.root, root, partial(recover, root, weapon, None))
        for death in deaths_of(steps.said.decode().splitlines()):
            state = report.takes(outer.identity, *death)
            if report.is_over or state is None:
                continue
            ending = _in_a_copy(outer.root, root, partial(recover, root, weapon, death))
            how = f"{outer.how}, and {death.when.name.lower()} step {death.number} of its recovery"
            inner = Killed(outer.identity, how, root, outer.legal)
            judge(report, state, inner, ending, weapon.name, "inside recovery")


def recover(root: Path, weapon: Weapon, death: Death | None) -> bytes:
    """Open a cache, until death if it comes. The steps that it took, one a line."""
    weapon.aim(root, death)
    with open_store(root, weapon.make_files) as store:
        settle(store)
        wait_for_refused(store)
    return "\n".join(weapon.steps()).encode()


def kill_at_random_moments(report: MutableReport, announced: list[Worlds]) -> None:
    """Tell the whole story on a real disk, where a sync takes its time, and kill from outside."""
    for number in range(_RANDOM_MOMENTS):
        state = report.takes("random", number)
        if report.is_over or state is None:
            continue
        randomness = random.Random(f"{report.effort.seed} {number}")
        count = randomness.randrange(1, len(announced))
        with tempfile.TemporaryDirectory() as home:
            root = Path(home).resolve() / _CACHE
            ending = _killed_after(count, randomness.random() * 0.005, root)
            legal = _legal_after(ending, announced)
            killed = Killed((), f"after announcement {count}", root, legal)
            judge(report, state, killed, ending, "random")


def _killed_after(count: int, seconds: float, root: Path) -> Ending:
    """How a process ends that tells the story and is killed this long after an announcement."""
    forked = fork()
    if not isinstance(forked, Forked):
        try:
            tell(root, announce=lambda worlds: _say_so(forked))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent has to hear of it
            leave(forked, error)
        leave(forked)
    said = b""
    while len(said) < count and (more := os.read(forked.reader, 1)):
        said += more
    time.sleep(seconds)
    os.kill(forked.pid, signal.SIGKILL)
    ending = forked.ending()
    return Ending(ending.code, said + ending.said)


def _say_so(voice: int) -> None:
    os.write(voice, b".")


def _in_a_copy(source: Path, root: Path, run: Callable[[], bytes]) -> Ending:
    """How a process ends that runs with a fresh copy of a cache at ``root``."""
    shutil.rmtree(root.parent, ignore_errors=True)
    root.parent.mkdir()
    _copy(source, root)
    return ending_of(run)


def _require_nothing(story: Story) -> None:
    pass


def _copy(source: Path, target: Path) -> None:
    if source.exists():
        shutil.copytree(source, target)


def _legal_after(ending: Ending, worlds: list[Worlds]) -> Worlds:
    """The worlds that a victim announced last: it said one dot for each announcement."""
    return worlds[max(0, len(ending.said) - len(ending.said.lstrip(b".")) - 1)]


def _some_of_each_kind(steps: list[list[str]], report: MutableReport) -> set[tuple[int, Death]]:
    """Deaths of each kind, whose recoveries are killed too."""
    kinds: dict[object, tuple[int, Death]] = {}
    deaths = [(n, death) for n, each in enumerate(steps) for death in deaths_of(each)]
    for opening, death in random.Random(5).sample(deaths, len(deaths)):
        words = steps[opening][death.number - 1].split()
        kind = (opening, death.when, *(word.rstrip("0123456789abcdef/-") for word in words))
        kinds.setdefault(kind, (opening, death))
    count = len(kinds) if report.effort.only else max(2, round(_RECOVERIES * report.effort.share))
    return set(list(kinds.values())[:count])


def _kill(report: MutableReport, weapon: Weapon) -> MutableRehearsal:
    """All deaths by one weapon."""
    # What is here already is in no cycle, so no victim need look for any, and copy all its pages.
    gc.freeze()
    with steady(), scratch_directory() as scratch:
        rehearsal = MutableRehearsal(weapon)
        (scratch / "rehearsal").mkdir()
        os.chdir(scratch / "rehearsal")
        rehearsal.tell()
        (scratch / "server").mkdir()
        os.chdir(scratch / "server")
        server = MutableServer(report, rehearsal, scratch)
        server.tell()
        report.told(weapon.name)
        kill_recoveries(report, server.kept, weapon)
        os.chdir("/")
    return rehearsal


def kill_at_the_seam(report: MutableReport) -> None:
    """The part that runs on any system."""
    rehearsal = _kill(report, AtTheSeam())
    with steady():
        kill_at_random_moments(report, rehearsal.announced)


def kill_below_lmdb(report: MutableReport) -> None:
    """The part that needs the interposer."""
    _kill(report, BelowLmdb())


def run(report: MutableReport) -> None:
    """Each part in a process of its own, which has no threads when it forks."""
    run_apart(kill_at_the_seam, report, os.environ)
    if not report.is_over and unavailable() is None:
        with tempfile.TemporaryDirectory() as scratch:
            run_apart(kill_below_lmdb, report, preloaded_environment(Path(scratch)))


LAYER = Layer("kill", run, quick_share=0.02)
