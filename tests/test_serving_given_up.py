"""Requests that nobody will answer: what was read ahead for them is given up."""

# mlx-lm has no types of its own, and what is looked at is the server's own business.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

import contextlib
import threading
import urllib.error
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cache_maker import core_of, wait_until
from chat_models import write_chat_model
from inner_servers import InnerServer, serving_here
from mlx_lm.server import ResponseGenerator
from oracles import Oracle

SHORT = ("--disk-floor", "0", "--block-tokens", "16", "--checkpoint-tokens", "64")
TOKENS = 4
ABOUT_US = [{"role": "user", "content": "Tell me of us, and then of us again, and of others too."}]


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    for seed, name in enumerate(("lfm2", "other")):
        write_chat_model(tmp_path / name, "lfm2", seed=seed)
    return {name: tmp_path / name for name in ("lfm2", "other")}


class Gate:
    """While it is shut the generation thread takes no request."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_waiting = threading.Event()
        self._next_request: Any = ResponseGenerator._next_request

    def next_request(self, generator: Any, timeout: float | None = None) -> Any:
        if self._is_open.is_set():
            return self._next_request(generator, timeout)
        self._is_waiting.set()
        threading.Event().wait(0.01)
        return None

    def shut(self) -> None:
        self._is_open.clear()
        self._is_waiting.clear()
        # It may be in the middle of taking one.
        assert self._is_waiting.wait(60)

    def open(self) -> None:
        self._is_open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()

    def next_request(generator: Any, timeout: float | None = None) -> Any:
        return gate.next_request(generator, timeout)

    monkeypatch.setattr(ResponseGenerator, "_next_request", next_request)
    return gate


@contextlib.contextmanager
def warmed_up(models: dict[str, Path], tmp_path: Path) -> Generator[InnerServer]:
    """A server that has ``ABOUT_US`` on disk and not in memory."""
    options = ("--cache-dir", str(tmp_path / "cache"), *SHORT)
    with serving_here(models["lfm2"], *options) as server:
        server.chat(ABOUT_US, max_tokens=TOKENS)
        server.forget_memory()
        assert lease_count(server) == 0
        yield server


def lease_count(server: InnerServer) -> int:
    """Files and blocks that are kept for requests."""
    core = core_of(server.cache.store)
    with core.lock:
        return sum(core.overlay.leased.values()) + sum(core.overlay.held.values())


def status_of(server: InnerServer, **options: Any) -> int:
    try:
        server.chat(ABOUT_US, max_tokens=TOKENS, **options)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
    return 200


def await_queued(server: InnerServer, count: int) -> None:
    wait_until(lambda: server.response_generator.requests.qsize() == count, "they are queued")


def test_what_waits_when_the_server_stops_is_given_up(
    models: dict[str, Path], tmp_path: Path, gate: Gate
) -> None:
    with ThreadPoolExecutor(2) as clients, warmed_up(models, tmp_path) as server:
        gate.shut()
        asked = [clients.submit(status_of, server) for _ in range(2)]
        await_queued(server, 2)
        assert lease_count(server) > 0

        server.response_generator.stop_and_join()

        assert 200 not in [each.result(60) for each in asked]
        wait_until(lambda: lease_count(server) == 0, "nothing is leased")


def test_a_request_whose_model_cannot_be_loaded_any_more_is_given_up(
    models: dict[str, Path], tmp_path: Path, gate: Gate
) -> None:
    """It was read ahead while its model was there; the one before it in the queue replaced it."""
    gone = models["lfm2"]
    with ThreadPoolExecutor(2) as clients, warmed_up(models, tmp_path) as server:
        gate.shut()
        switching = clients.submit(status_of, server, model=str(models["other"]))
        await_queued(server, 1)
        asked = clients.submit(status_of, server)
        await_queued(server, 2)
        assert lease_count(server) > 0
        gone.rename(gone.with_name("gone"))

        gate.open()

        assert switching.result(60) == 200
        assert asked.result(60) not in (0, 200)
        wait_until(lambda: lease_count(server) == 0, "nothing is leased")
        again = server.chat(ABOUT_US, max_tokens=TOKENS, model=str(models["other"]))
    assert again.tokens == Oracle(models["other"]).tokens(ABOUT_US, TOKENS)


def test_a_client_that_goes_while_it_waits_keeps_nothing(
    models: dict[str, Path], tmp_path: Path, gate: Gate
) -> None:
    with ThreadPoolExecutor(1) as clients, warmed_up(models, tmp_path) as server:
        gate.shut()
        stream = server.stream({"messages": ABOUT_US, "max_tokens": 400})
        asked = clients.submit(lambda: next(stream, None))
        await_queued(server, 1)
        assert lease_count(server) > 0

        gate.open()
        asked.result(60)
        stream.close()

        wait_until(lambda: lease_count(server) == 0, "nothing is leased")
        answer = server.chat(ABOUT_US, max_tokens=TOKENS)
    assert answer.tokens == Oracle(models["lfm2"]).tokens(ABOUT_US, TOKENS)


def test_an_answer_that_fails_between_two_seams_keeps_nothing_once_another_is_asked(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm fails after it has tokenised, and never comes to the seam that takes the request."""

    def fail(*_: Any) -> Any:
        raise ValueError("no such stop word")

    with warmed_up(models, tmp_path) as server:
        # With a seed: in a batch mlx-lm's own thread would not survive it.
        assert status_of(server, seed=1) == 200
        server.forget_memory()
        with monkeypatch.context() as patch:
            patch.setattr(ResponseGenerator, "_make_state_machine", fail)
            assert status_of(server, seed=1) not in (0, 200)
        assert status_of(server, seed=1) == 200
        wait_until(lambda: lease_count(server) == 0, "nothing is leased")
