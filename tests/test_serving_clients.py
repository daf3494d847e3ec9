"""``walkback serve`` as clients see it that are not ours: OpenAI's for Python, and curl."""

import json
import signal
import subprocess
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_models import letters_only, write_chat_model
from openai import OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from servers import Server, serving

GRIDS = ("--disk-floor", "0", "--block-tokens", "64", "--checkpoint-tokens", "256")
COUNT = 8
# What mlx-lm's server calls the model that it was started with.
MODEL = "default_model"
# OpenAI's names are text.
LETTERS = {str(token): int(bias) for token, bias in letters_only().items()}
# Tokens behind the last turn's end: <|im_start|>assistant and a line break.
HEADER_TOKENS = 12

SYSTEM: ChatCompletionMessageParam = {
    "role": "system",
    "content": "You are a careful assistant. " * 11,
}


def asking(text: str) -> list[ChatCompletionMessageParam]:
    return [SYSTEM, {"role": "user", "content": text * 12}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "lfm2"
    write_chat_model(directory, "lfm2")
    return directory


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """Its tier in RAM is off, so that what a client sees as cached comes from disk."""
    directory = tmp_path_factory.mktemp("server")
    options = ("--cache-dir", str(directory / "cache"), "--hot-max", "0", *GRIDS)
    with serving(model, *options, log_path=directory / "log") as running:
        yield running


def client_of(server: Server) -> OpenAI:
    return OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=120
    )


def plain(client: OpenAI, messages: Sequence[ChatCompletionMessageParam]) -> ChatCompletion:
    return client.chat.completions.create(
        model=MODEL, messages=list(messages), max_tokens=COUNT, logit_bias=LETTERS
    )


def streamed(
    client: OpenAI, messages: Sequence[ChatCompletionMessageParam]
) -> list[ChatCompletionChunk]:
    with client.chat.completions.create(
        model=MODEL,
        messages=list(messages),
        max_tokens=COUNT,
        logit_bias=LETTERS,
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        return list(chunks)


def text_of(chunks: Sequence[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def cached(usage: CompletionUsage | None) -> tuple[int, int]:
    """The cached tokens of a prompt, and all of it."""
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens


def test_openai_s_client_is_told_what_was_cached_before_a_kill_and_after_it(
    model: Path, tmp_path: Path
) -> None:
    messages = asking("Tell me of rivers and of the sea. ")
    options = ("--cache-dir", str(tmp_path / "cache"), *GRIDS)

    with serving(model, *options, log_path=tmp_path / "1") as first, client_of(first) as client:
        cold = plain(client, messages)
        warm = streamed(client, messages)
        first.await_durable()
        first.stop(signal.SIGKILL)
    with serving(model, *options, log_path=tmp_path / "2") as second, client_of(second) as client:
        restarted = streamed(client, messages)
        answer = text_of(restarted)
        following = plain(
            client,
            [
                *messages,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "And of lakes, what of those?"},
            ],
        )

    zero, n = cached(cold.usage)
    assert zero == 0
    # From RAM all but the last token; from disk up to where the last turn ends.
    assert cached(warm[-1].usage) == (n - 1, n)
    assert cached(restarted[-1].usage) == (n - HEADER_TOKENS, n)
    assert cached(following.usage)[0] == n + COUNT
    assert cold.choices[0].message.content == text_of(warm) == answer
    assert len(answer) == COUNT


def test_only_the_last_event_of_a_stream_has_the_usage(server: Server) -> None:
    with client_of(server) as client:
        chunks = streamed(client, asking("What do you know of bread, and of salt? "))

    *others, last = chunks
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == []
    assert last.usage is not None and last.usage.completion_tokens == COUNT


def test_a_bare_completion_is_told_too(server: Server) -> None:
    prompt = "Once there was a river that did not know where it went. " * 8

    with client_of(server) as client:
        cold, warm = (
            client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=COUNT, logit_bias=LETTERS
            )
            for _ in range(2)
        )

    assert cached(cold.usage) == (0, len(prompt))
    # Four tokens before the end of a prompt whose last turn is open.
    assert cached(warm.usage) == (len(prompt) - 4, len(prompt))
    assert cold.choices[0].text == warm.choices[0].text


def curl(server: Server, path: str, *arguments: str, body: dict[str, Any] | None = None) -> str:
    posted = () if body is None else ("--data-binary", json.dumps(body))
    url = f"http://127.0.0.1:{server.port}{path}"
    done = subprocess.run(
        [
            "curl",
            "--silent",
            "--show-error",
            "--fail",
            "--max-time",
            "120",
            *arguments,
            *posted,
            url,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_curl_reads_what_was_cached_in_plain_and_streamed_answers(server: Server) -> None:
    body = {
        # Without the system prompt, which other tests have had stored.
        "messages": [{"role": "user", "content": "What do you know of the wind? " * 20}],
        "max_tokens": COUNT,
        "logit_bias": LETTERS,
    }
    in_a_stream = {**body, "stream": True, "stream_options": {"include_usage": True}}

    cold = json.loads(curl(server, "/v1/chat/completions", body=body))
    warm = json.loads(curl(server, "/v1/chat/completions", body=body))
    stream = curl(server, "/v1/chat/completions", "--no-buffer", body=in_a_stream)

    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data")]
    assert lines[-1] == "[DONE]"
    last = json.loads(lines[-2])
    n = cold["usage"]["prompt_tokens"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for usage in (warm["usage"], last["usage"]):
        assert usage["prompt_tokens"] == n
        assert usage["prompt_tokens_details"]["cached_tokens"] == n - HEADER_TOKENS


def test_curl_reads_the_figures(server: Server) -> None:
    stats = json.loads(curl(server, "/walkback/stats"))
    metrics = curl(server, "/metrics")

    assert stats["mode"] == "writing"
    assert "walkback_restores_total" in metrics
