"""Every layer of ``crash`` runs a share here, and every mutant is killed by the layer meant to.

``make crash`` runs all of it.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from crash.disk import Disk
from crash.layer import Effort, MutableReport
from crash.layers import LAYERS
from crash.lives import open_store, scratch_directory, steady
from crash.mutants import MUTANTS, switched_on
from crash.portable import record
from crash.recording import RecordingFiles
from crash.run import judge
from crash.world import World, boundary, key, pair, put, require_sound, tensors_of

from walkback.journal.words import Kind, NotStoredReason
from walkback.store.boundary import Claim


@pytest.mark.parametrize("name", LAYERS)
def test_a_share_of_each_layer_finds_nothing(name: str) -> None:
    layer = LAYERS[name]

    report = layer.report(Effort(share=layer.quick_share))

    if report.skipped:
        pytest.skip(report.skipped)
    assert report.failures == []
    assert report.histories and report.states


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_each_mutant_is_killed_by_the_layer_that_is_meant_to(name: str) -> None:
    verdict = judge(name)

    if verdict.seen.startswith("skipped"):
        pytest.skip(verdict.seen)
    assert verdict.killed_by is not None, verdict


def test_drawn_crashes_fall_inside_stores_and_recoveries() -> None:
    tallies = LAYERS["properties"].report(Effort(share=0.02)).tallies

    assert tallies["inside a store"] >= 0.25 * tallies["crashes"]
    assert tallies["inside recovery"] >= 0.1 * tallies["crashes"]


def test_a_drawn_failure_is_drawn_again_by_what_it_says() -> None:
    mutant = "file names reused"

    def seen(effort: Effort) -> str:
        with switched_on(mutant):
            return LAYERS["properties"].report(effort).failures[0]

    first = seen(Effort(share=0.02, seed=3, parts=2, part=1, until_failure=True))

    assert "--layer properties --seed 3 --share 0.02 --processes 2 --no-mutants" in first
    assert seen(Effort(share=0.02, seed=3, parts=2, part=1, until_failure=True)) == first


def test_there_are_mutants_for_all_of_the_protocol() -> None:
    assert len(MUTANTS) >= 15
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.layer for mutant in MUTANTS} <= LAYERS.keys()


# The harness itself.


def test_the_model_of_the_disk_is_the_disk() -> None:
    compared: list[bool] = []

    def comparing(root: Path, disk: Disk, after_step: Callable[[str], None]) -> RecordingFiles:
        def compare(step: str) -> None:
            after_step(step)
            if step.startswith("sync directory"):
                here = {path: content for path, _, content in disk.died().files}
                there = {
                    str(path.relative_to(root)): path.read_bytes()
                    for path in root.rglob("*")
                    # A backup that LMDB is writing right now comes into the model when it is done.
                    if path.is_file() and path.suffix != ".new"
                }
                compared.append(here == there)

        return RecordingFiles(root, disk, compare)

    with steady(), scratch_directory() as scratch:
        record(scratch / "compared", comparing)

    assert len(compared) > 50 and all(compared)


def test_the_power_model_loses_what_is_not_synced(tmp_path: Path) -> None:
    disk = Disk()
    disk.make_directory("a")
    disk.make_directory("b")
    disk.sync_directory("")
    disk.write(disk.create("a/1"), 0, b"x" * 600)
    disk.rename("a/1", "b/2")

    images = list(disk.lost_power(random.Random(1), random_count=0))

    found = {tuple((path, len(content)) for path, _, content in image.files) for image in images}
    assert () in found
    assert {(("b/2", 600),), (("a/1", 0),), (("b/2", 0),)} <= found
    sizes = {content for image in images for _, _, content in image.files}
    assert bytes(600) in sizes
    images[-1].write_to(tmp_path / "image")
    assert Disk.of(tmp_path / "image").died().folders == ("a", "b")


def test_every_combination_of_few_losses_is_built() -> None:
    disk = Disk()
    names = ["one", "two", "three"]
    for name in names:
        disk.create(name)

    images = list(disk.lost_power(random.Random(1), random_count=0))

    found = {tuple(sorted(path for path, _, _ in image.files)) for image in images}
    assert len(found) == 2 ** len(names)


def test_two_runs_meet_the_same_states_and_their_parts_share_them_out() -> None:
    def states(**effort: float) -> set[bytes]:
        report = MutableReport("test", Effort(**effort))  # pyright: ignore[reportArgumentType]
        return {state for number in range(500) if (state := report.takes(number))}

    whole = states(share=0.5)

    assert whole == states(share=0.5) != states(share=0.5, seed=2)
    assert 150 < len(whole) < 350
    assert states(share=0.5, parts=2, part=0) | states(share=0.5, parts=2, part=1) == whole


def test_a_failure_says_how_to_see_it_again() -> None:
    report = MutableReport("portable", Effort(seed=7))
    state = report.takes("something")
    assert state is not None
    report.failed(state, "it broke")

    assert "--layer portable --seed 7 --only " in report.failures[0]
    only = report.failures[0].rpartition("--only ")[2][:12]
    again = MutableReport("portable", Effort(seed=7, only=only))
    assert again.takes("another") is None
    assert again.takes("something") == state


def test_the_program_prints_lines_for_programs() -> None:
    package_parent, tests = Path(__file__).parents[1] / "src", Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "crash", "--json", "--layer", "story"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(package_parent), str(tests)])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0].items() >= {"layer": "story", "states": 1, "failures": 0}.items()
    assert all(line["killed_by"] == "story" for line in lines[1:]) and len(lines) > 1


def test_a_sidecar_whose_block_went_meanwhile_is_refused(tmp_path: Path) -> None:
    """It has its block's key and once passed for it: the journal then never replayed again."""
    block, sidecar = ({each: content} for each, content in pair("a1").items())
    with open_store(tmp_path / "cache") as store:
        put(store, boundary("a1", block, depth=1), block)
        claim = store.claim(boundary("a1", sidecar, depth=1), request=1, producer="test")
        assert isinstance(claim, Claim)
        store.operator.report_bad(Kind.BLOCK, key("a1"), "it was wrong")

        store.put(claim, tensors_of(claim, sidecar), prefill_seconds=0.5)

        assert claim.settled.wait(30) and claim.refusal is not None
        assert claim.refusal.reason is NotStoredReason.PARENT
        require_sound(store, tmp_path / "cache", [World()])
