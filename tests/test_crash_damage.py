"""The layer of damaged files: a share of it, and that its checks can fail."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from crash.damage import LAYER, judge
from crash.damages import Damage, all_damages
from crash.layer import Effort, is_at_length
from crash.lives import steady
from crash.specimen import JOURNAL, Specimen, specimens

from walkback.journal.log_reader import LogReader


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Specimen]:
    with steady():
        return specimens(tmp_path_factory.mktemp("damage") / "cache")


def damage_of(specimen: Specimen, name: str) -> Damage:
    damages = (each for kind in all_damages(specimen).values() for each in kind)
    return next(each for each in damages if each.name == name)


def never(*_: object) -> bool:
    return False


def test_damage_costs_no_more_than_what_it_hit() -> None:
    share = 1.0 if is_at_length() else LAYER.quick_share
    report = LAYER.report(Effort(share=share))

    assert not report.failures, "\n".join(report.failures)
    assert len(report.states) > 10_000 * share
    assert report.tallies["while open"] and report.tallies["of a lost journal"]


def test_each_damage_has_a_name_of_its_own(found: Sequence[Specimen]) -> None:
    for specimen in found:
        names = [each.name for kind in all_damages(specimen).values() for each in kind]

        assert len(names) == len(set(names))


def test_a_journal_that_was_rolled_back_and_is_believed_is_seen(
    found: Sequence[Specimen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specimen = found[0]
    damage = damage_of(specimen, "the journal of moment 12")
    with steady():
        judge(specimen, damage, tmp_path / "sound")
        monkeypatch.setattr(LogReader, "is_behind", never)

        with pytest.raises(AssertionError):
            judge(specimen, damage, tmp_path / "broken")


@pytest.mark.parametrize("text", ['{"pid": 1e999, "boot_id": "this"}', "[" * 4096])
def test_an_owner_that_makes_no_sense_is_nobody(
    text: str, found: Sequence[Specimen], tmp_path: Path
) -> None:
    """Reading one raised what no opening expected, so the cache could not be opened any more."""
    damage = damage_of(found[0], f"OWNER says {text[:40]}")

    with steady():
        judge(found[0], damage, tmp_path / "cache")


@pytest.mark.parametrize("name", ["STORE", JOURNAL])
def test_a_store_and_a_journal_of_two_caches_are_refused(
    name: str, found: Sequence[Specimen], tmp_path: Path
) -> None:
    """The payloads, or the journal and its backup, went: each was taken for another cache's."""
    damage = damage_of(found[0], f"{name} of another cache")

    with steady():
        judge(found[0], damage, tmp_path / "cache")
