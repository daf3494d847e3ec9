"""The policy: pure, leaf first, pairs together, and held against an oracle that scans."""

from collections.abc import Callable

import pytest
from histories import ROOTS, Historian
from hypothesis import given, settings
from hypothesis import strategies as st

from walkback.journal.entries import Entry
from walkback.journal.invariants import violations
from walkback.journal.state import State
from walkback.journal.words import EvictReason, Kind
from walkback.store import eviction
from walkback.store.eviction import Victim, choose_victims

STEPS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=60)
EVERYTHING = 1 << 60


def nobody(_: Entry) -> bool:
    return False


def choose(
    history: Historian,
    need_bytes: int = EVERYTHING,
    is_protected: Callable[[Entry], bool] = nobody,
) -> list[tuple[Kind, bytes]]:
    victims = choose_victims(
        history.state,
        need_bytes=need_bytes,
        reason=EvictReason.BUDGET,
        is_protected=is_protected,
    )
    return [(victim.kind, victim.key) for victim in victims]


def protecting(*keys: bytes) -> Callable[[Entry], bool]:
    return lambda entry: entry.key in keys


# The oracle: one victim at a time, each found by a scan of the whole state, which is then changed
# by the fold itself. It shares no code with the policy.


def _deepest_below_a_hole(state: State, may_go: Callable[[bytes], bool]) -> bytes | None:
    def is_below_a_hole(entry: Entry) -> bool:
        parent = entry.parent
        while parent in state.blocks:
            parent = state.blocks[parent].parent
        return parent in state.holes

    found = [
        entry
        for entry in state.blocks.values()
        if not entry.child_count and may_go(entry.key) and is_below_a_hole(entry)
    ]
    return max(found, key=lambda entry: (entry.end, entry.key)).key if found else None


def _coldest_leaf(state: State, may_go: Callable[[bytes], bool]) -> bytes | None:
    found = [
        entry for entry in state.blocks.values() if not entry.child_count and may_go(entry.key)
    ]
    return min(found, key=lambda entry: entry.recency).key if found else None


def _coldest_inner_sidecar(state: State, is_protected: Callable[[Entry], bool]) -> Entry | None:
    def has_a_sidecar_below(key: bytes) -> bool:
        """One below a hole does not count: nothing can resume from it."""
        return any(key in live_ancestors(below) for below in state.sidecars)

    def live_ancestors(key: bytes) -> set[bytes]:
        found: set[bytes] = set()
        parent = state.blocks[key].parent
        while parent in state.blocks:
            found.add(parent)
            parent = state.blocks[parent].parent
        return found

    found = [
        entry
        for key, entry in state.sidecars.items()
        if has_a_sidecar_below(key) and not is_protected(entry)
    ]
    return min(found, key=lambda entry: entry.recency) if found else None


def scanned_victims(
    history: Historian, need_bytes: int, is_protected: Callable[[Entry], bool]
) -> list[tuple[Kind, bytes, EvictReason]]:
    """The victims, by scanning. Changes the history."""
    state = history.state
    victims: list[tuple[Kind, bytes, EvictReason]] = []
    freed = 0

    def may_go(key: bytes) -> bool:
        sidecar = state.sidecars.get(key)
        return not is_protected(state.blocks[key]) and not (sidecar and is_protected(sidecar))

    while freed < need_bytes:
        reason = EvictReason.UNREACHABLE
        key = _deepest_below_a_hole(state, may_go)
        if key is None:
            reason, key = EvictReason.BUDGET, _coldest_leaf(state, may_go)
        if key is not None:
            sidecar = state.sidecars.get(key)
            if sidecar is not None:
                victims.append((Kind.SIDECAR, key, EvictReason.PAIR))
                freed += sidecar.allocated_bytes
            victims.append((Kind.BLOCK, key, reason))
            freed += state.blocks[key].allocated_bytes
            history.evict(key)
            continue
        thinned = _coldest_inner_sidecar(state, is_protected)
        if thinned is None:
            break
        victims.append((Kind.SIDECAR, thinned.key, EvictReason.THINNED))
        freed += thinned.allocated_bytes
        history.say(history.evicted(thinned))
    return victims


