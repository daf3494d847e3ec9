"""Layer ``errors``: every call of the disk fails, once or from then on, in short histories.

While it lasts, the store's calls acknowledge or refuse, and raise nothing but what they document.
When it is over, what was acknowledged can be read, and the store stores, or says why not. Closed
and opened again it is sound, and what was refused is there whole or not at all.
"""

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
import tenacity

from walkback.journal.errors import WalkbackError
from walkback.journal.words import Kind
from walkback.store import deletion
from walkback.store.core import Mode
from walkback.store.store import MutableStore

from .faults import (
    MAP_FULL,
    Fault,
    LibcFault,
    Trouble,
    TroubleAtTheSeam,
    TroubleBelowLmdb,
    faults_of,
    libc_faults_of,
    short_writes,
)
from .interposer import preloaded_environment, unavailable
from .layer import Layer, MutableReport
from .lives import another_life, open_store, require_recovery, scratch_directory, steady
from .processes import run_apart
from .scenes import SCENES, Base, MutableActs, Scene, make_bases
from .world import EntryId, located, pair, raw_data

# It has 1 GiB, and holds nothing.
_A_NEW_MAP_IS_FULL = Fault("commit", 1, MAP_FULL)

_THREADS = {"walkback-writer", "walkback-journal", "walkback-janitor"}


def endure(scene: Scene, base: Base, root: Path, trouble: Trouble) -> MutableActs | None:
    """Tell a scene at ``root`` with trouble. Its acts, None if the cache did not even open."""
    base.copy_to(root)
    descriptors = _open_descriptors()
    trouble.start(root)
    acts = None
    # What an opening may raise.
    with contextlib.suppress(OSError, WalkbackError):
        store = open_store(root, trouble.make_files, scene.settings)
        acts = MutableActs(store, root, base.world)
    if acts is not None:
        with acts.store as store:
            scene.tell(acts)
            if not trouble.lasts:
                trouble.lift()
                _require_usable(acts)
        _require_nothing_held(store)
    trouble.lift()
    assert not _threads() & _THREADS, "a thread goes on"
    assert _open_descriptors() == descriptors, "a file was left open"
    return acts


def _require_usable(acts: MutableActs) -> None:
    """What was acknowledged can be read, and the store stores, or says why not."""
    store = acts.store
    assert _threads() >= _THREADS, f"a thread is dead: {store.mode_detail}"
    store.flush()
    store.settle_deletions(timeout_seconds=1.0)
    _require_nothing_held(store)
    list(store.violations())
    shown = _shown(acts)
    entries = [world.entries for world in acts.worlds]
    assert any(shown.items() <= each.items() for each in entries), "something else is shown"
    known = set(entries[0].items()).intersection(*(each.items() for each in entries))
    assert known <= shown.items(), f"not to be read: {[each for each, _ in known - shown.items()]}"
    refusals = len(acts.refusals)
    acts.put("probe", pair("probe"), depth=1)
    is_stored = len(acts.refusals) == refusals
    assert is_stored is (store.mode is Mode.WRITING), f"{store.mode}: {acts.refusals}"
    assert is_stored or store.mode_detail


def _require_nothing_held(store: MutableStore) -> None:
    statistics = store.statistics()
    assert statistics.staging_bytes == 0, f"{statistics.staging_bytes} bytes of memory are held"
    assert statistics.reserved_bytes == 0, f"{statistics.reserved_bytes} bytes of disk are held"


def _shown(acts: MutableActs) -> dict[EntryId, bytes]:
    """What lookups find, each read through the store's own files."""
    files, shown = acts.store.files, dict[EntryId, bytes]()
    for kind in Kind:
        for entry in acts.store.entries(kind):
            found = located(acts.store, kind, entry.key)
            if found is None:
                continue
            shown[kind, entry.key] = b""
            if found.file is not None:
                descriptor = files.open(found.file.path)
                content = bytearray(files.status_of(descriptor).nbytes)
                files.read(descriptor, [memoryview(content)], 0)
                files.close_file(descriptor)
                path = acts.root / found.file.path
                assert content == path.read_bytes()
                shown[kind, entry.key] = raw_data(path, kind, entry.key)
    return shown


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def _open_descriptors() -> list[str]:
    return sorted(path.name for path in Path("/dev/fd").iterdir())


