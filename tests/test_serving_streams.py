"""Many streams at once on one server: cancelled, ending early, while the disk has no room for all.

The oracle is mlx-lm in this process, one prompt after the other, each prefilled from its start in
the chunks of the plan that is worked out here.
"""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false

import functools
import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from cache_maker import core_of, wait_until
from chat_models import letters_only, write_chat_model
from inner_servers import InnerServer, serving_here
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from servers import DEFAULTS

from walkback.integration.serving.quiet import QuietRecording
from walkback.journal.events import Evicted, Record
from walkback.store.audit import Audit
from walkback.store.findings import findings
from walkback.store.ordering import stage_claim

NAMES = ("qwen3_5", "nemotron_h")
SSD_MAX = {"qwen3_5": "1600K", "nemotron_h": "1200K"}
STREAMS = 8
TOKENS = 12
SETTLE_SECONDS_MAX = 60.0
STRIDE = 128
OPTIONS = ("--disk-floor", "0", "--block-tokens", "32", "--checkpoint-tokens", str(STRIDE))

Message = dict[str, Any]


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


SYSTEMS = [
    said("system", "You are a careful assistant. " * 7),
    said("system", "Be short, and kind to all who ask. " * 6),
]
# Turns that no model of this test has spoken: where one resumes has no part in its bits.
HISTORIES: list[list[Message]] = [
    [],
    [
        said("user", "Tell me of the rivers and of the sea. " * 2),
        said("assistant", "They are of water, and it runs low. " * 2),
    ],
]
# They part with their first letter: a prompt stops where others part from it only if that is far
# from every other stop.
QUESTIONS = [said("user", f"{letter} is what I ask you of. " * 3) for letter in "ab"]
CONVERSATIONS = [
    [system, *history, question]
    for system in SYSTEMS
    for history in HISTORIES
    for question in QUESTIONS
]


class Oracle:
    """mlx-lm alone: the greedy token ids that follow a conversation, and their logprobs."""

    def __init__(self, model: Path) -> None:
        load: Any = mlx_lm.load
        self._model, self.tokenizer = load(str(model))

    def token_ids(self, messages: Sequence[Message]) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True
            )
        )

    def stops(self, token_ids: Sequence[int]) -> list[int]:
        closing = self.tokenizer.eos_token_id
        ends = {at + 1 for at, each in enumerate(token_ids) if each == closing}
        stops = [0]
        for each in sorted({*range(STRIDE, len(token_ids), STRIDE), *ends}):
            if each - stops[-1] >= 64 and each < len(token_ids):
                stops.append(each)
        return stops[1:]

    def answer(self, messages: Sequence[Message]) -> tuple[str, tuple[float, ...]]:
        token_ids = self.token_ids(messages)
        cache, start = make_prompt_cache(self._model), 0
        with mx.stream(generation_stream):
            for stop in self.stops(token_ids):
                self._model(mx.array([token_ids[start:stop]]), cache=cache)
                mx.eval([leaf.state for leaf in cache])
                start = stop
        generate: Any = generate_step
        generated = list(
            generate(
                mx.array(token_ids[start:]),
                self._model,
                prompt_cache=cache,
                max_tokens=TOKENS,
                logits_processors=make_logits_processors(letters_only()),
            )
        )
        text = self.tokenizer.decode([int(token) for token, _ in generated])
        return text, tuple(logprobs[int(token)].item() for token, logprobs in generated)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in (*NAMES, "lfm2"):
        write_chat_model(root / name, name)
    return {name: root / name for name in (*NAMES, "lfm2")}


@dataclass(frozen=True, slots=True)
class Streaming:
    """One client's request. It goes away after ``events_max`` events, if that is not None."""

    conversation: int
    options: dict[str, Any]
    expected: str
    events_max: int | None = None


