"""Prompts of a model whose KV mlx-lm quantises, resumed on either side of where it begins to.

The oracle is mlx-lm: it prefills each prompt from its start, in the chunks of the plan that is
worked out here, and quantises for itself.
"""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from zoo import CONFIGS, DTYPES, token_ids

import walkback
import walkback.integration.forms as forms_module
import walkback.integration.restoration as restoration_module
from walkback.integration.forms import KVQuantisation
from walkback.integration.generation import prepare_generation
from walkback.integration.serving.options import ServeOptions
from walkback.integration.serving.session import BoundTo, MutableSession
from walkback.integration.serving.tiers import TieredPromptCache
from walkback.integration.tiny import build_tiny_model
from walkback.journal.errors import SettingsError

STRIDE = 96
BLOCK_TOKENS = 32
# mlx-lm is asked to quantise from here on, and does it at the next stop of the grid.
ASKED_START = 150
TURNING_POINT = 192
QUANTISED: Any = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": ASKED_START}
COUNT = 4
PROMPT = token_ids(320)
NAMES = ("llama", "qwen3_5", "falcon_h1")
# Two layers of attention: what the first one gives, the keys of the second are made of.
_QWEN3_5 = {
    **CONFIGS["qwen3_5"]["text_config"],
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
}
# Groups have at least 32 numbers.
_CONFIGS = {
    **CONFIGS,
    "llama": {**CONFIGS["llama"], "head_dim": 32},
    "qwen3_5": {**CONFIGS["qwen3_5"], "text_config": _QWEN3_5},
}

_generate_step: Any = generate_step
_maybe_quantize: Any = maybe_quantize_kv_cache

