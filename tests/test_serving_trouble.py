"""``walkback serve`` in trouble: whatever fails in the cache, every request has its answer."""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

import contextlib
import threading
import urllib.error
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_maker import core_of
from chat_models import write_chat_model
from inner_servers import InnerServer, serving_here
from oracles import Oracle
from servers import Answer, serving

from walkback.integration.cache import Cache, open_cache
from walkback.integration.serving.options import ServeOptions
from walkback.integration.serving.session import MutableSession
from walkback.journal.events import NotStored, Record
from walkback.restore import reading
from walkback.restore.reader import read_payload
from walkback.store.audit import Audit
from walkback.store.findings import findings

# Short prompts, so that many requests take little time. These architectures have the same tokens
# whatever the chunks; where they have not, the stride is one of theirs.
OPTIONS = ("--disk-floor", "0", "--ssd-max", "64M", "--block-tokens", "16")
SHORT = (*OPTIONS, "--checkpoint-tokens", "64")
TOKENS = 4
NAMES = ("lfm2", "llama", "qwen3_5", "nemotron_h")

WAIT_SECONDS = 60.0

Message = dict[str, Any]


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


SYSTEM = said("system", "You are a careful assistant, and kind to all who ask. " * 2)


def asking(about: str) -> list[Message]:
    return [SYSTEM, said("user", f"Tell me of {about}, and then again of {about}.")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        write_chat_model(root / name, name)
    write_chat_model(root / "other lfm2", "lfm2", seed=1)
    return {name: root / name for name in (*NAMES, "other lfm2")}


def assert_clean(cache: Path) -> None:
    with Audit.open(cache) as audit:
        assert list(findings(audit)) == []


# A fault in every call.


class Fault:
    """Counts the calls of a method, and raises in one of those that follow."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.calls = 0
        self.raised = 0
        self._at: int | None = None
        self._method = method

    def arm(self, at: int | None) -> None:
        """Raise in the ``at``-th call from now on, counted from 0; in none for None."""
        self.calls, self._at = 0, at

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        call, self.calls = self.calls, self.calls + 1
        if call == self._at:
            self.raised += 1
            raise RuntimeError("injected")
        return self._method(*arguments, **options)


@contextlib.contextmanager
def faults_in(calls: Sequence[tuple[type, str]]) -> Generator[dict[tuple[type, str], Fault]]:
    with pytest.MonkeyPatch.context() as patch:
        faults = {call: Fault(getattr(*call)) for call in calls}
        for (owner, name), fault in faults.items():
            patch.setattr(owner, name, _method_of(fault))
        yield faults


def _method_of(fault: Fault) -> Callable[..., Any]:
    # A function, so that it is bound to its object.
    return lambda *arguments, **options: fault(*arguments, **options)


def ask(server: InnerServer, kind: str, messages: list[Message]) -> Answer:
    """A request that is answered from nothing, from memory, or from disk, or one with a seed."""
    if kind in ("disk", "seeded"):
        server.forget_memory()
    options = {"seed": 3} if kind == "seeded" else {}
    return server.chat(messages, max_tokens=TOKENS, **options)


KINDS = ("cold", "memory", "disk", "seeded")


def test_a_model_that_cannot_be_bound_is_served_all_the_same(
    models: dict[str, Path], tmp_path: Path
) -> None:
    oracle = Oracle(models["lfm2"])
    with faults_in([(Cache, "bind")]) as faults:
        faults[Cache, "bind"].arm(0)
        with serving_here(models["lfm2"], "--cache-dir", str(tmp_path / "cache"), *SHORT) as server:
            answers = [ask(server, kind, asking("us")) for kind in KINDS]

    assert faults[Cache, "bind"].raised == 1
    assert [each.tokens for each in answers] == [oracle.tokens(asking("us"), TOKENS)] * len(KINDS)


def test_figures_that_cannot_be_had_are_no_other_requests_business(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with (
        serving_here(models["lfm2"], "--cache-dir", str(tmp_path / "cache"), *SHORT) as server,
        faults_in([(Cache, "statistics")]) as faults,
    ):
        faults[Cache, "statistics"].arm(0)
        with pytest.raises(urllib.error.HTTPError, match="500"):
            server.get("/metrics")
        answer = server.chat(asking("us"), max_tokens=TOKENS)

    assert len(answer.tokens) == TOKENS


# A large restore beside a stream.


def test_a_stream_goes_on_while_the_prefix_of_another_request_is_read(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read on the generation thread, a large prefix would stop every stream until it is there."""
    is_reading, may_read = threading.Event(), threading.Event()

    def read_slowly(*arguments: Any, **options: Any) -> Any:
        is_reading.set()
        assert may_read.wait(WAIT_SECONDS)
        return read_payload(*arguments, **options)

    with serving_here(models["lfm2"], "--cache-dir", str(tmp_path / "cache"), *SHORT) as server:
        cold = server.chat(asking("the large"), max_tokens=TOKENS)
        server.forget_memory()
        monkeypatch.setattr(reading, "read_payload", read_slowly)
        stream = server.stream({"messages": asking("the small"), "max_tokens": 400})
        next(stream)
        with ThreadPoolExecutor(1) as clients:
            restoring = clients.submit(server.chat, asking("the large"), max_tokens=TOKENS)
            assert is_reading.wait(WAIT_SECONDS)
            for _ in range(50):
                next(stream)
            was_done = restoring.done() or may_read.is_set()
            may_read.set()
            warm = restoring.result(WAIT_SECONDS)
        stream.close()

    assert not was_done
    assert warm.cached_tokens > 0
    assert warm.tokens == cold.tokens


# Models that are not stored, and models that change.


def refusals_in(cache: Path) -> list[str]:
    with Audit.open(cache) as audit:
        events = [each.event for each in audit.records() if isinstance(each, Record)]
    return [str(each.reason) for each in events if isinstance(each, NotStored)]


def test_with_a_draft_model_nothing_is_stored_and_that_is_said_once(
    models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, llama = tmp_path / "cache", models["llama"]
    oracle = Oracle(llama)
    arguments = ("--draft-model", str(llama), "--cache-dir", str(cache), *SHORT)

    with serving_here(llama, *arguments) as server:
        answer = server.chat(asking("us"), max_tokens=TOKENS)
        held = server.cache.statistics().holdings.block_count

    assert answer.tokens == oracle.tokens(asking("us"), TOKENS)
    assert held == 0
    assert caplog.text.count("nothing is stored: a draft model") == 1
    assert refusals_in(cache) == ["draft_model"]


def test_with_a_draft_model_answers_are_those_of_mlx_lms_own_server(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The second of two equal requests has another answer there: mlx-lm 0.32.2 keeps a cache that
    lacks the last token of its key, and cuts it back by one too many.
    """
    arguments = ("--draft-model", str(models["llama"]))
    ours = ("--cache-dir", str(tmp_path / "cache"), *SHORT)

    with serving(
        models["llama"], *arguments, log_path=tmp_path / "stock.log", is_stock=True
    ) as stock:
        expected = [stock.chat(asking("us"), max_tokens=TOKENS) for _ in range(3)]
    with serving(models["llama"], *arguments, *ours, log_path=tmp_path / "ours.log") as server:
        answers = [server.chat(asking("us"), max_tokens=TOKENS) for _ in range(3)]

    assert answers == expected


def test_what_is_spread_over_machines_is_not_stored_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The provider is made up: there is one machine here."""
    provider = SimpleNamespace(draft_model=None, is_distributed=True, model_key=("m", None, None))
    cache = open_cache(tmp_path / "cache", free_floor_bytes=0)
    session = MutableSession(cache, ServeOptions(cache_dir=tmp_path / "cache"))

    session.bind(provider)
    session.bind(provider)
    session.close()

    assert session.bound_to is None
    assert caplog.text.count("nothing is stored: ranks") == 1
    assert refusals_in(tmp_path / "cache") == ["distributed"]


def test_another_model_never_resumes_from_what_the_first_has_stored(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """The two differ in their weights only: the same prompt has the same token ids in both."""
    paths = [models["lfm2"], models["other lfm2"]]
    expected = [Oracle(path).tokens(asking("us"), TOKENS) for path in paths]
    assert expected[0] != expected[1]

    with serving_here(paths[0], "--cache-dir", str(tmp_path / "cache"), *SHORT) as server:
        answers: list[Answer] = []
        for path in (*paths, *paths):
            answers.append(server.chat(asking("us"), max_tokens=TOKENS, model=str(path)))
            server.forget_memory()
        namespaces = server.cache.statistics().holdings.namespace_count

    assert [each.tokens for each in answers] == expected * 2
    assert [each.cached_tokens > 0 for each in answers] == [False, False, True, True]
    assert namespaces == 2
    assert_clean(tmp_path / "cache")


def test_each_model_has_its_own_prefixes_back_in_memory_after_a_switch(
    models: dict[str, Path], tmp_path: Path
) -> None:
    paths = [models["lfm2"], models["other lfm2"]]
    expected = [Oracle(path).tokens(asking("us"), TOKENS) for path in paths]

    with serving_here(paths[0], "--cache-dir", str(tmp_path / "cache"), *SHORT) as server:

        def ask_of(path: Path) -> Answer:
            return server.chat(asking("us"), max_tokens=TOKENS, model=str(path))

        answers = [ask_of(path) for path in (*paths, *paths)]
        # The other model is asked for while the first still answers, and the other way round.
        with ThreadPoolExecutor(4) as clients:
            at_once = list(clients.map(ask_of, (*paths, *paths)))
        server.cache.flush()
        with core_of(server.cache.store).lock:
            overlay = core_of(server.cache.store).overlay
            kept = (+overlay.held, +overlay.leased, dict(overlay.in_flight))

    assert [each.tokens for each in (*answers, *at_once)] == expected * 4
    cached = [each.prompt_tokens - each.cached_tokens for each in (*answers[2:], *at_once)]
    assert [each.cached_tokens for each in answers[:2]] == [0, 0]
    assert cached == [1] * 6
    assert not any(kept)
