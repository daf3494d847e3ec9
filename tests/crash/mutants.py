"""Ways to break the protocol on purpose, each with the layer that has to notice.

``switch_on`` breaks this process for good; ``switched_on`` for a while. A layer that starts other
programs switches the mutant on in them.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import NamedTuple

import pytest

from . import breakages, breakages_around

Patch = Callable[[pytest.MonkeyPatch], None]


class Mutant(NamedTuple):
    """What is broken, by a patch, and the layer that has to see it.

    ``seed`` and ``kind`` are where it is known to be seen soon; any luck sees it in the end.
    """

    name: str
    layer: str
    patch: Patch
    seed: int = 1
    kind: str = ""


_switched_on: set[str] = set()


def switch_on(name: str) -> None:
    """Break this process for good, unless it is; no name breaks nothing."""
    if name and name not in _switched_on:
        _switched_on.add(name)
        mutant_of(name).patch(pytest.MonkeyPatch())


@contextlib.contextmanager
def switched_on(name: str) -> Generator[None]:
    """Break this process, and mend it again."""
    if not name or name in _switched_on:
        yield
        return
    _switched_on.add(name)
    try:
        with pytest.MonkeyPatch.context() as patch:
            mutant_of(name).patch(patch)
            yield
    finally:
        _switched_on.remove(name)


def mutant_of(name: str) -> Mutant:
    """The mutant of this name."""
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    raise ValueError(f"no mutant is called {name!r}; there are {[each.name for each in MUTANTS]}")


MUTANTS = (
    Mutant("payloads not synced", "portable", breakages.payloads_not_synced),
    Mutant("directories not synced", "portable", breakages.directories_not_synced),
    Mutant("deletions not synced", "portable", breakages.deletions_not_synced),
    Mutant("committed before renamed", "kill", breakages.committed_before_renamed),
    Mutant("file names reused", "story", breakages.names_reused),
    Mutant("HEAD before the commit", "portable", breakages.head_before_commit),
    Mutant("journal made in place", "libc", breakages.journal_made_in_place),
    Mutant("unlinked before Evicted", "kill", breakages.unlinked_before_evicted),
    Mutant("Deleted before the unlink", "portable", breakages.deleted_before_unlinked),
    Mutant("orphans kept", "kill", breakages.orphans_kept),
    Mutant("only the last epoch swept", "recovery", breakages.only_last_epoch_swept),
    Mutant("Opened after the files", "portable", breakages.opened_after_the_files),
    Mutant("epoch reused", "story", breakages.epoch_reused),
    Mutant("Staged without Abandoned", "portable", breakages.staged_without_abandoned),
    Mutant(
        "older quarantines not finished", "portable", breakages.older_quarantines_not_finished, 7
    ),
    Mutant("a pair in two transactions", "kill", breakages.pair_in_two_transactions),
    Mutant("the ledger in logical bytes", "story", breakages.ledger_in_logical_bytes),
    Mutant("replay decides again", "portable", breakages.replay_decides_again),
    Mutant("memory released twice", "errors", breakages.memory_released_twice),
    Mutant("room never released", "errors", breakages.room_never_released),
    Mutant("a failed commit taken for none", "errors", breakages.failed_commit_taken_for_none),
    Mutant("a failed opening keeps the lock", "errors", breakages.lock_kept_by_a_failed_opening),
    Mutant("LMDB not synced", "libc", breakages.lmdb_not_synced),
    Mutant("LMDB's meta page not synced", "libc", breakages.lmdb_meta_not_synced),
    Mutant("the root's name not synced", "libc", breakages.root_not_synced),
    Mutant("a failed sync repeated", "failed sync", breakages.failed_sync_repeated),
    Mutant(
        "a failed commit believed undone", "failed sync", breakages.failed_commit_believed_undone, 6
    ),
    Mutant("data not verified", "damage", breakages_around.data_not_verified),
    Mutant("headers not compared", "damage", breakages_around.headers_not_compared),
    Mutant("links not checked", "damage", breakages_around.links_not_checked, 1, "of the journal"),
    Mutant("rolled-back journal trusted", "damage", breakages_around.rolled_back_journal_trusted),
    Mutant("touched before it is verified", "damage", breakages_around.touched_before_verified),
    Mutant("a hit before it is verified", "damage", breakages_around.hit_before_verified),
    Mutant("the journal not verified first", "damage", breakages_around.journal_not_verified_first),
    Mutant("a loss not told", "damage", breakages_around.loss_not_told, 3),
    Mutant("reconciled without Lost", "damage", breakages_around.reconciled_without_lost),
    Mutant("STORE not checked", "damage", breakages_around.store_not_checked),
    Mutant("deleted by path", "surroundings", breakages_around.deleted_by_path),
    Mutant("the place not asked for", "surroundings", breakages_around.place_not_asked_for),
    Mutant("links followed", "surroundings", breakages_around.links_followed),
    Mutant("a child unlocks", "surroundings", breakages_around.child_unlocks),
    Mutant("a child keeps the store", "surroundings", breakages_around.child_keeps_the_store),
    Mutant("no lock", "surroundings", breakages_around.no_lock),
    Mutant("time must not step back", "surroundings", breakages_around.time_must_not_step_back),
    Mutant("a read error is damage", "surroundings", breakages_around.read_error_is_damage),
)
