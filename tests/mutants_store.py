"""Ways to break the store on purpose, each with the check that has to notice."""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import store_checks as checks
from cache_maker import SETTINGS, HookedFiles

from walkback.journal.entries import Entry
from walkback.store import lookup, operator, ordering, outcomes
from walkback.store.boundary import Claim
from walkback.store.core import MutableCore
from walkback.store.damage import Damage
from walkback.store.deletion import MutableJanitor
from walkback.store.overlay import MutableOverlay
from walkback.store.settings import MIB, StoreSettings
from walkback.store.staging import release_memory
from walkback.store.store import MutableStore

Patch = Callable[[pytest.MonkeyPatch], None]

SMALL = replace(SETTINGS, budget_bytes=2 * MIB)


class Mutant(NamedTuple):
    """What is broken, by a patch, and the check that has to fail."""

    name: str
    check: Callable[[MutableStore], None]
    patch: Patch
    settings: StoreSettings = SETTINGS


def readers_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    def release(core: MutableCore, claim: Claim) -> None:
        readers, claim.readers = claim.readers, 0
        release_memory(core, claim)
        claim.readers = readers

    patch.setattr(outcomes, "release_memory", release)
    patch.setattr(lookup, "release_memory", release)


def leases_not_asked(patch: pytest.MonkeyPatch) -> None:
    due = MutableJanitor._due_deletions  # pyright: ignore[reportPrivateUsage]

    def without_leases(self: Any) -> Any:
        overlay = self._core.overlay
        leased, overlay.leased = overlay.leased, Counter()
        try:
            return due(self)
        finally:
            overlay.leased = leased

    patch.setattr(MutableJanitor, "_due_deletions", without_leases)


def folders_not_synced(patch: pytest.MonkeyPatch) -> None:
    def sync(self: HookedFiles, name: str) -> None:
        pass

    patch.setattr(HookedFiles, "sync_directory", sync)


def deleted_although_not_synced(patch: pytest.MonkeyPatch) -> None:
    def sync(self: Any, folders: set[str], events: object, doomed: object) -> None:
        for folder in folders:
            with contextlib.suppress(OSError):
                self._core.files.sync_directory(folder)

    patch.setattr(MutableJanitor, "_sync", sync)


def published_twice(patch: pytest.MonkeyPatch) -> None:
    publish = ordering._publish  # pyright: ignore[reportPrivateUsage]

    def again(core: MutableCore, claims: list[Claim]) -> list[Claim]:
        for claim in claims:
            claim.is_published = False
        return publish(core, claims)

    patch.setattr(ordering, "_publish", again)


def newest_not_protected(patch: pytest.MonkeyPatch) -> None:
    is_protected = MutableOverlay.is_protected

    def without_it(self: MutableOverlay, entry: Entry, pins: set[bytes]) -> bool:
        self.just_admitted = frozenset()
        return is_protected(self, entry, pins)

    patch.setattr(MutableOverlay, "is_protected", without_it)


def victims_damaged_again(patch: pytest.MonkeyPatch) -> None:
    pair_of = Damage._pair_of  # pyright: ignore[reportPrivateUsage]

    def without_victims(self: Any, located: Any) -> Any:
        overlay = self._core.overlay
        victims, overlay.victims = overlay.victims, set()
        try:
            return pair_of(self, located)
        finally:
            overlay.victims = victims

    patch.setattr(Damage, "_pair_of", without_victims)


def stores_under_way_forgotten(patch: pytest.MonkeyPatch) -> None:
    def taint(self: object, key: bytes) -> None:
        pass

    patch.setattr(operator.Operator, "_taint_below", taint)


MUTANTS = (
    Mutant(
        "memory taken from readers", checks.reservation_is_kept_for_readers, readers_not_waited_for
    ),
    Mutant("leased files unlinked", checks.leased_file_stays, leases_not_asked),
    Mutant(
        "folders not synced before the commit",
        checks.directories_are_synced_before_the_commit,
        folders_not_synced,
    ),
    Mutant(
        "Deleted before its folder is synced",
        checks.deletions_are_synced,
        deleted_although_not_synced,
    ),
    Mutant("renamed twice", checks.children_wait_for_their_parent, published_twice),
    Mutant(
        "the newest evicted",
        checks.newest_checkpoint_stays,
        newest_not_protected,
        replace(SMALL, room_wait_seconds=1.0),
    ),
    Mutant(
        "a victim evicted twice",
        checks.damage_of_half_a_chosen_pair_is_recorded,
        victims_damaged_again,
    ),
    Mutant(
        "bad news for stored entries only",
        checks.bad_news_reaches_what_is_being_stored,
        stores_under_way_forgotten,
    ),
)
