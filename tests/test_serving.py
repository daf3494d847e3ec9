"""``walkback serve`` as its clients see it: over HTTP, on tiny models, through kill and restart.

The oracle is mlx-lm in this process, which prefills each prompt from its start in the chunks of the
plan that is worked out here.
"""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from chat_models import letters_only, write_chat_model
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from prometheus_client.parser import text_string_to_metric_families
from servers import OURS, ROOT, Answer, Server, serving

from walkback.journal.events import NotStored, Record
from walkback.store.audit import Audit
from walkback.store.findings import findings

NAMES = ("qwen3_5", "falcon_h1", "nemotron_h", "lfm2", "rwkv7", "llama")
# Which architectures another plan gives other bits, on a CPU; a decoded answer is another plan.
PLAN_BOUND = ("falcon_h1", "nemotron_h")
STRIDE = 256
COUNT = 8
OPTIONS = ("--disk-floor", "0", "--block-tokens", "64", "--checkpoint-tokens", str(STRIDE))

Message = dict[str, Any]


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


SYSTEM = said("system", "You are a careful assistant. " * 11)
FIRST = [SYSTEM, said("user", "Tell me of rivers and of the sea. " * 12)]
EDITED = [SYSTEM, said("user", "Tell me of mountains and of snow. " * 11)]
TOOLS = [
    SYSTEM,
    said("user", "What is the weather in the north? " * 3),
    said("assistant", "I shall look it up for you, one moment please, as I have to ask. " * 2),
    said("tool", "It snows, and the wind comes from the east. " * 4),
]