def problem_of(scene: Scene, base: Base, scratch: Path, trouble: Trouble) -> str | None:
    """What was wrong with a scene, or with what it left, None if nothing was."""
    root = scratch / "cache"
    try:
        acts = endure(scene, base, root, trouble)
        worlds = acts.worlds if acts is not None else [base.world]
        require_recovery(root, worlds, is_verified=False, is_repeated=False)
    except Exception as error:  # noqa: BLE001 - whatever is raised, nobody documented it
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return None


def run_at_the_seam(report: MutableReport) -> None:
    """Faults of every call of ``Files``; LMDB's commit is one of them."""
    with steady(), _quick(), another_life(is_verified=False), scratch_directory() as scratch:
        bases = make_bases(scratch)
        for scene in SCENES:
            silent = TroubleAtTheSeam(None)
            with short_writes(silent):
                _rehearse(scene, bases[scene.base], scratch, silent)
            report.told("seam", scene.name)
            for fault in faults_of(silent.counts):
                if fault == _A_NEW_MAP_IS_FULL and scene.base == "none":
                    continue
                state = report.takes("seam", scene.name, *fault)
                if state is not None and not report.is_over:
                    trouble = TroubleAtTheSeam(fault)
                    with short_writes(trouble):
                        problem = problem_of(scene, bases[scene.base], scratch, trouble)
                    if trouble.has_fired:
                        _look(report, state, scene, fault, problem)


def run_below_lmdb(report: MutableReport) -> None:
    """Faults of LMDB's own calls, by the interposer."""
    with steady(), _quick(), scratch_directory() as scratch:
        bases = make_bases(scratch)
        for scene in SCENES:
            silent = TroubleBelowLmdb(None)
            _rehearse(scene, bases[scene.base], scratch, silent)
            report.told("libc", scene.name)
            for fault in libc_faults_of(silent.steps()):
                state = report.takes("libc", scene.name, *fault)
                if state is not None and not report.is_over:
                    trouble = TroubleBelowLmdb(fault)
                    problem = problem_of(scene, bases[scene.base], scratch, trouble)
                    if trouble.has_fired:
                        _look(report, state, scene, fault, problem, "libc")


def _look(
    report: MutableReport,
    state: bytes,
    scene: Scene,
    fault: Fault | LibcFault,
    problem: str | None,
    *kinds: str,
) -> None:
    report.looked(state, *kinds, "sticky" if fault.is_sticky else "once")
    if problem is not None:
        report.failed(state, f"{scene.name}, {fault}: {problem}")


def _rehearse(scene: Scene, base: Base, scratch: Path, silent: Trouble) -> None:
    acts = endure(scene, base, scratch / "cache", silent)
    assert acts is not None and not acts.refusals, acts and acts.refusals
    require_recovery(scratch / "cache", acts.worlds, is_verified=False, is_repeated=False)
    shutil.rmtree(scratch / "cache")


@contextlib.contextmanager
def _quick() -> Generator[None]:
    """Whoever tries again does so at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deletion, "_BETWEEN", tenacity.wait_none())
        yield


def run(report: MutableReport) -> None:
    """The first part in this process, the other in one that has the interposer."""
    run_at_the_seam(report)
    if not report.is_over and unavailable() is None:
        with tempfile.TemporaryDirectory() as scratch:
            run_apart(run_below_lmdb, report, preloaded_environment(Path(scratch)))


LAYER = Layer("errors", run, quick_share=0.012)
