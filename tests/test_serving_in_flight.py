"""A prompt that waits for another's prefill: for what they share, and only as long as that pays."""

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from cache_maker import wait_until

from walkback.integration.serving.in_flight import MutablePrefills, Prefill

PROMPT = list(range(1000, 1100))
STOPS = (20, 40, 60, 80)
LONG = 1e6
JOIN_SECONDS = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def prefills(clock: Clock) -> MutablePrefills:
    return MutablePrefills(clock)


@pytest.fixture
def thread() -> Generator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def nothing() -> int:
    return 0


def unasked() -> int:
    raise AssertionError("nothing is shared, and so nothing is looked up")


def enter(
    prefills: MutablePrefills,
    token_ids: Sequence[int] = PROMPT,
    *,
    stops: Sequence[int] = STOPS,
    restorable: Callable[[], int] = nothing,
    seconds: float = LONG,
    model: str = "m",
) -> Prefill:
    return prefills.enter(model, token_ids, stops, restorable=restorable, wait_seconds_max=seconds)


def waiting(
    prefills: MutablePrefills,
    thread: ThreadPoolExecutor,
    token_ids: Sequence[int] = PROMPT,
    restorable: Callable[[], int] = nothing,
) -> "Future[Prefill]":
    """A prompt that has begun to wait."""
    future = thread.submit(enter, prefills, token_ids, restorable=restorable)
    wait_until(lambda: prefills.waiting_count > 0 or future.done(), "it waits")
    assert not future.done()
    return future


def test_nothing_waits_when_nothing_is_shared(prefills: MutablePrefills) -> None:
    enter(prefills, restorable=unasked).begin(0)

    # Another beginning, another model, and no stop of the other's within the prompt.
    enter(prefills, [7, *PROMPT[1:]], restorable=unasked)
    enter(prefills, model="n", restorable=unasked)
    enter(prefills, PROMPT[:20], stops=(), restorable=unasked)


def test_the_second_waits_until_the_last_stop_that_both_have(
    prefills: MutablePrefills, thread: ThreadPoolExecutor
) -> None:
    first = enter(prefills)
    first.begin(0)
    second = waiting(prefills, thread, [*PROMPT[:70], 1, 2, 3])

    for position in (20, 40):
        first.reach(position)
        assert not second.done()
    first.reach(60)

    assert second.result(JOIN_SECONDS).position == 60


def test_what_can_be_restored_already_is_not_waited_for(prefills: MutablePrefills) -> None:
    enter(prefills).begin(0)

    enter(prefills, restorable=lambda: 80)


def test_a_stop_that_was_reached_is_not_waited_for(prefills: MutablePrefills) -> None:
    first = enter(prefills)
    first.begin(60)
    first.reach(80)

    enter(prefills)


def test_the_second_goes_on_at_once_when_the_first_ends(
    prefills: MutablePrefills, thread: ThreadPoolExecutor
) -> None:
    first = enter(prefills)
    first.begin(0)
    second = waiting(prefills, thread)

    first.end()
    first.end()

    second.result(JOIN_SECONDS)


def test_of_two_that_waited_for_one_that_ended_the_second_waits_for_the_first(
    prefills: MutablePrefills,
) -> None:
    first = enter(prefills)
    with ThreadPoolExecutor(2) as pool:
        waiters = [pool.submit(enter, prefills) for _ in range(2)]
        wait_until(lambda: prefills.waiting_count == 2, "both wait")

        first.end()
        wait_until(lambda: any(each.done() for each in waiters), "one goes on")
        wait_until(lambda: prefills.waiting_count == 1, "the other waits")
        (next_one,) = [each.result() for each in waiters if each.done()]
        next_one.end()

        assert {each.result(JOIN_SECONDS) for each in waiters} > {next_one}


def test_those_who_waited_for_one_stop_do_not_wait_for_each_other_to_resume_there(
    prefills: MutablePrefills,
) -> None:
    """They share no more than that: each would wait for the one before it to be let in."""
    first = enter(prefills, PROMPT[:50], stops=(20, 40))
    first.begin(0)
    others = [[*PROMPT[:40], *[number] * 60] for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        waiters = [pool.submit(enter, prefills, other) for other in others]
        wait_until(lambda: prefills.waiting_count == 3, "all wait")

        first.reach(20)
        first.reach(40)

        assert {each.result(JOIN_SECONDS).position for each in waiters} == {40}


def test_it_waits_no_longer_than_computing_the_difference_would_take(
    prefills: MutablePrefills, clock: Clock, thread: ThreadPoolExecutor
) -> None:
    """60 tokens are missing, and twenty took half a second."""
    first = enter(prefills)
    first.begin(0)
    clock.now = 0.5
    first.reach(20)
    second = waiting(prefills, thread, restorable=lambda: 20)

    clock.now = 1.9
    first.reach(999)
    first.begin(20)
    assert not second.done()
    clock.now = 2.1
    first.begin(20)

    second.result(JOIN_SECONDS)


def test_it_waits_no_longer_than_it_may_while_nothing_is_known_of_the_machine() -> None:
    prefills = MutablePrefills()
    enter(prefills)

    enter(prefills, seconds=0.05)
    enter(prefills, seconds=0.0, restorable=unasked)


def test_the_newest_speed_counts_most(
    prefills: MutablePrefills, clock: Clock, thread: ThreadPoolExecutor
) -> None:
    """First 20 tokens took 100 s, then 40 took one: (20/2 + 40) tokens in (100/2 + 1) s."""
    first = enter(prefills)
    first.begin(0)
    clock.now = 100.0
    first.reach(20)
    clock.now = 101.0
    first.reach(60)
    second = waiting(prefills, thread, restorable=lambda: 60)

    clock.now = 101.0 + 20 * 51 / 50 + 0.1
    first.begin(60)

    second.result(JOIN_SECONDS)


def test_decoding_is_no_measure_of_prefill(prefills: MutablePrefills, clock: Clock) -> None:
    first = enter(prefills)
    first.begin(0)
    clock.now = 1.0
    first.reach(80)
    clock.now = 1000.0
    first.reach(140)

    assert prefills._seconds_for(80) == 1.0  # pyright: ignore[reportPrivateUsage]


def test_many_at_once_come_to_an_end(prefills: MutablePrefills) -> None:
    barrier = threading.Barrier(8)

    def one(number: int) -> None:
        barrier.wait()
        for _ in range(50):
            prefill = enter(prefills, [*PROMPT[: 20 * (number % 4 + 1)], number])
            prefill.begin(0)
            for stop in STOPS:
                prefill.reach(stop)
            prefill.end()

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(one, number) for number in range(8)]:
            future.result(JOIN_SECONDS)
    assert prefills.waiting_count == 0
