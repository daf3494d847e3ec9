"""A crash after every step of a cache's life, in both models, and again inside each recovery."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash_story import (
    SETTINGS,
    Moment,
    Story,
    Survey,
    World,
    boundary,
    crashes_inside_recovery,
    key,
    pair,
    put,
    require_sound,
    scratch_directory,
    tell,
    tensors_of,
)
from crashes import Disk, RecordingFiles
from mutants_crash import MUTANTS, Mutant

from walkback.journal.words import Kind, NotStoredReason
from walkback.store.boundary import Claim
from walkback.store.store import MutableStore

# All of it takes some minutes: WALKBACK_EXAMPLES=1 looks at every image.
EVERYTHING = bool(os.environ.get("WALKBACK_EXAMPLES"))
FRACTION = 1.0 if EVERYTHING else 0.1
RECOVERY_COUNT = 60 if EVERYTHING else 6


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with scratch_directory() as path:
        yield path


@pytest.fixture(scope="module")
def moments(scratch: Path) -> list[Moment]:
    return tell(scratch / "story")


def test_the_model_of_the_disk_is_the_disk(scratch: Path) -> None:
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

    tell(scratch / "compared", comparing)

    assert len(compared) > 50 and all(compared)


def test_a_crash_after_any_step_leaves_what_was_acknowledged(
    moments: list[Moment], scratch: Path
) -> None:
    survey = Survey(fraction=FRACTION)

    for moment in moments:
        for image, is_new_boot in survey.images(moment):
            survey.look(image, moment, scratch, is_new_boot=is_new_boot)

    assert len(moments) > 300
    assert survey.counts["died"] > 200 and survey.counts["power"] > 600, survey.counts


def test_a_crash_inside_a_recovery_leaves_what_was_acknowledged(
    moments: list[Moment], scratch: Path
) -> None:
    survey = Survey(fraction=FRACTION, random_count=0)
    chosen = _of_each_kind(moments)

    for number, moment in enumerate(chosen[:RECOVERY_COUNT]):
        images = list(Survey().images(moment))
        image, is_new_boot = random.Random(number).choice(images)
        for inner in crashes_inside_recovery(image, moment, scratch, is_new_boot=is_new_boot):
            for again, is_again_new in survey.images(inner):
                survey.look(again, inner, scratch, is_new_boot=is_again_new)

    assert survey.counts.total() > 200, survey.counts


def _of_each_kind(moments: list[Moment]) -> list[Moment]:
    """Moments with something to do for a recovery, one of each kind of step, in a random order."""
    kinds: dict[tuple[str, ...], Moment] = {}
    order = random.Random(5)
    for moment in order.sample(moments, len(moments)):
        words = [word.rstrip("0123456789abcdef/-") for word in moment.step.split()]
        kinds.setdefault((*words, str(len(moment.legal))), moment)
    return list(kinds.values())


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


def test_a_story_without_a_crash_ends_in_the_world_that_it_tells(scratch: Path) -> None:
    story = Story(scratch / "short")
    story.open()
    story.put("a1", pair("a1"), depth=1)
    again = put(story.store, boundary("a1", pair("a1"), depth=1), pair("a1"))
    story.close()

    assert again.is_empty
    assert story.moments[-1].legal == (story.world,)


def test_a_sidecar_whose_block_went_meanwhile_is_refused(tmp_path: Path) -> None:
    """It has its block's key and once passed for it: the journal then never replayed again."""
    block, sidecar = ({each: content} for each, content in pair("a1").items())
    with MutableStore.open(tmp_path / "cache", SETTINGS) as store:
        put(store, boundary("a1", block, depth=1), block)
        claim = store.claim(boundary("a1", sidecar, depth=1), request=1, producer="test")
        assert isinstance(claim, Claim)
        store.operator.report_bad(Kind.BLOCK, key("a1"), "it was wrong")

        store.put(claim, tensors_of(claim, sidecar), prefill_seconds=0.5)

        assert claim.settled.wait(30) and claim.refusal is not None
        assert claim.refusal.reason is NotStoredReason.PARENT
        require_sound(store, tmp_path / "cache", [World()])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_is_caught(
    mutant: Mutant, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.patch(monkeypatch)

    with scratch_directory() as path, pytest.raises(AssertionError):
        mutant.check(path, mutant.files)
