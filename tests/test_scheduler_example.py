"""The example scheduler against mlx-lm alone, and what it leaves behind."""

# mlx's stubs and mlx-lm's generation leave arguments and elements untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from cache_maker import Gate, HookedFiles, core_of, files_of, wait_until
from mlx import nn
from mlx_lm.generate import generate_step
from scheduler import Request, Scheduler, main
from zoo import build, token_ids

from walkback.integration.cache import Cache
from walkback.restore.plan import Grid
from walkback.store.settings import MIB, StoreSettings
from walkback.store.store import MutableStore

# The hybrids of which some kernels regroup 256 tokens need that stride; the others any.
GRIDS = {
    "llama": Grid(block_tokens=16, checkpoint_tokens=32, merge_tokens=4),
    "qwen3_5": Grid(block_tokens=16, checkpoint_tokens=32, merge_tokens=4),
    "nemotron_h": Grid(block_tokens=64, checkpoint_tokens=256),
}
TOKENS = 6


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {name: build(name) for name in GRIDS}


@pytest.fixture
def opener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[Grid], Cache]]:
    """Opens the one cache of a test; every one that it opened must be left as it was found."""
    opened: list[Cache] = []

    def open_it(grid: Grid) -> Cache:
        settings = StoreSettings(
            budget_bytes=256 * MIB, free_floor_bytes=0, staging_bytes=256 * MIB
        )
        store = MutableStore.open(tmp_path / "cache", settings, make_files=HookedFiles)
        opened.append(Cache(store, grid, salt=""))
        return opened[-1]

    # What a recording holds is let go of by its scheduler, not by the garbage collector.
    monkeypatch.setattr("walkback.store.lookup.Lease.__del__", nothing)
    threads = set(threading.enumerate())
    yield open_it
    for cache in opened:
        files_of(cache.store).hook = None
        cache.close()
    assert set(threading.enumerate()) <= threads


def nothing(*_: object) -> None:
    """Does it."""


def solo(model: Any, prompt: Sequence[int], grid: Grid, tokens: int = TOKENS) -> list[int]:
    """The answer of mlx-lm, which knows of no walkback and no batch."""
    steps = generate_step(
        mx.array(list(prompt)), model, max_tokens=tokens, prefill_step_size=grid.checkpoint_tokens
    )
    return [int(token) for token, _ in steps]


def settled(cache: Cache) -> None:
    """Everything is stored, nothing is staged, leased or held, and the disk agrees."""
    cache.flush()
    cache.store.settle_deletions()
    cache.flush()
    core = core_of(cache.store)
    with core.lock:
        assert not core.overlay.leased
        assert not core.overlay.held
        assert not core.overlay.in_flight
        assert core.staging_bytes == 0
    assert list((cache.store.files.root / "staging").iterdir()) == []
    assert cache.violations() == []


def served(scheduler: Scheduler, prompts: Sequence[Sequence[int]], **options: Any) -> list[Request]:
    requests = [scheduler.submit(prompt, TOKENS, **options) for prompt in prompts]
    scheduler.run()
    return requests


@pytest.mark.parametrize("name", GRIDS)
def test_rows_that_join_and_leave_answer_as_mlx_lm_alone(
    name: str, models: dict[str, nn.Module], opener: Callable[[Grid], Cache]
) -> None:
    grid = GRIDS[name]
    stride = grid.checkpoint_tokens
    prompts = [token_ids(n, seed=n) for n in (2, stride, stride + 1, stride * 2 + 9, 7)]
    cache = opener(grid)
    scheduler = Scheduler(cache.bind(models[name]), rows_max=3)

    requests = [
        scheduler.submit(prompt, tokens)
        for prompt, tokens in zip(prompts, (9, 1, 4, TOKENS, 12), strict=True)
    ]
    scheduler.run()

    for request in requests:
        assert request.answer == solo(models[name], request.prompt, grid, request.tokens_max)
    settled(cache)


@pytest.mark.parametrize("name", GRIDS)
def test_a_prefix_of_one_request_serves_later_ones_also_after_a_restart(
    name: str, models: dict[str, nn.Module], opener: Callable[[Grid], Cache]
) -> None:
    grid = GRIDS[name]
    shared = token_ids(grid.checkpoint_tokens * 2 + 5)
    others = [[*shared, seed, *token_ids(3, seed=seed)] for seed in range(3)]

    cache = opener(grid)
    scheduler = Scheduler(cache.bind(models[name]))
    (first,) = served(scheduler, [shared])
    later = served(scheduler, others)
    settled(cache)
    cache.close()
    again = served(Scheduler(opener(grid).bind(models[name])), [shared, *others])

    assert first.endpoint == 0
    for request in [*later, *again]:
        assert request.endpoint is not None
        assert request.endpoint >= grid.checkpoint_tokens * 2
        assert request.answer == solo(models[name], request.prompt, grid)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_the_next_turn_resumes_where_the_answer_ended(
    name: str, models: dict[str, nn.Module], opener: Callable[[Grid], Cache]
) -> None:
    """Of models that are free of plans: an answer is decoded token by token."""
    grid = GRIDS[name]
    scheduler = Scheduler(opener(grid).bind(models[name]))
    turn, other = served(scheduler, [token_ids(70), token_ids(41, seed=2)])

    conversation = [*turn.prompt, *turn.answer, *token_ids(11, seed=3)]
    (following,) = served(scheduler, [conversation])

    assert following.endpoint == 70 + TOKENS - 1
    assert following.answer == solo(models[name], conversation, grid)
    assert other.answer == solo(models[name], other.prompt, grid)


