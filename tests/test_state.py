"""The fold: from the events alone, the same from any cut, and sure of what cannot be true."""

import random
from collections.abc import Callable

import pytest
from histories import ROOTS, TOKENS, Historian, child_key
from hypothesis import given, settings
from hypothesis import strategies as st

from walkback.journal.errors import JournalDamagedError
from walkback.journal.events import (
    Abandoned,
    Closed,
    Deleted,
    DeletionRefused,
    Event,
    Evicted,
    Lost,
    Opened,
    Purged,
    Quarantined,
    Record,
    Reinstated,
    Replaced,
    ReportedBad,
    Unpinned,
)
from walkback.journal.invariants import violations
from walkback.journal.state import State
from walkback.journal.words import AbandonReason, EvictReason, FileName, Kind
from walkback.store.statistics import holdings_of

STEPS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=60)

View = tuple[object, ...]


def view(state: State) -> View:
    """All that two equal states share: the records, and what is derived from them."""
    with_children = (*state.blocks.values(), *state.holes.values())
    return (
        state.sequence,
        dict(state.records()),
        state.used_bytes,
        charged(state),
        {each.key: each.child_count for each in with_children},
        [leaf.key for leaf in state.coldest_leaves()],
    )


def charged(state: State) -> tuple[int, ...]:
    """The running sums, as they are shown."""
    held = holdings_of(state)
    return (
        held.block_bytes,
        held.sidecar_bytes,
        held.doomed_bytes,
        held.refused_count,
        held.quarantined_bytes,
        held.segment_bytes,
    )


def added_up(state: State) -> tuple[int, ...]:
    """The same from every entry, one after the other."""
    return (
        sum(each.allocated_bytes for each in state.blocks.values()),
        sum(each.allocated_bytes for each in state.sidecars.values()),
        sum(each.allocated_bytes for each in state.doomed.values()),
        sum(each.refusals > 0 for each in state.doomed.values()),
        sum(each.entry.allocated_bytes for each in state.quarantined.values()),
        sum(each.allocated_bytes for each in state.segments.values()),
    )


def replay(records: list[Record], state: State | None = None) -> State:
    state = State() if state is None else state
    for record in records:
        state.apply(record)
    return state


def told(steps: list[tuple[int, int]]) -> Historian:
    history = Historian()
    for choice, pick in steps:
        history.step(choice, pick)
    return history


# Properties of every history.


@given(STEPS)
@settings(max_examples=50, deadline=None)
def test_the_invariants_hold_after_every_event(steps: list[tuple[int, int]]) -> None:
    state = State()

    for record in told(steps).records:
        state.apply(record)

        assert list(violations(state)) == []


