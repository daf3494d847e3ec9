"""``walkback serve --kv-bits``: each request alone, resumed all the same, through kill and restart.

The oracle is mlx-lm in this process, which prefills each prompt from its start in the chunks of the
plan that is worked out here, and quantises for itself where the server is to.
"""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from chat_models import letters_only, write_chat_model
from mlx_lm.generate import generate_step, generation_stream, maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from servers import Answer, serving

from walkback.store.audit import Audit
from walkback.store.findings import findings

STRIDE = 128
# What is asked for is done at the next stop of the grid.
ASKED_START = 150
TURNING_POINT = 256
COUNT = 8
OPTIONS = (
    *("--disk-floor", "0", "--block-tokens", "64", "--checkpoint-tokens", str(STRIDE)),
    *("--kv-group-size", "32", "--quantized-kv-start", str(ASKED_START)),
)
PENALTY: Any = {"repetition_penalty": 1.8, "repetition_context_size": 1000}

Message = dict[str, Any]


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


SYSTEM = said("system", "You are a careful assistant. " * 7)
FIRST = [SYSTEM, said("user", "Tell me of rivers and of the sea. " * 4)]
EDITED = [SYSTEM, said("user", "Tell me of mountains and of snow. " * 4)]
# Its answer crosses the turning point.
SHORT = [said("user", "x" * 233)]


class Oracle:
    """mlx-lm alone: a prompt's token ids, its turn ends, and what follows it."""

    def __init__(self, model: Path, *, is_quantised: bool) -> None:
        """mlx-lm quantises no KV of a CacheList: such a model has no turning point."""
        self._turning_point = TURNING_POINT if is_quantised else None
        load: Any = mlx_lm.load
        self._model, self._tokenizer = load(str(model))

    def token_ids(self, messages: Sequence[Message]) -> list[int]:
        return list(
            self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True
            )
        )

    def turn_ends(self, messages: Sequence[Message]) -> list[int]:
        closing = self._tokenizer.eos_token_id
        return [at + 1 for at, each in enumerate(self.token_ids(messages)) if each == closing]

    def answer(
        self, messages: Sequence[Message], *, bits: int | None = 4, **penalties: Any
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        token_ids = self.token_ids(messages)
        ends = {*self.turn_ends(messages), *range(STRIDE, len(token_ids), STRIDE)}
        stops = [0]
        for each in sorted(ends):
            if each < len(token_ids) and (each - stops[-1] >= 64 or each == self._turning_point):
                stops.append(each)
        options: Any = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": TURNING_POINT}
        maybe_quantize: Any = maybe_quantize_kv_cache
        cache = make_prompt_cache(self._model)
        with mx.stream(generation_stream):
            for start, end in pairwise(chunk_ends(stops)):
                self._model(mx.array([token_ids[start:end]]), cache=cache)
                maybe_quantize(cache, **options)
                mx.eval([leaf.state for leaf in cache])
        processors = make_logits_processors(letters_only(), **penalties)
        prefix = token_ids[: stops[-1]]
        generate: Any = generate_step
        generated = list(
            generate(
                mx.array(token_ids[stops[-1] :]),
                self._model,
                prompt_cache=cache,
                max_tokens=COUNT,
                prefill_step_size=STRIDE,
                logits_processors=[seeing_all(prefix, each) for each in processors],
                **options,
            )
        )
        return (
            tuple(int(token) for token, _ in generated),
            tuple(logprobs[int(token)].item() for token, logprobs in generated),
        )


def chunk_ends(stops: Sequence[int]) -> list[int]:
    """No chunk is longer than the stride, and all count from a stop."""
    inner = {at for start, end in pairwise(stops) for at in range(start, end, STRIDE)}
    return sorted({*stops, *inner})


def seeing_all(prefix: list[int], processor: Any) -> Any:
    """As a run from the start, whose generator sees every token id."""

    def process(tokens: Any, logits: Any) -> Any:
        return processor(mx.array([*prefix, *tokens.tolist()]), logits)

    return process


def is_same(answer: Answer, expected: tuple[tuple[int, ...], tuple[float, ...]]) -> bool:
    return (answer.tokens, answer.logprobs) == expected


def following(messages: list[Message], answer: Answer, text: str) -> list[Message]:
    return [*messages, said("assistant", answer.text), said("user", text)]


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "llama"])
def test_requests_with_quantised_kv_resume_before_a_kill_and_after_it(
    name: str, tmp_path: Path
) -> None:
    write_chat_model(tmp_path / "model", name, changes={"head_dim": 32})
    is_quantised, cache = name != "falcon_h1", tmp_path / "cache"
    oracle = Oracle(tmp_path / "model", is_quantised=is_quantised)
    options = ("--cache-dir", str(cache), *OPTIONS)

    with serving(
        tmp_path / "model", *options, "--kv-bits", "4", log_path=tmp_path / "one.log"
    ) as server:
        cold, short = server.chat(FIRST), server.chat(SHORT)
        replay = server.chat(FIRST, **PENALTY)
        server.await_durable()
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    second = following(FIRST, cold, "And of the lakes, what of those? " * 2)
    after_short = following(SHORT, short, "And what of y? " * 3)
    with serving(
        tmp_path / "model", *options, "--kv-bits", "4", log_path=tmp_path / "two.log"
    ) as server:
        turn, edit = server.chat(second), server.chat(EDITED)
        penalised, turn_of_short = server.chat(FIRST, **PENALTY), server.chat(after_short)
        assert server.stop() == 0
        assert "Traceback" not in server.log

    n, (first_end, last_end) = cold.prompt_tokens, oracle.turn_ends(FIRST)
    assert STRIDE < first_end < TURNING_POINT < last_end < n
    assert short.prompt_tokens < TURNING_POINT < short.prompt_tokens + COUNT
    assert (cold.cached_tokens, short.cached_tokens) == (0, 0)
    # In RAM llama is cut wherever it is quantised throughout; a state cannot be cut.
    assert replay.cached_tokens == (n - 1 if name == "llama" else last_end)
    # From the disk: the ends of answers, that of the system prompt, that of the turn.
    assert turn.cached_tokens == n + COUNT
    assert turn_of_short.cached_tokens == short.prompt_tokens + COUNT
    assert edit.cached_tokens == first_end
    assert penalised.cached_tokens >= last_end
    for messages, answer in ((FIRST, cold), (EDITED, edit), (SHORT, short)):
        assert is_same(answer, oracle.answer(messages))
    assert is_same(replay, oracle.answer(FIRST, **PENALTY))
    assert is_same(penalised, oracle.answer(FIRST, **PENALTY))
    if is_quantised:
        assert not is_same(cold, oracle.answer(FIRST, bits=None))
        # The bits of falcon_h1 depend on its chunks, and an answer has other ones than a prompt.
        assert is_same(turn, oracle.answer(second))
        assert is_same(turn_of_short, oracle.answer(after_short))
    with Audit.open(cache) as audit:
        assert list(findings(audit)) == []
