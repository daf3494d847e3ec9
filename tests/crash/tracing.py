"""Programs that run in a process with the interposer, and what its trace makes of the disk."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import lmdb
import pytest
from blake3 import blake3

from .interposer import Interposer, Kind
from .lives import another_life, deletions_in_turn, open_store, steady
from .mutants import switch_on
from .pages import PageDisk
from .recording import ActingFiles
from .story import Worlds, tell
from .trace import calls_of
from .world import World, settle, wait_for_refused, world_of

Result = TypeVar("Result")

# Below the directory that is watched, so that making it is in the trace as well.
CACHE = "cache"


@dataclass(frozen=True, slots=True)
class Told:
    """A trace. A mark in it is the index of the worlds that are legal from there on."""

    trace: bytes
    worlds: Sequence[Worlds]


@dataclass(slots=True)
class Moment:
    """The disk after one call, and the worlds of which one must be found if it all ends here."""

    step: str
    disk: PageDisk
    legal: Worlds

    @property
    def is_inside_a_store(self) -> bool:
        """Whether entries may or may not be there yet."""
        return len(self.legal) > 1 and len({len(world.entries) for world in self.legal}) > 1

    @property
    def kind(self) -> tuple[str, ...]:
        """The same for calls that do the same to files of one sort."""
        words = [word.rstrip("0123456789abcdef/-") for word in self.step.split()]
        return (*words[:2], str(len(self.legal)))


class DurableScribbles(ActingFiles):
    """What is done behind the store's back is on the disk at once."""

    def scribble(self, name: str, offset: int) -> None:
        descriptor = self.open_for_update(name)
        byte = bytearray(1)
        self.read(descriptor, [memoryview(byte)], offset)
        self.write(descriptor, [bytes([byte[0] ^ 1])], offset)
        super(ActingFiles, self).sync(descriptor)
        self.close_file(descriptor)


def told_story(directory: Path) -> Told:
    """Tell the story of a cache in this directory, traced."""
    interposer = Interposer()
    worlds: list[Worlds] = []

    def announce(legal: Worlds) -> None:
        interposer.mark(str(len(worlds)))
        worlds.append(legal)

    interposer.watch(directory)
    interposer.start_trace()
    with steady(), deletions_in_turn():
        tell(directory / CACHE, DurableScribbles, announce)
    return Told(interposer.take_trace(), worlds)


def told_recovery(directory: Path) -> Told:
    """Open what a power loss left in this directory, traced, with LMDB's own syncs."""
    interposer, synced_open = Interposer(), lmdb.open
    interposer.watch(directory)
    interposer.start_trace()
    with (
        steady(),
        deletions_in_turn(),
        another_life(is_verified=True),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(lmdb, "open", synced_open)
        with open_store(directory / CACHE) as store:
            settle(store)
            wait_for_refused(store)
            found = world_of(store, directory / CACHE)
            interposer.mark("0")
    return Told(interposer.take_trace(), [(found,)])


def told_recoveries(directories: Sequence[Path]) -> list[Told]:
    return [told_recovery(directory) for directory in directories]


def run_with_interposer(
    environment: Mapping[str, str], mutant: str, program: Callable[..., Result], *arguments: object
) -> Result:
    """What a function of a module returns in a process that has the interposer, and a mutant."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import serve; serve()"],
        input=pickle.dumps((mutant, program, arguments)),
        capture_output=True,
        # The order of a set of bytes is then the same in every run.
        env={**environment, "PYTHONHASHSEED": "0"},
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace")
        raise RuntimeError(f"{program.__name__} ended with {done.returncode}:\n{said}")
    return pickle.loads(done.stdout)


def serve() -> None:
    """Be that process."""
    mutant, program, arguments = pickle.load(sys.stdin.buffer)
    switch_on(mutant)
    sys.stdout.buffer.write(pickle.dumps(program(*arguments)))


def moments_of(disk: PageDisk, told: Told, legal: Worlds, prefix: str = "") -> list[Moment]:
    """The disk after each call of a trace that began with this disk and these worlds."""
    moments: list[Moment] = []
    for call in calls_of(told.trace):
        if call.kind is Kind.MARK:
            legal = told.worlds[int(call.path)]
            # What the last call of an act leaves was acknowledged.
            if moments and len(legal) == 1:
                moments[-1].legal = legal
            continue
        disk.apply(call)
        moments.append(Moment(f"{prefix}{call}", disk.copy(), legal))
    return moments


def require_that_all_was_seen(disk: PageDisk, directory: Path) -> None:
    """The model must be the directory, else something was changed by other calls."""
    modelled = {path: bytes(content) for path, _, content in disk.running().files}
    real = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
    differing = [path for path in modelled | real if modelled.get(path) != real.get(path)]
    assert not differing, f"changed by calls that were not seen: {differing}"


def identity_of(legal: Worlds) -> bytes:
    """What stands for a set of worlds in the identity of a state."""
    worlds = [(sorted(w.entries.items()), sorted(w.pins), w.quarantined) for w in legal]
    return blake3(repr(worlds).encode()).digest(16)


NOTHING: Worlds = (World(),)