@given(STEPS, st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_running_sums_are_what_adding_up_gives(steps: list[tuple[int, int]], cut: int) -> None:
    records = told(steps).records
    cut %= len(records) + 1
    running = State()
    for record in records:
        running.apply(record)
        assert charged(running) == added_up(running)

    early = replay(records[:cut])
    snapshot = replay(records[cut:], State.from_records(early.sequence, early.records()))

    assert charged(snapshot) == charged(running)
    assert running.used_bytes == sum(added_up(running)) - charged(running)[3]


def test_running_sums_hold_through_a_long_history() -> None:
    """Segments that are dropped and deletions that are done after a refusal are rare."""
    choices, history = random.Random(1), Historian()

    for _ in range(1500):
        history.step(choices.randrange(1000), choices.randrange(1000))
        assert charged(history.state) == added_up(history.state)


@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_replaying_twice_is_replaying_once(steps: list[tuple[int, int]]) -> None:
    history = told(steps)
    before = view(history.state)

    replay(history.records, history.state)

    assert view(history.state) == before


@given(STEPS, st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_records_at_any_cut_and_the_tail_give_the_running_state(
    steps: list[tuple[int, int]], cut: int
) -> None:
    history = told(steps)
    cut %= len(history.records) + 1
    early = replay(history.records[:cut])

    snapshot = State.from_records(early.sequence, early.records())

    assert view(replay(history.records[cut:], snapshot)) == view(history.state)
    assert view(replay(history.records)) == view(history.state)


@given(STEPS, st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_the_records_that_changed_since_a_cut_are_all_that_differ(
    steps: list[tuple[int, int]], cut: int
) -> None:
    history = told(steps)
    cut %= len(history.records) + 1
    state = replay(history.records[:cut])
    state.take_changed()
    snapshot = dict(state.records())

    replay(history.records[cut:], state)
    for record_id in state.take_changed():
        value = state.record(record_id)
        if value is None:
            snapshot.pop(record_id, None)
        else:
            snapshot[record_id] = value

    assert snapshot == dict(state.records())


@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_the_coldest_leaves_are_a_full_scan_in_the_order_of_recency(
    steps: list[tuple[int, int]],
) -> None:
    state = told(steps).state

    leaves = [entry.key for entry in state.coldest_leaves()]

    scanned = [entry for entry in state.blocks.values() if not entry.child_count]
    assert leaves == [entry.key for entry in sorted(scanned, key=lambda entry: entry.recency)]


# What cannot be true.


def test_a_gap_in_the_sequence_is_damage() -> None:
    history = Historian()
    event = Opened(epoch=2, pid=1, boot_id="", versions="")

    with pytest.raises(JournalDamagedError, match="events 2 to 2 are missing"):
        history.state.apply(Record(sequence=3, wall_ns=0, epoch=2, event=event))

    assert history.state.sequence == 1


NOBODY = child_key(ROOTS[0], 9)
NO_FILE = FileName(Kind.BLOCK, 7, 7)


def gone(kind: Kind, key: bytes, generation: int = 1) -> Evicted:
    return Evicted(
        kind=kind,
        key=key,
        generation=generation,
        reason=EvictReason.BUDGET,
        policy="lru",
        budget_bytes=0,
        need_bytes=0,
    )


def _second_block_without_the_first(history: Historian) -> Event:
    staged = history.staged(Kind.BLOCK, NOBODY)
    history.say(staged)
    return history.committed(Kind.BLOCK, NOBODY, _unknown(history), staged.file)


def _sidecar_without_its_block(history: Historian) -> Event:
    staged = history.staged(Kind.SIDECAR, NOBODY)
    history.say(staged)
    return history.committed(Kind.SIDECAR, NOBODY, ROOTS[0], staged.file)


def _unknown(history: Historian) -> bytes:
    """The key of a block that was there and is not any more."""
    key = history.block(ROOTS[1])
    history.evict(key)
    history._ends[key] = 16  # pyright: ignore[reportPrivateUsage]
    history.namespace_of = lambda parent: ROOTS[1]  # type: ignore[method-assign]
    return key


def _quarantined_without_a_file(history: Historian) -> Event:
    key = history.block(ROOTS[0], 1, has_file=False)
    return Quarantined(kind=Kind.BLOCK, key=key, generation=1, reason="")


def _reinstated_below_nothing(history: Historian) -> Event:
    keys = history.chain(2, ROOTS[1])
    history.say(history.evicted(history.state.sidecars[keys[1]]))
    file = history.quarantine(Kind.BLOCK, keys[1])
    history.evict(keys[0])
    return Reinstated(file=file)


IMPOSSIBLE: dict[str, Callable[[Historian], Event]] = {
    "a block below nothing": _second_block_without_the_first,
    "a sidecar without its block": _sidecar_without_its_block,
    "a commit that was not staged": lambda history: history.committed(
        Kind.BLOCK, NOBODY, ROOTS[0], NO_FILE
    ),
    "a replacement of nothing": lambda _: Replaced(
        kind=Kind.BLOCK, key=NOBODY, generation=1, file=NO_FILE
    ),
    "an abandoned file that was not staged": lambda _: Abandoned(
        file=NO_FILE, reason=AbandonReason.CRASH
    ),
    "an eviction of nothing": lambda _: gone(Kind.BLOCK, NOBODY),
    "an eviction of another generation": lambda history: gone(
        Kind.BLOCK, history.block(ROOTS[1], 1), generation=2
    ),
    "an eviction of a block with children": lambda history: gone(
        Kind.BLOCK, history.chain(2, ROOTS[1])[0]
    ),
    "an eviction of a block with a sidecar": lambda history: gone(
        Kind.BLOCK, history.chain(1, ROOTS[1])[0]
    ),
    "a deletion of a file that is live": lambda history: Deleted(
        file=_file_of(history, history.block(ROOTS[1], 1)), already_gone=False
    ),
    "a deletion of nothing": lambda _: Deleted(file=NO_FILE, already_gone=False),
    "a refused deletion of nothing": lambda _: DeletionRefused(file=NO_FILE, reason="", attempts=1),
    "a quarantine of nothing": lambda _: Quarantined(
        kind=Kind.BLOCK, key=NOBODY, generation=1, reason=""
    ),
    "a quarantine of a block without a file": _quarantined_without_a_file,
    "a loss of nothing": lambda _: Lost(kind=Kind.SIDECAR, key=NOBODY, generation=1, reason=""),
    "a loss of another generation": lambda history: Lost(
        kind=Kind.BLOCK, key=history.block(ROOTS[1], 1), generation=2, reason=""
    ),
    "a reinstatement of nothing": lambda _: Reinstated(file=NO_FILE),
    "a reinstatement below nothing": _reinstated_below_nothing,
    "an unpinning of what is not pinned": lambda _: Unpinned(key=NOBODY),
}


def _file_of(history: Historian, key: bytes) -> FileName:
    file = history.state.blocks[key].file
    assert file is not None
    return file


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_event_that_cannot_be_true_is_damage_and_changes_nothing(what: str) -> None:
    history = Historian()
    history.chain(3)
    event = IMPOSSIBLE[what](history)
    before = view(history.state)
    sequence = history.state.sequence + 1

    with pytest.raises(JournalDamagedError, match=f"event {sequence}, {type(event).__name__}"):
        history.state.apply(Record(sequence=sequence, wall_ns=0, epoch=1, event=event))

    assert view(history.state) == before


def test_closing_an_epoch_twice_is_damage() -> None:
    history = Historian()
    history.say(Closed(files=()))

    with pytest.raises(JournalDamagedError):
        history.say(Closed(files=()))


# Holes.


@pytest.mark.parametrize("kind_of_damage", ["quarantine", "lose"])
def test_a_damaged_block_with_blocks_below_becomes_a_hole(kind_of_damage: str) -> None:
    history = Historian()
    first, second, third = history.chain(3)

    getattr(history, kind_of_damage)(Kind.BLOCK, second)

    assert set(history.state.holes) == {second}
    assert set(history.state.blocks) == {first, third}
    assert set(history.state.sidecars) == {first, third}
    assert history.state.blocks[first].child_count == 1


@pytest.mark.parametrize("kind_of_damage", ["quarantine", "lose"])
def test_a_damaged_block_with_nothing_below_leaves_no_hole(kind_of_damage: str) -> None:
    history = Historian()
    first, second = history.chain(2)

    getattr(history, kind_of_damage)(Kind.BLOCK, second)

    assert not history.state.holes
    assert history.state.blocks[first].child_count == 0


def test_storing_the_key_of_a_hole_again_heals_it() -> None:
    history = Historian()
    first, second, third = history.chain(3)
    history.lose(Kind.BLOCK, second)

    history.store(Kind.BLOCK, second, first)

    assert not history.state.holes
    assert history.state.blocks[second].child_count == 1
    assert history.state.blocks[first].child_count == 1
    assert [leaf.key for leaf in history.state.coldest_leaves()] == [third]


def test_a_hole_vanishes_with_its_last_child_and_frees_the_block_above() -> None:
    history = Historian()
    first, second, third = history.chain(3)
    other = history.block(second, 1)
    history.lose(Kind.BLOCK, second)

    history.evict(third)
    with_one_child = dict(history.state.holes)
    history.evict(other)

    assert set(with_one_child) == {second}
    assert not history.state.holes
    assert [leaf.key for leaf in history.state.coldest_leaves()] == [first]


def test_holes_below_one_another_vanish_together() -> None:
    history = Historian()
    keys = history.chain(4)
    history.lose(Kind.BLOCK, keys[2])
    history.lose(Kind.BLOCK, keys[1])

    history.evict(keys[3])

    assert not history.state.holes
    assert history.state.blocks[keys[0]].child_count == 0


def test_a_lost_block_takes_its_sidecar_with_it() -> None:
    history = Historian()
    (key,) = history.chain(1)
    file = history.state.sidecars[key].file

    history.lose(Kind.BLOCK, key)

    assert not history.state.sidecars
    assert set(history.state.doomed) == {file}


def test_bytes_of_a_lost_file_are_not_charged_and_those_of_a_quarantined_one_are() -> None:
    history = Historian()
    first, second = history.block(ROOTS[0], 0), history.block(ROOTS[0], 1)

    history.lose(Kind.BLOCK, first)
    history.quarantine(Kind.BLOCK, second)

    assert history.state.used_bytes == 4096


def test_a_deleted_file_is_off_the_ledger() -> None:
    history = Historian()
    key = history.block(ROOTS[0])
    file = _file_of(history, key)
    history.evict(key)
    while_doomed = history.state.used_bytes

    history.say(Deleted(file=file, already_gone=False))

    assert (while_doomed, history.state.used_bytes) == (4096, 0)


# Generations, purges and reports.


def test_a_replaced_block_keeps_its_children_and_dooms_the_older_file() -> None:
    history = Historian()
    first, _ = history.chain(2)
    older = _file_of(history, first)

    history.store(Kind.BLOCK, first, ROOTS[0])

    assert history.state.blocks[first].generation == 2
    assert history.state.blocks[first].child_count == 1
    assert set(history.state.doomed) == {older}


def test_a_bad_sidecar_takes_all_that_descends_from_its_boundary_and_leaves_its_block() -> None:
    history = Historian()
    keys = history.chain(4)
    sibling = history.block(keys[1], 1)

    history.say(ReportedBad(kind=Kind.SIDECAR, key=keys[1], detail="it loops"))

    assert set(history.state.blocks) == {keys[0], keys[1]}
    assert set(history.state.sidecars) == {keys[0]}
    assert sibling not in history.state.blocks


def test_a_bad_block_goes_with_all_that_descends_from_it_even_through_a_hole() -> None:
    history = Historian()
    keys = history.chain(4)
    history.lose(Kind.BLOCK, keys[2])

    history.say(ReportedBad(kind=Kind.BLOCK, key=keys[1], detail="it loops"))

    assert set(history.state.blocks) == {keys[0]}
    assert not history.state.holes


def test_a_purge_takes_one_namespace_with_its_holes_and_pins_do_not_help() -> None:
    history = Historian()
    mine, theirs = history.chain(3, ROOTS[0]), history.chain(2, ROOTS[1])
    history.lose(Kind.BLOCK, mine[1])

    history.say(Purged(namespace=ROOTS[0]))

    assert set(history.state.blocks) == set(history.state.sidecars) == set(theirs)
    assert not history.state.holes


def test_a_reinstated_entry_is_as_it_was_and_the_most_recently_used() -> None:
    history = Historian()
    first, second = history.block(ROOTS[0], 0), history.block(ROOTS[0], 1)
    before = history.state.blocks[first]
    file = history.quarantine(Kind.BLOCK, first)

    history.say(Reinstated(file=file))

    after = history.state.blocks[first]
    assert (after.file, after.generation, after.sequence) == (file, 1, before.sequence)
    assert [leaf.key for leaf in history.state.coldest_leaves()] == [second, first]
    assert not history.state.quarantined
    assert history.state.used_bytes == 2 * 4096


def test_a_reinstated_block_heals_its_hole() -> None:
    history = Historian()
    _, second, third = history.chain(3)
    file = history.quarantine(Kind.BLOCK, second)

    history.say(Reinstated(file=file))

    assert not history.state.holes
    assert history.state.blocks[second].child_count == 1
    assert [leaf.key for leaf in history.state.coldest_leaves()] == [third]


# Tails.


@given(STEPS, st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_every_tail_is_found_by_its_parent_however_the_state_came_to_be(
    steps: list[tuple[int, int]], cut: int
) -> None:
    history = told(steps)
    cut %= len(history.records) + 1
    early = replay(history.records[:cut])
    resumed = replay(history.records[cut:], State.from_records(early.sequence, early.records()))

    for state in (history.state, resumed):
        for entry in state.blocks.values():
            if entry.end - entry.start < TOKENS and entry.parent not in state.holes:
                assert entry.end - entry.start in state.short_lengths(entry.parent)


@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_no_length_is_told_of_which_there_is_no_block(steps: list[tuple[int, int]]) -> None:
    state = told(steps).state

    for parent in state.short:
        lengths = {
            entry.end - entry.start for entry in state.blocks.values() if entry.parent == parent
        }
        assert set(state.short_lengths(parent)) <= lengths


def test_the_lengths_of_tails_come_longest_first_and_go_with_their_last_block() -> None:
    history = Historian()
    above = history.block(ROOTS[0])
    tails = [history.tail(above, length) for length in (3, 9, 5)]
    history.block(above)

    assert history.state.short_lengths(above) == [9, 5, 3]

    history.evict(tails[1])
    assert history.state.short_lengths(above) == [5, 3]


def test_below_a_long_chain_nothing_is_counted_but_its_first_block() -> None:
    """A set of children for each of half a million blocks would cost a hundred bytes and more."""
    history = Historian()
    history.chain(20)

    assert {key: dict(lengths) for key, lengths in history.state.short.items()} == {
        ROOTS[0]: {TOKENS: 1}
    }


# Recency.


def test_an_eviction_hands_its_recency_to_the_parent() -> None:
    history = Historian()
    first, second = history.chain(2)
    other = history.block(ROOTS[1])
    history.touch(second)

    history.evict(second)

    assert [leaf.key for leaf in history.state.coldest_leaves()] == [other, first]


def test_an_eviction_never_makes_the_parent_look_older() -> None:
    history = Historian()
    first, second = history.chain(2)
    history.touch(second, first)
    recency = history.state.blocks[first].recency

    history.evict(second)

    assert history.state.blocks[first].recency == recency


def test_what_is_superseded_is_older_than_all_others_and_keeps_its_last_use() -> None:
    history = Historian()
    keys = [history.block(ROOTS[0], index) for index in range(4)]
    entry = history.state.blocks[keys[2]]
    used = entry.last_use

    history.supersede(keys[3], keys[2])
    history.supersede(keys[2])

    coldest = [leaf.key for leaf in history.state.coldest_leaves()]
    assert coldest == [keys[2], keys[3], keys[0], keys[1]]
    assert entry.last_use == used > 0
    replayed = State.from_records(history.state.sequence, list(history.state.records()))
    assert [leaf.key for leaf in replayed.coldest_leaves()] == coldest


def test_the_keys_of_one_touch_are_ordered_by_their_place_in_it() -> None:
    history = Historian()
    keys = [history.block(ROOTS[0], index) for index in range(4)]

    history.touch(keys[2], keys[0])

    assert [leaf.key for leaf in history.state.coldest_leaves()] == [
        keys[1],
        keys[3],
        keys[2],
        keys[0],
    ]


# The properties above see a fold that is wrong.


def _hand_nothing(self: State, event: Evicted) -> None:
    parents = {key: entry.recency for key, entry in self.blocks.items()}
    _EVICT(self, event)
    for key, recency in parents.items():
        if key in self.blocks:
            self.blocks[key].recency = recency


def _forget_holes(self: State, parent: bytes) -> None:
    block = self.blocks.get(parent)
    if block is not None:
        _DETACH(self, parent)


def _charge_nothing(self: State, file: FileName) -> None:
    before = self.charges.copy()
    _DELETE(self, file)
    self.charges = before


_EVICT = State._evict  # pyright: ignore[reportPrivateUsage]
_DETACH = State._detach  # pyright: ignore[reportPrivateUsage]
_DELETE = State._delete  # pyright: ignore[reportPrivateUsage]

MUTANTS: dict[str, tuple[str, Callable[..., None], Callable[[], None]]] = {
    "recency not handed up": (
        "_evict",
        _hand_nothing,
        test_an_eviction_hands_its_recency_to_the_parent,
    ),
    "holes stay for ever": (
        "_detach",
        _forget_holes,
        test_a_hole_vanishes_with_its_last_child_and_frees_the_block_above,
    ),
    "deleted bytes stay charged": (
        "_delete",
        _charge_nothing,
        test_a_deleted_file_is_off_the_ledger,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_of_the_fold_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, mutant, check = MUTANTS[name]
    monkeypatch.setattr(State, method, mutant)

    with pytest.raises(AssertionError):
        check()