def stream(server: InnerServer, each: Streaming) -> str | None:
    """The text of a streamed answer; None if the client went away before its end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {
        **DEFAULTS,
        "messages": CONVERSATIONS[each.conversation],
        "stream": True,
        "max_tokens": TOKENS,
        **each.options,
    }
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    text, finish = "", None
    if each.events_max == 0:
        connection.close()
        return None
    with connection.getresponse() as reply:
        assert reply.status == 200
        count = 0
        for line in reply:
            content = line.decode().removeprefix("data: ").strip()
            if not line.startswith(b"data: ") or content == "[DONE]":
                continue
            (choice,) = json.loads(content)["choices"]
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
            count += 1
            if count == each.events_max:
                connection.close()
                return None
    connection.close()
    assert finish is not None, text
    return text


def streams(server: InnerServer, asked: list[Streaming]) -> list[str | None]:
    return [stream(server, each) for each in asked]


def requests(expected: list[str], *, seed: int) -> list[list[Streaming]]:
    """What each client asks for, one after the other."""
    chance = random.Random(seed)

    def request(place: int) -> Streaming:
        conversation = chance.randrange(len(CONVERSATIONS))
        answer = expected[conversation]
        match place % 5:
            case 0:
                return Streaming(conversation, {"max_tokens": 500}, "", chance.choice([0, 1, 4]))
            case 1:
                return Streaming(conversation, {"max_tokens": 3}, answer[:3])
            case 2:
                letter = answer[5]
                return Streaming(conversation, {"stop": [letter]}, answer.partition(letter)[0])
            case _:
                return Streaming(conversation, {}, answer)

    places = list(range(3 * STREAMS))
    chance.shuffle(places)
    return [[request(place) for place in places[client::STREAMS]] for client in range(STREAMS)]


def await_rest(server: InnerServer) -> None:
    """Wait until no request is served any more and nothing is leased or held for one."""
    server.cache.flush()
    core = core_of(server.cache.store)
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while True:
        with core.lock:
            kept = (+core.overlay.held, +core.overlay.leased, dict(core.overlay.in_flight))
        if not any(kept):
            assert not server.session.prefills._under_way
            return
        claims = {id(each.claim): each.claim for each in kept[2].values()}
        assert time.monotonic() < deadline, (kept[:2], claims.values())
        time.sleep(0.02)


def assert_only_what_is_named_stands(cache: Path) -> None:
    with Audit.open(cache) as audit:
        assert list(findings(audit)) == []
        assert audit.state is not None
        entries = [*audit.state.blocks.values(), *audit.state.sidecars.values()]
        named = {each.file.path for each in entries if each.file is not None}
    folders = ("blocks", "sidecars", "staging", "quarantine")
    standing = {
        path.relative_to(cache).as_posix()
        for folder in folders
        for path in (cache / folder).rglob("*")
        if path.is_file()
    }
    assert standing == named


def evictions_in(cache: Path) -> int:
    with Audit.open(cache) as audit:
        events = [each.event for each in audit.records() if isinstance(each, Record)]
    return sum(isinstance(each, Evicted) for each in events)


@pytest.mark.parametrize("name", NAMES)
def test_eight_streams_at_once_get_what_each_gets_alone_whoever_goes_away(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    oracle = Oracle(models[name])
    answers = [oracle.answer(each) for each in CONVERSATIONS]
    texts = [text for text, _ in answers]
    threads = set(threading.enumerate())

    with serving_here(
        models[name], "--cache-dir", str(cache), "--ssd-max", SSD_MAX[name], *OPTIONS
    ) as server:
        clients = requests(texts, seed=7)
        with ThreadPoolExecutor(STREAMS) as pool:
            streamed = list(pool.map(functools.partial(streams, server), clients))
        await_rest(server)
        # What memory and the disk keep of it is right too.
        kept = [server.chat(each, max_tokens=TOKENS) for each in CONVERSATIONS[::2]]
        server.forget_memory()
        stored = [server.chat(each, max_tokens=TOKENS) for each in CONVERSATIONS]
        await_rest(server)

    for asked, found in zip(clients, streamed, strict=True):
        for each, text in zip(asked, found, strict=True):
            assert text == (None if each.events_max is not None else each.expected)
    assert [(each.text, each.logprobs) for each in kept] == answers[::2]
    assert [(each.text, each.logprobs) for each in stored] == answers
    assert any(each.cached_tokens for each in stored)
    assert evictions_in(cache) > 0
    assert_only_what_is_named_stands(cache)
    assert set(threading.enumerate()) <= threads


# Prefixes on their way.


class Held:
    """A step that every thread waits in until it is let go."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self.reached = threading.Event()
        self._may_go = threading.Event()
        self._step = step

    def take(self, *arguments: Any) -> Any:
        self.reached.set()
        assert self._may_go.wait(SETTLE_SECONDS_MAX), "nobody let it go"
        return self._step(*arguments)

    def await_thread(self) -> None:
        assert self.reached.wait(SETTLE_SECONDS_MAX), "no thread came there"

    def let_go(self) -> None:
        self._may_go.set()