def told(steps: list[tuple[int, int]]) -> Historian:
    history = Historian()
    for choice, pick in steps:
        history.step(choice, pick)
    return history


@given(STEPS, st.integers(0, 40), st.sets(st.integers(0, 40), max_size=4))
@settings(max_examples=120, deadline=None)
def test_the_victims_are_those_that_scanning_for_one_at_a_time_finds(
    steps: list[tuple[int, int]], need_blocks: int, protected: set[int]
) -> None:
    history = told(steps)
    keys = {key for index, key in enumerate(history.state.blocks) if index in protected}
    is_protected = protecting(*keys)
    victims = choose_victims(
        history.state,
        need_bytes=need_blocks * 4096,
        reason=EvictReason.BUDGET,
        is_protected=is_protected,
    )

    expected = scanned_victims(history, need_blocks * 4096, is_protected)

    assert _named(victims) == expected


def _named(victims: list[Victim]) -> list[tuple[Kind, bytes, EvictReason]]:
    return [(victim.kind, victim.key, victim.reason) for victim in victims]


@given(STEPS, st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_the_tombstones_of_a_choice_can_be_applied_in_its_order(
    steps: list[tuple[int, int]], need_blocks: int
) -> None:
    history = told(steps)
    need_bytes = need_blocks * 4096
    before = history.state.used_bytes - sum(
        each.allocated_bytes for each in history.state.doomed.values()
    )
    victims = choose_victims(
        history.state, need_bytes=need_bytes, reason=EvictReason.FLOOR, is_protected=nobody
    )

    for victim in victims:
        entry = history.state.entry(victim.kind, victim.key)
        assert entry is not None and entry.allocated_bytes == victim.allocated_bytes
        history.say(history.evicted(entry))

    after = history.state.used_bytes - sum(
        each.allocated_bytes for each in history.state.doomed.values()
    )
    assert list(violations(history.state)) == []
    assert not history.state.blocks or before - after >= need_bytes


@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_choosing_changes_nothing(steps: list[tuple[int, int]]) -> None:
    history = told(steps)
    before = (dict(history.state.records()), [each.key for each in history.state.coldest_leaves()])

    first, second = choose(history, 3 * 4096), choose(history, 3 * 4096)

    after = (dict(history.state.records()), [each.key for each in history.state.coldest_leaves()])
    assert (first, after) == (second, before)


# One behaviour each.


def test_nothing_goes_for_nothing() -> None:
    history = Historian()
    history.chain(2)

    assert choose(history, 0) == []


def test_a_block_goes_after_all_blocks_below_it_and_with_its_sidecar() -> None:
    history = Historian()
    first, second, third = history.chain(3)

    order = choose(history)

    assert order == [(kind, key) for key in (third, second, first) for kind in reversed(Kind)]


def test_the_least_recently_used_leaf_goes_first() -> None:
    history = Historian()
    older, newer = history.block(ROOTS[0], 0), history.block(ROOTS[0], 1)
    history.touch(older)

    assert choose(history, 1) == [(Kind.BLOCK, newer)]


def test_the_end_of_an_answer_that_was_passed_goes_first_unless_it_is_used_again() -> None:
    history = Historian()
    oldest = history.block(ROOTS[1])
    parent = history.block(ROOTS[0])
    passed, used = history.tail(parent, 1), history.tail(parent, 2)
    history.sidecar(passed)
    history.touch(passed)

    history.supersede(passed, used)
    history.touch(used)

    blocks = [key for kind, key in choose(history) if kind is Kind.BLOCK]
    assert blocks == [passed, oldest, used, parent]
    assert choose(history, 1) == [(Kind.SIDECAR, passed), (Kind.BLOCK, passed)]


def test_a_parent_takes_its_last_childs_place_in_the_order_of_one_choice() -> None:
    history = Historian()
    parent = history.block(ROOTS[0])
    child = history.block(parent)
    between = history.block(ROOTS[1])
    history.touch(child)

    assert choose(history) == [(Kind.BLOCK, key) for key in (between, child, parent)]


def test_a_parent_that_was_used_after_its_children_keeps_its_own_place() -> None:
    history = Historian()
    parent = history.block(ROOTS[0])
    child = history.block(parent)
    between = history.block(ROOTS[1])
    history.touch(parent)

    assert choose(history) == [(Kind.BLOCK, key) for key in (child, between, parent)]


def test_no_more_goes_than_is_needed() -> None:
    history = Historian()
    history.chain(5)

    assert len(choose(history, 4096 + 1)) == 2
    assert len(choose(history, 2 * 4096 + 1)) == 4


@pytest.mark.parametrize("kind", Kind)
def test_a_protected_half_keeps_its_pair_and_all_above_it(kind: Kind) -> None:
    history = Historian()
    keys = history.chain(3)

    def is_protected(entry: Entry) -> bool:
        return (entry.kind, entry.key) == (kind, keys[1])

    order = choose(history, is_protected=is_protected)

    assert {key for of, key in order if of is Kind.BLOCK} == {keys[2]}
    assert (Kind.SIDECAR, keys[1]) not in order


def test_what_no_restore_reaches_goes_before_the_oldest_leaf() -> None:
    history = Historian()
    oldest = history.block(ROOTS[1])
    keys = history.chain(4)
    history.lose(Kind.BLOCK, keys[1])

    order = [key for kind, key in choose(history) if kind is Kind.BLOCK]

    assert order == [keys[3], keys[2], oldest, keys[0]]


def test_thinning_comes_last_and_keeps_the_newest_sidecar_of_each_lineage() -> None:
    history = Historian()
    keys = history.chain(3)
    branch = history.block(keys[0], 1)
    history.sidecar(branch)

    order = choose(history, is_protected=lambda entry: entry.kind is Kind.BLOCK)

    assert order == [(Kind.SIDECAR, keys[0]), (Kind.SIDECAR, keys[1])]


def test_a_sidecar_above_a_hole_is_not_thinned_for_one_below_it() -> None:
    history = Historian()
    keys = history.chain(3)
    history.lose(Kind.BLOCK, keys[1])

    order = choose(history, is_protected=protecting(keys[2]))

    assert (Kind.SIDECAR, keys[0]) not in order


def test_an_empty_state_has_no_victims() -> None:
    assert choose(Historian()) == []


# The oracle sees a policy that is wrong.


def _no_promotion(patch: pytest.MonkeyPatch) -> None:
    def push(heap: object, item: object) -> None:
        pass

    patch.setattr(eviction.heapq, "heappush", push)


def _parents_at_their_childs_age(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eviction, "max", min, raising=False)


def _unreachable_last(patch: pytest.MonkeyPatch) -> None:
    def nothing(state: State) -> list[bytes]:
        return []

    patch.setattr(eviction, "_unreachable", nothing)


def _every_sidecar_thinned(patch: pytest.MonkeyPatch) -> None:
    def all_of_them(state: State, gone: set[bytes]) -> list[Entry]:
        return [entry for key, entry in state.sidecars.items() if key not in gone]

    patch.setattr(eviction, "_with_a_sidecar_below", all_of_them)


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {
    "parents never promoted": (
        _no_promotion,
        test_a_block_goes_after_all_blocks_below_it_and_with_its_sidecar,
    ),
    "parents promoted at their child's age": (
        _parents_at_their_childs_age,
        test_a_parent_that_was_used_after_its_children_keeps_its_own_place,
    ),
    "the unreachable go last": (
        _unreachable_last,
        test_what_no_restore_reaches_goes_before_the_oldest_leaf,
    ),
    "every sidecar is thinned": (
        _every_sidecar_thinned,
        test_thinning_comes_last_and_keeps_the_newest_sidecar_of_each_lineage,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_of_the_policy_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, check = MUTANTS[name]
    patch(monkeypatch)

    with pytest.raises(AssertionError):
        check()
