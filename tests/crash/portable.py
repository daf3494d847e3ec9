"""Layer ``portable``: a crash after every step of the story, as a model of the disk allows it.

The steps are those of the ``Files`` seam, and LMDB's commit is one of them, so this runs on every
system. Each image is built, recovered and held against the worlds of its moment; then some of the
recoveries are recorded themselves, and crash after any of their steps.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from .disk import COMBINATIONS_MAX, Disk, Image
from .layer import Layer, MutableReport, in_a_line
from .lives import (
    another_life,
    deletions_in_turn,
    open_store,
    require_recovery,
    scratch_directory,
    steady,
)
from .recording import RecordingFiles
from .story import Worlds, tell
from .world import Legal, World, settle, wait_for_refused

MakeRecording = Callable[[Path, Disk, Callable[[str], None]], RecordingFiles]

# Recoveries that are recorded of each kind of moment.
_IMAGES_EACH = 4
# Random disks of a moment, and how many combinations are all built inside recoveries.
_RANDOM_COUNT = 40
_FEW = 1 << 7
# When one failure is enough: what is wrong is mostly wrong in many images of many moments.
_SAMPLE = 6
# Every how manieth state is opened a second time, and by a process that trusts no journal.
_REPEAT_EVERY = 4
_VERIFY_EVERY = 8


@dataclass(slots=True)
class Moment:
    """The disk after one step, and the worlds of which one must be found if it all ends here."""

    step: str
    disk: Disk
    legal: Legal

    @property
    def is_inside_a_store(self) -> bool:
        """Whether entries may or may not be there yet."""
        return len({len(world.entries) for world in self.legal}) > 1


def record(root: Path, make_files: MakeRecording = RecordingFiles) -> list[Moment]:
    """Tell the story at ``root``, and return its moments."""
    disk = Disk()
    moments: list[Moment] = []
    legal: Worlds = (World(),)

    def note(step: str) -> None:
        moments.append(Moment(step, disk.copy(), legal))

    def announce(worlds: Worlds) -> None:
        nonlocal legal
        legal = worlds
        # What the last step of an act leaves was acknowledged.
        if moments and len(worlds) == 1:
            moments[-1].legal = worlds

    with deletions_in_turn():
        tell(root, lambda root: make_files(root, disk, note), announce)
    return moments


def images_of(
    moment: Moment, randomness: random.Random, combinations_max: int = COMBINATIONS_MAX
) -> Iterator[tuple[Image, bool]]:
    """The disks that a crash at this moment may leave, and whether the power was lost."""
    yield moment.disk.died(), False
    for image in moment.disk.lost_power(
        randomness, random_count=_RANDOM_COUNT, combinations_max=combinations_max
    ):
        yield image, True


def survey(
    report: MutableReport,
    moments: list[Moment],
    scratch: Path,
    *kinds: str,
    combinations_max: int = COMBINATIONS_MAX,
) -> None:
    """Recover every image of every moment that the report takes."""
    effort = report.effort
    numbers = list(range(len(moments)))
    if effort.until_failure:
        random.Random(effort.seed).shuffle(numbers)
    for number in numbers:
        moment = moments[number]
        worlds = identity_of(moment.legal)
        randomness = random.Random(f"{effort.seed} {number}")
        images = images_of(moment, randomness, combinations_max)
        if effort.until_failure:
            died, *lost = images
            images = [died, *randomness.sample(lost, min(len(lost), _SAMPLE))]
        for image, is_power_loss in images:
            state = report.takes(is_power_loss, image.identity, worlds)
            if state is None:
                continue
            inside = ("inside a store",) if moment.is_inside_a_store else ()
            report.looked(state, *kinds, *inside, "power" if is_power_loss else "died")
            problem = _problem(report, image, moment, scratch, is_power_loss=is_power_loss)
            if problem is not None:
                report.failed(state, f"after '{moment.step}', {image.label}: {problem}")
                if report.is_over:
                    return


def _problem(
    report: MutableReport, image: Image, moment: Moment, scratch: Path, *, is_power_loss: bool
) -> str | None:
    root, number = scratch / "image", len(report.states)
    image.write_to(root)
    try:
        require_recovery(
            root,
            moment.legal,
            # LMDB's file is whole by the model, so verifying it each time would find nothing.
            is_verified=is_power_loss and number % _VERIFY_EVERY == 0,
            is_repeated=number % _REPEAT_EVERY == 0,
        )
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is what is looked for
        return in_a_line(error)
    finally:
        shutil.rmtree(root)
    return None


def moments_inside_recovery(
    image: Image, moment: Moment, scratch: Path, *, is_power_loss: bool
) -> list[Moment]:
    """The steps of recovering one image: a crash after any of them is a crash as well."""
    moments: list[Moment] = []
    root = scratch / "recovered"
    image.write_to(root)
    disk = Disk.of(root)

    def note(step: str) -> None:
        moments.append(Moment(f"{moment.step}, then {step}", disk.copy(), moment.legal))

    with (
        another_life(is_verified=is_power_loss),
        deletions_in_turn(),
        open_store(root, lambda root: RecordingFiles(root, disk, note)) as store,
    ):
        settle(store)
        wait_for_refused(store)
    shutil.rmtree(root)
    return moments


def of_each_kind(moments: list[Moment]) -> list[Moment]:
    """One moment of each kind of step and number of worlds, in a random order."""
    kinds: dict[tuple[str, ...], Moment] = {}
    for moment in random.Random(5).sample(moments, len(moments)):
        words = [word.rstrip("0123456789abcdef/-") for word in moment.step.split()]
        kinds.setdefault((*words, str(len(list(moment.legal)))), moment)
    return list(kinds.values())


def identity_of(legal: Legal) -> bytes:
    """What tells two sets of legal worlds apart."""
    worlds = [(sorted(w.entries.items()), sorted(w.pins), w.quarantined) for w in legal]
    return blake3(repr(worlds).encode()).digest(16)


def run_story(report: MutableReport) -> None:
    """Only tell the story, with no crash in it."""
    state = report.takes("told")
    if state is None:
        return
    report.told("story")
    report.looked(state)
    with steady(), scratch_directory() as scratch:
        try:
            record(scratch / "story")
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is what is looked for
            report.failed(state, f"without any crash: {in_a_line(error)}")


def run(report: MutableReport) -> None:
    """Crashes of the story."""
    with steady(), scratch_directory() as scratch:
        report.told("story")
        survey(report, _recorded(scratch), scratch)


def run_recovery(report: MutableReport) -> None:
    """Crashes of recoveries: of some images, of moments that differ in what there is to do."""
    effort = report.effort
    with steady(), scratch_directory() as scratch:
        chosen = of_each_kind(_recorded(scratch))
        count = len(chosen) if effort.only else max(4, round(len(chosen) * effort.share))
        for number, moment in enumerate(chosen[:count]):
            randomness = random.Random(f"{effort.seed} {number}")
            images = list(images_of(moment, randomness))
            for image, is_power_loss in randomness.sample(images, min(len(images), _IMAGES_EACH)):
                inner = moments_inside_recovery(image, moment, scratch, is_power_loss=is_power_loss)
                report.told(moment.step, is_power_loss, image.identity)
                survey(report, inner, scratch, "inside recovery", combinations_max=_FEW)
                if report.is_over:
                    return


def _recorded(scratch: Path) -> list[Moment]:
    try:
        return record(scratch / "story")
    except AssertionError as error:
        raise RuntimeError(f"noticed without any crash, so by another layer: {error}") from error


STORY = Layer("story", run_story, quick_share=1.0)
LAYER = Layer("portable", run, quick_share=0.03)
RECOVERY = Layer("recovery", run_recovery, quick_share=0.05)