@pytest.fixture
def lfm2(models: dict[str, Path], tmp_path: Path) -> Generator[InnerServer]:
    with serving_here(models["lfm2"], "--cache-dir", str(tmp_path / "cache"), *OPTIONS) as server:
        yield server
        await_rest(server)


@pytest.fixture
def held_stops(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Prefill that comes no further than its first stop, and is waited for without end."""
    held = Held(QuietRecording.stop)

    def stop(*arguments: Any) -> Any:
        return held.take(*arguments)

    monkeypatch.setattr(QuietRecording, "stop", stop)
    monkeypatch.setattr("walkback.integration.serving.requests.WAIT_SECONDS_MAX", 1e6)
    return held


def test_what_the_writer_has_not_written_yet_is_resumed_from(
    lfm2: InnerServer, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(models["lfm2"])
    held = Held(stage_claim)
    monkeypatch.setattr("walkback.store.writer.stage_claim", held.take)
    first = lfm2.chat(CONVERSATIONS[0], max_tokens=TOKENS)
    held.await_thread()
    lfm2.response_generator.prompt_cache.trim_to(n_sequences=0)

    second = lfm2.chat(CONVERSATIONS[0], max_tokens=TOKENS)

    stored = lfm2.cache.statistics().boundaries_stored
    held.let_go()
    last_stop = oracle.stops(oracle.token_ids(CONVERSATIONS[0]))[-1]
    assert (stored, first.cached_tokens, second.cached_tokens) == (0, 0, last_stop)
    assert (second.text, second.logprobs) == oracle.answer(CONVERSATIONS[0])


def test_the_second_of_two_prompts_at_once_resumes_where_the_first_has_come(
    lfm2: InnerServer, models: dict[str, Path], held_stops: Held
) -> None:
    oracle = Oracle(models["lfm2"])
    with ThreadPoolExecutor(2) as clients:
        first = lfm2.stream({"messages": CONVERSATIONS[-1], "max_tokens": 1500})
        begun = clients.submit(next, first)
        held_stops.await_thread()
        second = clients.submit(lfm2.chat, CONVERSATIONS[-1], max_tokens=TOKENS)
        wait_until(lambda: lfm2.session.prefills.waiting_count == 1, "the second waits")
        held_stops.let_go()
        answer = second.result()
        is_first_over = not lfm2.session.prefills._under_way
        begun.result()
        first.close()

    last_stop = oracle.stops(oracle.token_ids(CONVERSATIONS[-1]))[-1]
    # It has waited for that stop, and not for the answer behind it.
    assert answer.cached_tokens >= last_stop
    assert not is_first_over
    assert (answer.text, answer.logprobs) == oracle.answer(CONVERSATIONS[-1])


def test_what_waits_goes_on_when_the_client_of_the_first_goes_away(
    lfm2: InnerServer, models: dict[str, Path], held_stops: Held
) -> None:
    with ThreadPoolExecutor(1) as clients:
        gone = Streaming(len(CONVERSATIONS) - 1, {"max_tokens": 500}, "", events_max=0)
        assert stream(lfm2, gone) is None
        held_stops.await_thread()
        second = clients.submit(lfm2.chat, CONVERSATIONS[-1], max_tokens=TOKENS)
        wait_until(lambda: lfm2.session.prefills.waiting_count == 1, "the second waits")
        held_stops.let_go()
        answer = second.result()

    assert (answer.text, answer.logprobs) == Oracle(models["lfm2"]).answer(CONVERSATIONS[-1])
    assert lfm2.session.prefills.waiting_count == 0