class Oracle:
    """mlx-lm alone: a prompt's token ids, its turn ends, and what follows it."""

    def __init__(self, model: Path) -> None:
        load: Any = mlx_lm.load
        self._model, self.tokenizer = load(str(model))

    def token_ids(self, messages: Sequence[Message]) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True
            )
        )

    def turn_ends(self, messages: Sequence[Message]) -> list[int]:
        closing = self.tokenizer.eos_token_id
        return [at + 1 for at, each in enumerate(self.token_ids(messages)) if each == closing]

    def answer(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Greedy token ids and their log probabilities, prefilled in the chunks of the plan."""
        token_ids = self.token_ids(messages)
        stops: list[int] = []
        for each in sorted({*range(STRIDE, len(token_ids), STRIDE), *self.turn_ends(messages)}):
            if each - (stops[-1] if stops else 0) >= 64 and each < len(token_ids):
                stops.append(each)
        cache, start = make_prompt_cache(self._model), 0
        with mx.stream(generation_stream):
            for stop in stops:
                self._model(mx.array([token_ids[start:stop]]), cache=cache)
                mx.eval([leaf.state for leaf in cache])
                start = stop
        generate: Any = generate_step
        generated = list(
            generate(
                mx.array(token_ids[start:]),
                self._model,
                prompt_cache=cache,
                max_tokens=COUNT,
                logits_processors=make_logits_processors(letters_only()),
            )
        )
        return (
            tuple(int(token) for token, _ in generated),
            tuple(logprobs[int(token)].item() for token, logprobs in generated),
        )


def is_same(answer: Answer, expected: tuple[tuple[int, ...], tuple[float, ...]]) -> bool:
    return (answer.tokens, answer.logprobs) == expected


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        write_chat_model(root / name, name)
    return {name: root / name for name in NAMES}


def following(messages: list[Message], answer: Answer, text: str) -> list[Message]:
    return [*messages, said("assistant", answer.text), said("user", text)]


def assert_clean(cache: Path) -> None:
    with Audit.open(cache) as audit:
        assert list(findings(audit)) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_shape_of_request_resumes_where_it_should_before_a_kill_and_after_it(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    oracle = Oracle(models[name])
    cache = tmp_path / "cache"
    options = ("--cache-dir", str(cache), *OPTIONS)
    first_ends, tool_ends = oracle.turn_ends(FIRST), oracle.turn_ends(TOOLS)

    with serving(models[name], *options, log_path=tmp_path / "one.log") as server:
        cold = server.chat(FIRST)
        replay = server.chat(FIRST)
        second = following(FIRST, cold, "And of the lakes, what of those? " * 4)
        following_turn = server.chat(second)
        edit = server.chat(EDITED)
        tools = server.chat(TOOLS)
        rewind = server.chat(FIRST)
        await_stored(server, cache)
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL

    n = cold.prompt_tokens
    assert n == len(oracle.token_ids(FIRST))
    assert (cold.cached_tokens, replay.cached_tokens) == (0, n - 1)
    # From RAM all but the last token, unless that has been dropped; from disk up to the turn's end.
    assert rewind.cached_tokens in (n - 1, first_ends[-1])
    # The answer's last token is in the cache: the next turn begins with all of it.
    assert following_turn.cached_tokens == n + COUNT
    # llama can be cut anywhere, and RAM does so.
    shared = common(oracle.token_ids(FIRST), oracle.token_ids(EDITED))
    assert edit.cached_tokens == (shared if name == "llama" else first_ends[0])
    assert tools.cached_tokens >= first_ends[0]
    expected = {id(each): oracle.answer(each) for each in (FIRST, EDITED, TOOLS)}
    for messages, answer in ((FIRST, cold), (FIRST, replay), (FIRST, rewind), (TOOLS, tools)):
        assert is_same(answer, expected[id(messages)])
    assert is_same(edit, expected[id(EDITED)])
    if name not in PLAN_BOUND:
        assert is_same(following_turn, oracle.answer(second))

    with serving(models[name], *options, log_path=tmp_path / "two.log") as server:
        third = following(second, following_turn, "Thank you, and what of wells? " * 3)
        from_answer = server.chat(third)
        after_tool = [*TOOLS, said("assistant", tools.text), said("user", "So shall I go? " * 6)]
        from_tool = server.chat(after_tool)
        again = [server.chat(each) for each in (FIRST, second, EDITED)]
        assert server.stop() == 0
        assert "Traceback" not in server.log

    assert from_answer.cached_tokens == following_turn.prompt_tokens + COUNT
    assert from_tool.cached_tokens == tools.prompt_tokens + COUNT
    assert tool_ends[-1] < tools.prompt_tokens
    ends = [oracle.turn_ends(each)[-1] for each in (FIRST, second, EDITED)]
    assert all(answer.cached_tokens >= end for answer, end in zip(again, ends, strict=True))
    before = (cold, following_turn, edit)
    for answer, other in zip(again, before, strict=True):
        assert (answer.tokens, answer.logprobs) == (other.tokens, other.logprobs)
    if name not in PLAN_BOUND:
        assert is_same(from_answer, oracle.answer(third))
        assert is_same(from_tool, oracle.answer(after_tool))
    assert_clean(cache)


def common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next(at for at, (one, other) in enumerate(pairs) if one != other)


def await_stored(server: Server, cache: Path) -> None:
    """Wait until nothing is staged: what was captured is then durable."""
    staging = cache / "staging"
    quiet = 0
    for _ in range(500):
        quiet = quiet + 1 if not any(staging.iterdir()) else 0
        if quiet > 10:
            return
        threading.Event().wait(0.02)
    raise AssertionError(server.log)


# What else a client or an operator may do. One server on the quickest hybrid serves them all.


@pytest.fixture(scope="module")
def lfm2(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    root = tmp_path_factory.mktemp("lfm2")
    options = ("--cache-dir", str(root / "cache"), *OPTIONS)
    with serving(models["lfm2"], *options, log_path=root / "log") as server:
        yield server
        assert server.stop() == 0
        # mlx-lm's own handler shows a client that went away.
        assert "integration/serving" not in server.log
    assert_clean(root / "cache")


def test_a_prompt_that_is_held_entirely_is_served(lfm2: Server) -> None:
    """Its exact repetition ends the generation thread of mlx-lm's own server."""
    prompt = "Once upon a time there was a river. " * 6
    first = lfm2.complete(prompt)

    second = lfm2.complete(prompt + first.text)
    third = lfm2.complete(prompt + first.text)

    assert first.cached_tokens == 0
    # A state cannot go back by one token: what serves is the prompt without its last.
    assert second.prompt_tokens == first.prompt_tokens + COUNT
    assert second.cached_tokens == first.prompt_tokens - 1
    assert second.tokens == third.tokens
    assert lfm2.get("/health") == '{"status": "ok"}'


def test_requests_at_once_get_what_each_gets_alone(lfm2: Server, models: dict[str, Path]) -> None:
    oracle = Oracle(models["lfm2"])
    conversations = [
        [SYSTEM, said("user", f"Tell me of the number {each}. " * (5 * each + 1))]
        for each in range(6)
    ]

    with ThreadPoolExecutor(6) as clients:
        cold = list(clients.map(lfm2.chat, conversations))
        warm = list(clients.map(lfm2.chat, conversations))

    for messages, answer, again in zip(conversations, cold, warm, strict=True):
        assert is_same(answer, oracle.answer(messages))
        assert is_same(again, oracle.answer(messages))
        # Memory has not room for all of them; the disk has at least the end of the system prompt.
        assert again.cached_tokens >= oracle.turn_ends(messages)[0]


@pytest.mark.parametrize("name", ["nemotron_h", "rwkv7"])
def test_prompts_of_unlike_length_at_once_do_not_spoil_each_other(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """mlx-lm's own server pads them together, and the padding reaches their state."""
    oracle = Oracle(models[name])
    conversations = [
        [said("user", f"Tell me of the number {each}. " * (9 * each + 4))] for each in range(4)
    ]
    options = ("--cache-dir", str(tmp_path / "cache"), *OPTIONS)

    with serving(models[name], *options, log_path=tmp_path / "log") as server:
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(server.chat, conversations))
        assert server.stop() == 0

    assert all(map(is_same, answers, map(oracle.answer, conversations)))
    assert "one at a time" in server.log


def test_what_is_padded_all_the_same_is_not_stored(models: dict[str, Path], tmp_path: Path) -> None:
    options = ("--cache-dir", str(tmp_path / "cache"), "--unsafe-batching", *OPTIONS)

    with serving(models["rwkv7"], *options, log_path=tmp_path / "log") as server:
        server.chat(FIRST)
        server.chat(FIRST, seed=1)
        assert server.stop() == 0

    with Audit.open(tmp_path / "cache") as audit:
        assert audit.state is not None and not audit.state.blocks
        events = [each.event for each in audit.records() if isinstance(each, Record)]
    assert [each.reason for each in events if isinstance(each, NotStored)] == ["padded"]


def test_a_streamed_answer_tells_what_was_cached(lfm2: Server) -> None:
    lfm2.chat(EDITED)

    usages = [
        event["usage"]
        for event in lfm2.stream({"messages": EDITED, "stream_options": {"include_usage": True}})
        if "usage" in event
    ]

    (usage,) = usages
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_a_request_that_makes_no_sense_costs_nobody_else_anything(lfm2: Server) -> None:
    with pytest.raises(urllib.error.HTTPError):
        lfm2.post("/v1/chat/completions", {"messages": []})
    for prompt in ("", ["two", "prompts"]):
        # These end the generation thread of mlx-lm's own server.
        with pytest.raises(urllib.error.HTTPError):
            lfm2.post("/v1/completions", {"prompt": prompt})

    assert lfm2.chat(FIRST).prompt_tokens > 0


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "llama"])
def test_a_seeded_request_resumes_too_and_gives_the_bits_of_the_plan(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """mlx-lm serves it outside of the batch, and never resumes it for a hybrid."""
    oracle = Oracle(models[name])
    options = ("--cache-dir", str(tmp_path / "cache"), *OPTIONS)
    with serving(models[name], *options, log_path=tmp_path / "one.log") as server:
        cold = server.chat(FIRST, seed=3)
        await_stored(server, tmp_path / "cache")
        server.stop(signal.SIGKILL)
    second = following(FIRST, cold, "And of the lakes, what of those? " * 4)
    with serving(models[name], *options, log_path=tmp_path / "two.log") as server:
        turn = server.chat(second, seed=3)
        warm, edit = server.chat(FIRST, seed=3), server.chat(EDITED, seed=3)
        batched = server.chat(FIRST)
        assert server.stop() == 0
        assert "integration/" not in server.log

    ends = oracle.turn_ends(FIRST)
    assert cold.cached_tokens == 0
    assert turn.cached_tokens == cold.prompt_tokens + COUNT
    assert warm.cached_tokens >= ends[-1]
    assert edit.cached_tokens >= ends[0]
    for messages, answer in ((FIRST, cold), (FIRST, warm), (FIRST, batched), (EDITED, edit)):
        assert is_same(answer, oracle.answer(messages))
    if name not in PLAN_BOUND:
        assert is_same(turn, oracle.answer(second))


def test_penalties_see_what_was_restored(lfm2: Server) -> None:
    """Elsewhere they saw the token ids behind the endpoint only, and a warm answer was another."""
    options = {"repetition_penalty": 1.8, "repetition_context_size": 400}
    messages = [SYSTEM, said("user", "Say letters, as many as there are. " * 7)]

    seeded = [lfm2.chat(messages, seed=1, **options) for _ in range(2)]
    batched = [lfm2.chat(messages, **options) for _ in range(2)]

    assert seeded[1].cached_tokens > 0
    assert len({each.tokens for each in (*seeded, *batched)}) == 1


def test_a_client_that_goes_away_leaves_the_server_well(lfm2: Server) -> None:
    events = lfm2.stream({"messages": TOOLS, "max_tokens": 400})
    next(iter(events))
    events.close()

    assert lfm2.chat(FIRST).prompt_tokens > 0


def test_a_second_server_on_the_same_cache_serves_uncached_and_says_so(
    lfm2: Server, models: dict[str, Path], tmp_path: Path
) -> None:
    cache = lfm2.log_path.parent / "cache"

    with serving(
        models["lfm2"], "--cache-dir", str(cache), *OPTIONS, log_path=tmp_path / "log"
    ) as second:
        cold, warm = second.chat(FIRST), second.chat(FIRST)
        assert second.stop() == 0

    assert (cold.cached_tokens, warm.cached_tokens) == (0, warm.prompt_tokens - 1)
    assert "serving uncached" in second.log
    assert lfm2.chat(FIRST).prompt_tokens > 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_closes_the_cache_in_order(
    how: signal.Signals, models: dict[str, Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    options = ("--cache-dir", str(cache), *OPTIONS)
    with serving(models["lfm2"], *options, log_path=tmp_path / "log") as server:
        server.chat(FIRST)
        # What was captured last is still on its way.
        assert server.stop(how) == 0

    assert_clean(cache)
    with Audit.open(cache) as audit:
        assert audit.state is not None and not audit.state.unswept
    with serving(models["lfm2"], *options, log_path=tmp_path / "log") as server:
        assert server.chat(FIRST).cached_tokens > 0


def test_a_server_that_is_off_makes_no_cache(models: dict[str, Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    with serving(
        models["lfm2"], "--off", "--cache-dir", str(cache), log_path=tmp_path / "log"
    ) as server:
        answers = [server.chat(FIRST) for _ in range(2)]
        assert server.stop() == 0

    assert [each.cached_tokens for each in answers] == [0, answers[0].prompt_tokens - 1]
    assert not cache.exists()


def test_a_server_that_only_reads_stores_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    options = ("--cache-dir", str(tmp_path / "cache"), *OPTIONS)
    with serving(models["lfm2"], *options, log_path=tmp_path / "one.log") as server:
        server.chat(FIRST)
        server.stop()
    before = sorted((tmp_path / "cache" / "blocks").rglob("*/*"))

    with serving(models["lfm2"], *options, "--read-only", log_path=tmp_path / "log") as server:
        known, new = server.chat(FIRST), server.chat(EDITED)
        server.stop()

    assert known.cached_tokens > 0
    assert new.cached_tokens > 0
    assert sorted((tmp_path / "cache" / "blocks").rglob("*/*")) == before


def test_a_cache_that_goes_away_under_the_server_costs_no_answer(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Memory is small here, so that each request looks on the disk."""
    cache = tmp_path / "cache"
    options = ("--cache-dir", str(cache), "--hot-max", "0", *OPTIONS)
    with serving(models["lfm2"], *options, log_path=tmp_path / "log") as server:
        first = server.chat(FIRST)
        cache.rename(tmp_path / "elsewhere")
        again, other = server.chat(FIRST), server.chat(EDITED)
        server.stop()

    assert again.tokens == first.tokens
    assert other.prompt_tokens > 0


def test_figures_stand_on_the_same_port(lfm2: Server) -> None:
    lfm2.chat(FIRST)

    stats = json.loads(lfm2.get("/walkback/stats"))
    families = {
        family.name: family for family in text_string_to_metric_families(lfm2.get("/metrics"))
    }

    assert stats["mode"] == "writing"
    assert stats["holdings"]["sidecar_count"] > 0
    assert stats["memory"]["sequences"] > 0
    stored = families["walkback_boundaries_stored"].samples[0]
    assert stored.value == stats["boundaries_stored"] > 0


def test_help_tells_of_both_kinds_of_flags() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OURS, "serve", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )

    for flag in (
        "--cache-dir",
        "--ssd-max",
        "--unsafe-batching",
        "--model",
        "--decode-concurrency",
    ):
        assert flag in done.stdout


def test_a_port_that_is_in_use_is_named_before_anything_is_made(tmp_path: Path) -> None:
    """mlx-lm's own server prints where it failed, and its generation thread keeps it alive."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        cache = tmp_path / "cache"
        options = ("--model", "org/model", "--port", str(port), "--cache-dir", str(cache))
        done = subprocess.run(
            [sys.executable, "-c", OURS, "serve", *options],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert (done.returncode, cache.exists()) == (2, False)
    assert f"cannot listen on 127.0.0.1, port {port}" in done.stderr
