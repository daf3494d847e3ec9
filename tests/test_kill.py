"""Real deaths: a child process runs a store and is killed with SIGKILL at random moments.

Run as a program it is that child: ``python test_kill.py ROOT MODE``.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from crash_story import (
    EntryId,
    World,
    boundary,
    pair,
    put,
    require_sound,
    settle,
    state_of,
    world_of,
)

from walkback.store.settings import StoreSettings
from walkback.store.store import MutableStore

KILL_COUNT = 40 if os.environ.get("WALKBACK_EXAMPLES") else 8
CHAIN_LENGTH = 5
SETTINGS = StoreSettings(
    free_floor_bytes=0,
    budget_bytes=64 << 20,
    compact_every_events=30,
    journal_events_kept=5,
)


def name_of(number: int) -> str:
    """Boundaries stand in chains, so that parents and children are under way together."""
    return f"n{number}"


def parent_of(number: int) -> str:
    return name_of(number - 1) if number % CHAIN_LENGTH else ""


def run_child(root: Path, mode: str) -> None:
    """Store boundary after boundary, saying which are acknowledged; close now and then."""
    number = 0
    while True:
        say("opening")
        with MutableStore.open(root, SETTINGS) as store:
            say("opened")
            for _ in range(3 if mode == "closing" else 40):
                while name_of(number) in {each.rstrip(b".").decode() for each in names(store)}:
                    number += 1
                entries = pair(name_of(number))
                depth = number % CHAIN_LENGTH + 1
                wanted = boundary(name_of(number), entries, parent=parent_of(number), depth=depth)
                if put(store, wanted, entries).refusal is None:
                    say(name_of(number))
            say("closing")
        say("closed")


def names(store: MutableStore) -> set[bytes]:
    return set(state_of(store).blocks)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def killed(root: Path, mode: str, *, after_seconds: float, after_line: str) -> list[str]:
    """The lines of a child that was killed some time after it said a line the first time."""
    package_parent = Path(__file__).parents[1] / "src"
    paths = [str(package_parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        [sys.executable, __file__, str(root), mode],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    with child:
        assert child.stdout is not None
        said: list[str] = []
        for line in child.stdout:
            said.append(line.strip())
            if said[-1] == after_line:
                break
        time.sleep(after_seconds)
        child.kill()
        said += [line.strip() for line in child.stdout if line.endswith("\n")]
    assert child.returncode == -signal.SIGKILL
    return said


def require_acknowledged(root: Path, acknowledged: set[str]) -> None:
    """What was acknowledged is there; what is there is what the child meant to put."""
    with MutableStore.open(root, SETTINGS) as store:
        settle(store)
        found = world_of(store, root).entries
        expected: dict[EntryId, bytes] = {}
        for name in acknowledged | {key.rstrip(b".").decode() for _, key in found}:
            expected |= pair(name)
        in_flight = {key for _, key in expected} - {pair_key(name) for name in acknowledged}
        assert len(in_flight) <= 1
        require_sound(store, root, [World(expected)])
        events = store.statistics().events
        assert not {"Lost", "Quarantined", "Rebuilt", "Adopted"} & events.keys(), events


def pair_key(name: str) -> bytes:
    return next(iter(pair(name)))[1]


@pytest.mark.parametrize("mode", ["storing", "closing"])
def test_a_killed_process_loses_nothing_that_it_acknowledged(mode: str, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    acknowledged: set[str] = set()
    randomness = random.Random(mode)

    for _ in range(KILL_COUNT if mode == "storing" else KILL_COUNT // 4):
        line = "closing" if mode == "closing" else "opened"
        seconds = randomness.random() * (0.002 if mode == "closing" else 0.15)
        said = killed(root, mode, after_seconds=seconds, after_line=line)
        acknowledged |= {each for each in said if each.startswith("n")}
        require_acknowledged(root, acknowledged)
        with MutableStore.open(root, SETTINGS) as store:
            # What was in flight may have become durable without a word.
            acknowledged = {each.rstrip(b".").decode() for each in names(store)}

    assert len(acknowledged) > 5


def test_a_process_killed_while_it_opens_a_new_cache_leaves_one_that_opens(tmp_path: Path) -> None:
    randomness = random.Random("opening")

    for number in range(KILL_COUNT // 4):
        root = tmp_path / f"cache{number}"
        seconds = randomness.random() * 0.02
        said = killed(root, "storing", after_seconds=seconds, after_line="opening")

        require_acknowledged(root, {each for each in said if each.startswith("n")})


if __name__ == "__main__":
    run_child(Path(sys.argv[1]), sys.argv[2])