def test_a_stop_token_ends_an_answer(
    models: dict[str, nn.Module], opener: Callable[[Grid], Cache]
) -> None:
    prompt = token_ids(40)
    expected = solo(models["llama"], prompt, GRIDS["llama"], 12)
    scheduler = Scheduler(opener(GRIDS["llama"]).bind(models["llama"]))

    request = scheduler.submit(prompt, 12, stop_tokens=frozenset(expected[2:3]))
    scheduler.run()

    assert request.answer == expected[: expected.index(expected[2]) + 1]


# Aborts.


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_an_abort_at_any_step_leaves_nothing_behind_and_the_others_as_they_were(
    steps: int, models: dict[str, nn.Module], opener: Callable[[Grid], Cache]
) -> None:
    grid = GRIDS["qwen3_5"]
    cache = opener(grid)
    scheduler = Scheduler(cache.bind(models["qwen3_5"]))
    served(scheduler, [token_ids(40, seed=5)])
    # Restored, prefilled over three strides, decoded.
    doomed = scheduler.submit([*token_ids(40, seed=5), *token_ids(70, seed=6)], TOKENS)
    others = [scheduler.submit(token_ids(n, seed=n), TOKENS) for n in (20, 50)]

    for _ in range(steps):
        scheduler.step()
    doomed.abort()
    scheduler.run()

    assert doomed.done.is_set()
    assert len(doomed.answer) < TOKENS
    for request in others:
        assert request.answer == solo(models["qwen3_5"], request.prompt, grid)
    settled(cache)


def test_an_abort_while_the_disk_is_read_lets_go_when_it_has_answered(
    models: dict[str, nn.Module], opener: Callable[[Grid], Cache]
) -> None:
    cache = opener(GRIDS["qwen3_5"])
    scheduler = Scheduler(cache.bind(models["qwen3_5"]))
    served(scheduler, [token_ids(40)])
    cache.flush()
    gate = Gate("open", "sidecars/")
    files_of(cache.store).hook = gate
    doomed = scheduler.submit(token_ids(40), TOKENS)
    scheduler.step()
    gate.await_thread()

    client = threading.Thread(target=doomed.abort)
    client.start()
    client.join()
    is_busy = scheduler.step()

    core = core_of(cache.store)
    assert (is_busy, doomed.done.is_set(), doomed.endpoint) == (False, True, None)
    assert core.overlay.leased
    gate.open()
    wait_until(lambda: not core.overlay.leased, "the reader lets go")
    settled(cache)


def test_a_reset_while_a_stop_is_being_stored_waits_for_its_buffers(
    models: dict[str, nn.Module], opener: Callable[[Grid], Cache]
) -> None:
    cache = opener(GRIDS["qwen3_5"])
    scheduler = Scheduler(cache.bind(models["qwen3_5"]))
    gate = Gate("sync", "staging/")
    files_of(cache.store).hook = gate
    requests = [scheduler.submit(token_ids(n, seed=n), TOKENS) for n in (40, 90, 50)]
    scheduler.step()
    gate.await_thread()
    slow_disk = threading.Timer(0.2, gate.open)
    slow_disk.start()

    scheduler.reset()

    assert slow_disk.finished.is_set()
    assert core_of(cache.store).staging_bytes == 0
    assert all(request.done.is_set() for request in requests)
    assert not scheduler.step()
    settled(cache)
    slow_disk.join()


@pytest.mark.parametrize("call", [2, 5, 7])
def test_a_model_that_raises_costs_the_requests_under_way_and_no_more(
    call: int,
    models: dict[str, nn.Module],
    opener: Callable[[Grid], Cache],
) -> None:
    """In the second chunk of a prefill, and in decoding with one row and with two."""
    grid, model = GRIDS["llama"], models["llama"]
    cache = opener(grid)
    bound = cache.bind(model)
    scheduler = Scheduler(bound)
    calls = 0

    def raising(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("out of memory")
        return cast(Any, model)(*args, **options)

    bound.model = raising
    lost = [scheduler.submit(token_ids(n, seed=n), TOKENS) for n in (70, 20)]
    with pytest.raises(RuntimeError, match="out of memory"):
        scheduler.run()

    scheduler.reset()

    assert all(request.done.is_set() for request in lost)
    settled(cache)
    (again,) = served(scheduler, [lost[0].prompt])
    assert again.endpoint == 32 * min(call - 1, 2)
    assert again.answer == solo(model, again.prompt, grid)


def test_requests_come_from_other_threads_while_rows_decode(
    models: dict[str, nn.Module], opener: Callable[[Grid], Cache]
) -> None:
    grid = GRIDS["llama"]
    scheduler = Scheduler(opener(grid).bind(models["llama"]))
    requests: list[Request] = []

    def client(seed: int) -> None:
        request = scheduler.submit(token_ids(30 + seed, seed=seed), TOKENS)
        requests.append(request)
        request.done.wait(30)

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
    for each in clients:
        each.start()
    while any(each.is_alive() for each in clients):
        scheduler.step()
    for each in clients:
        each.join()

    assert len(requests) == 6
    for request in requests:
        assert request.answer == solo(models["llama"], request.prompt, grid)


def test_the_example_shows_what_its_docstring_says(capsys: pytest.CaptureFixture[str]) -> None:
    main()

    lines = capsys.readouterr().out.splitlines()
    at = lines.index("the same cache, opened again")
    first, again = lines[1:at], lines[at + 1 :]
    assert ["resumed at 512" in line for line in first] == [False, True, True, True, True]
    assert all("resumed at 512" in line for line in again)
    assert [line.split(":")[1] for line in first] == [line.split(":")[1] for line in again]