# Token ids, and the bits of the log probabilities of the whole vocabulary at each.
Answer = tuple[tuple[int, ...], tuple[bytes, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    answer: Answer
    endpoint: int
    mixed_plan: bool


@functools.cache
def built(name: str) -> Any:
    return build_tiny_model(_CONFIGS[name], dtype=DTYPES[name])


def edited(at: int) -> list[int]:
    """PROMPT with other token ids from a position on."""
    return [*PROMPT[:at], *token_ids(len(PROMPT) - at, seed=at)]


def cold(name: str, prompt: Sequence[int], **options: Any) -> Answer:
    """What mlx-lm alone answers."""
    return _cold(name, tuple(prompt), **options)


@functools.cache
def _cold(
    name: str,
    prompt: tuple[int, ...],
    *,
    stops: Sequence[int] = (STRIDE, 2 * STRIDE, 3 * STRIDE),
    bits: int | None = 4,
    start: int = TURNING_POINT,
) -> Answer:
    """``stops`` are the ends of chunks."""
    model, done = built(name), 0
    cache = make_prompt_cache(model)
    options = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}
    for stop in stops:
        if stop < len(prompt):
            model(mx.array([prompt[done:stop]]), cache=cache)
            _maybe_quantize(cache, **options)
            mx.eval([leaf.state for leaf in cache])
            done = stop
    rest = mx.array(prompt[done:])
    return answer_of(_generate_step(rest, model, prompt_cache=cache, max_tokens=COUNT, **options))


def answer_of(generated: Iterable[tuple[Any, mx.array]]) -> Answer:
    pairs = [(int(token), bits_of(logprobs)) for token, logprobs in generated]
    return tuple(token for token, _ in pairs), tuple(bits for _, bits in pairs)


def bits_of(logprobs: Any) -> bytes:
    array: Any = mx.contiguous(logprobs)
    return bytes(memoryview(array).cast("B"))


def opened(root: Path) -> walkback.Cache:
    return walkback.open_cache(
        root / "cache", block_tokens=BLOCK_TOKENS, checkpoint_tokens=STRIDE, free_floor_bytes=0
    )


def run(bound: walkback.BoundModel, prompt: list[int], **options: Any) -> Ran:
    restorations: list[walkback.Restoration] = []
    answer = answer_of(
        bound.generate_step(prompt, max_tokens=COUNT, on_restore=restorations.append, **options)
    )
    (restoration,) = restorations
    restoration.recording.wait()
    return Ran(
        answer=answer,
        endpoint=restoration.endpoint,
        mixed_plan=restoration.mixed_plan,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_resumes_on_either_side_of_where_its_kv_is_quantised(
    name: str, tmp_path: Path
) -> None:
    is_cut_anywhere = name == "llama"
    late, early = edited(250), edited(150)
    with opened(tmp_path) as cache:
        stored = run(cache.bind(built(name), **QUANTISED), PROMPT)
        assert cache.violations() == []

    with opened(tmp_path) as cache:
        bound = cache.bind(built(name), **QUANTISED)
        prompts = (PROMPT, late, early, PROMPT[:TURNING_POINT])
        depths = [bound.lookup(each) for each in prompts]
        ran = [run(bound, each) for each in prompts]

    assert stored.endpoint == 0
    assert stored.answer == cold(name, PROMPT)
    # What is stored before the turning point ends at the last stop there, unless nothing of this
    # model is ever quantised: so llama cannot be cut behind that either.
    assert [each.endpoint for each in ran] == [
        3 * STRIDE,
        224 if is_cut_anywhere else TURNING_POINT,
        STRIDE,
        STRIDE,
    ]
    assert depths == [each.endpoint for each in ran]
    assert not any(each.mixed_plan for each in ran)
    assert [each.answer for each in ran] == [cold(name, each) for each in prompts]


def test_the_oracle_quantises_as_mlx_lm_does_by_itself() -> None:
    options = {**QUANTISED, "quantized_kv_start": TURNING_POINT}
    generated = _generate_step(
        mx.array(PROMPT), built("llama"), max_tokens=COUNT, prefill_step_size=STRIDE, **options
    )

    assert answer_of(generated) == cold("llama", PROMPT)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_the_bits_of_a_quantised_run_are_not_those_of_another(name: str) -> None:
    """Without such witnesses the comparisons could not fail for the sake of the quantisation."""
    expected = cold(name, PROMPT)

    assert cold(name, PROMPT, bits=None) != expected
    assert cold(name, PROMPT, bits=8) != expected
    assert cold(name, PROMPT, start=STRIDE) != expected
    # Where chunks end elsewhere matters only if none ends at the turning point.
    assert cold(name, PROMPT, stops=(60, TURNING_POINT, 230)) == expected
    assert cold(name, PROMPT, stops=(STRIDE, 240)) != expected


def test_mlx_lm_leaves_the_kv_of_a_cache_list_as_it_is(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        bound = cache.bind(built("falcon_h1"), **QUANTISED)
        ordinary = cache.bind(built("falcon_h1"))
        run(bound, PROMPT)
        restored = run(ordinary, PROMPT)

    assert bound.turning_point is None
    assert restored.endpoint == 3 * STRIDE
    assert restored.answer == cold("falcon_h1", PROMPT, bits=None)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_runs_that_quantise_otherwise_share_what_stands_before_the_turning_point(
    name: str, tmp_path: Path
) -> None:
    model, is_cut_anywhere = built(name), name == "llama"
    of_8_bits, later = {**QUANTISED, "kv_bits": 8}, {**QUANTISED, "quantized_kv_start": 200}
    bindings: list[Any] = [{}, QUANTISED, of_8_bits, later, {}]
    with opened(tmp_path) as cache:
        ran = [run(cache.bind(model, **each), PROMPT) for each in bindings]

    before, before_later = (160, 256) if is_cut_anywhere else (STRIDE, TURNING_POINT)
    assert [each.endpoint for each in ran] == [0, before, before, before_later, 3 * STRIDE]
    assert [each.answer for each in ran] == [
        cold(name, PROMPT, bits=None),
        cold(name, PROMPT),
        cold(name, PROMPT, bits=8),
        cold(name, PROMPT, start=3 * STRIDE),
        cold(name, PROMPT, bits=None),
    ]


TURN_ENDS = [170, 262]
STOPS_WITH_TURNS = (STRIDE, 170, TURNING_POINT, 262)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_turn_that_ends_close_to_the_turning_point_does_not_move_it(
    name: str, tmp_path: Path
) -> None:
    prompts = (PROMPT, edited(270), edited(175))
    with opened(tmp_path) as cache:
        bound = cache.bind(built(name), **QUANTISED)
        ran = [run(bound, each, turn_ends=TURN_ENDS) for each in prompts]

    assert [each.endpoint for each in ran] == [0, 262, 170]
    assert [each.answer for each in ran] == [
        cold(name, each, stops=STOPS_WITH_TURNS) for each in prompts
    ]


def test_a_run_that_records_nothing_pauses_at_the_turning_point_all_the_same(
    tmp_path: Path,
) -> None:
    """Here from position 170 on: the next chunk would reach over it."""
    told: list[int] = []
    with opened(tmp_path) as cache:
        bound = cache.bind(built("llama"), **QUANTISED)
        run(bound, PROMPT, turn_ends=TURN_ENDS)
        prompt = edited(175)
        restoration = dataclasses.replace(bound.restore(prompt, turn_ends=TURN_ENDS), stops=())
        rest, options = prepare_generation(
            bound, prompt, restoration, {"max_tokens": COUNT}, stop=lambda at, _: told.append(at)
        )
        answer = answer_of(_generate_step(mx.array(rest), bound.model, **options))
        restoration.recording.finish()

    assert restoration.endpoint == 170
    assert answer == cold("llama", prompt)
    assert not told


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_an_answer_that_crosses_the_turning_point_is_stored_quantised(
    name: str, tmp_path: Path
) -> None:
    """As a scheduler does it, which generates for itself."""
    model, prompt = built(name), PROMPT[: TURNING_POINT - 2]
    with opened(tmp_path) as cache:
        bound = cache.bind(model, **QUANTISED)
        assert bound.quantisation is not None
        restoration = bound.restore(prompt)
        kv, position, recording = restoration.cache, 0, restoration.recording
        for stop in restoration.stops:
            model(mx.array([prompt[position:stop]]), cache=kv)
            recording.stop(stop, kv)
            position = stop
        generated = _generate_step(
            mx.array(prompt[position:]),
            model,
            prompt_cache=kv,
            max_tokens=COUNT,
            **bound.quantisation.options(),
        )
        answer = [int(token) for token, _ in generated]
        recording.extend(answer)
        assert recording.stop(len(prompt) + COUNT, kv) is None
        recording.abort()
        following = [*prompt, *answer, *token_ids(60, seed=5)]
        turn = run(bound, following)

    assert turn.endpoint == len(prompt) + COUNT
    assert turn.answer == cold(name, following)


def test_a_report_of_a_bad_boundary_reaches_what_was_computed_from_it_in_either_form(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as cache:
        bound = cache.bind(built("qwen3_5"), **QUANTISED)
        run(bound, PROMPT)
        bound.report_bad(PROMPT, 3 * STRIDE)
        assert bound.lookup(PROMPT) == TURNING_POINT
        bound.report_bad(PROMPT, STRIDE)
        assert bound.lookup(PROMPT) == 0
        assert cache.violations() == []


def test_kv_that_cannot_be_quantised_so_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as cache, pytest.raises(SettingsError, match="group size"):
        cache.bind(built("llama"), kv_bits=4, kv_group_size=64)


def test_options_that_are_not_those_of_the_binding_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        ordinary = cache.bind(built("llama"))
        bound = cache.bind(built("llama"), **QUANTISED)
        for each, options in (
            (ordinary, QUANTISED),
            (bound, {**QUANTISED, "kv_bits": 8}),
            (bound, {**QUANTISED, "quantized_kv_start": 200}),
        ):
            with pytest.raises(SettingsError, match="bind it with kv_bits"):
                run(each, PROMPT, **options)
        # The same turning point.
        same = run(bound, PROMPT, **{**QUANTISED, "quantized_kv_start": STRIDE + 1})

    assert same.answer == cold("llama", PROMPT)


# RAM, as mlx-lm's server keeps it.


def test_memory_cuts_no_quantised_cache_to_before_the_turning_point(tmp_path: Path) -> None:
    model, key = built("llama"), ("m", None, None)
    with opened(tmp_path) as cache:
        session = MutableSession(cache, ServeOptions(cache_dir=tmp_path))
        session.bound_to = BoundTo(
            model_key=key,
            tokenizer=None,
            bound=cache.bind(model, **QUANTISED),
            closing=frozenset(),
            is_padding_safe=True,
        )
        tiers = TieredPromptCache(session)
        for token_ids_held in (edited(60)[:100], PROMPT[:300]):
            kv = make_prompt_cache(model)
            model(mx.array([token_ids_held]), cache=kv)
            _maybe_quantize(kv, kv_bits=4, kv_group_size=32, quantized_kv_start=TURNING_POINT)
            tiers.insert_cache(key, token_ids_held, kv)
        found: dict[int, tuple[int, Any]] = {}
        for at in (50, 80, 150, 191, 192, 250):
            depth = tiers.depth(key, edited(at))
            held, rest = tiers.fetch_nearest_cache(key, edited(at))
            assert len(PROMPT) - len(rest) == depth
            found[at] = (depth, None if held is None else type(held[0]))

    assert found == {
        50: (50, KVCache),
        80: (0, None),
        150: (0, None),
        191: (0, None),
        192: (192, QuantizedKVCache),
        250: (250, QuantizedKVCache),
    }


# Mutants of the product. Each must be seen by a comparison such as those above.


def look_for(
    patch: pytest.MonkeyPatch, change: Callable[[Any], Any], at: Callable[[Any, int], Any]
) -> None:
    """Another lookup, and caches of the form that ``at`` gives: without it they do not fit."""
    real: Any = forms_module.lookup_of

    def lookup_of(*arguments: Any, **options: Any) -> Any:
        return change(real(*arguments, **options))

    patch.setattr(restoration_module, "lookup_of", lookup_of)
    patch.setattr(forms_module.Binding, "at", at)


def resume_from_an_ordinary_run(patch: pytest.MonkeyPatch) -> None:
    look_for(
        patch,
        lambda lookup: dataclasses.replace(lookup.otherwise, below=None),
        lambda self, position: self,
    )


def resume_quantised_before_the_turning_point(patch: pytest.MonkeyPatch) -> None:
    look_for(
        patch,
        lambda lookup: dataclasses.replace(lookup, beyond=0),
        lambda self, position: self.later if position and self.later else self,
    )


def quantise_nothing_while_prefilling(patch: pytest.MonkeyPatch) -> None:
    def apply(self: KVQuantisation, cache: list[Any]) -> None:
        """Leave it to mlx-lm, which does it at the ends of its own chunks only."""

    patch.setattr(KVQuantisation, "apply", apply)


def quantise_where_it_was_asked_for(patch: pytest.MonkeyPatch) -> None:
    real = KVQuantisation.options

    def options(self: KVQuantisation) -> dict[str, int]:
        return {**real(self), "quantized_kv_start": ASKED_START}

    patch.setattr(KVQuantisation, "options", options)


@pytest.mark.parametrize(
    ("mutate", "name"),
    [
        (resume_from_an_ordinary_run, "llama"),
        (resume_from_an_ordinary_run, "qwen3_5"),
        (resume_quantised_before_the_turning_point, "llama"),
        (quantise_nothing_while_prefilling, "qwen3_5"),
        (quantise_where_it_was_asked_for, "llama"),
    ],
)
def test_a_mutant_does_not_pass_for_plain_mlx_lm(
    mutate: Callable[[pytest.MonkeyPatch], None],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = (edited(165), PROMPT)
    with opened(tmp_path) as cache:
        run(cache.bind(built(name)), PROMPT)
        run(cache.bind(built(name), **QUANTISED), edited(164))
        mutate(monkeypatch)
        bound = cache.bind(built(name), **QUANTISED)
        answers = [run(bound, each, turn_ends=TURN_ENDS).answer for each in prompts]
    monkeypatch.undo()

    assert answers != [cold(name, each, stops=STOPS_WITH_TURNS) for each in prompts]
    assert "Traceback" not in caplog.text
