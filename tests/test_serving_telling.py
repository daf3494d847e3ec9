"""What ``walkback serve`` says of each request, and of a cache that stores nothing."""

# mlx-lm has no types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false

import json
import logging
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx_lm.utils
import pytest
from chat_models import write_chat_model
from hypothesis import given
from hypothesis import strategies as st
from inner_servers import InnerServer, serving_here
from mlx.utils import tree_flatten
from zoo import build

from walkback.integration.serving import memory
from walkback.integration.serving.options import parse_size, size_text
from walkback.integration.serving.telling import MutableSeen, parting_words
from walkback.integration.serving.watch import PROMPTS_MAX, MutableWatch
from walkback.journal.words import MissReason

OPTIONS = ("--disk-floor", "0", "--block-tokens", "16", "--checkpoint-tokens", "64")

Message = dict[str, Any]


def asking(about: str) -> list[Message]:
    system = "You are a careful assistant, and kind to all who ask. " * 2
    question = f"Tell me of {about}, and then again of {about}."
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "lfm2"
    write_chat_model(path, "lfm2")
    return path


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> Generator[None]:
    with caplog.at_level(logging.INFO, "walkback"):
        yield


def lines(server: InnerServer, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines about requests since the last call, all of them written."""
    server.cache.flush()
    server.session.teller._lines.submit(lambda: None).result()
    found = [each for each in caplog.messages if each.startswith("prompt of")]
    caplog.clear()
    return found


def common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def parting(model: Path, one: str, other: str) -> int:
    """The first token at which two prompts differ, after mlx-lm's own tokenizer."""
    load = cast(Any, mlx_lm.utils.load_tokenizer)
    tokenizer = load(model)
    prompts = [
        tokenizer.apply_chat_template(asking(each), add_generation_prompt=True, tokenize=True)
        for each in (one, other)
    ]
    return common(*prompts)


# One line for each request.


def test_each_request_has_one_line_that_says_what_it_had_and_what_is_stored(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_here(model, "--cache-dir", str(tmp_path / "cache"), *OPTIONS) as server:
        cold = server.chat(asking("rivers"))
        (first,) = lines(server, caplog)
        replay = server.chat(asking("rivers"))
        (again,) = lines(server, caplog)
        edit = server.chat(asking("wells"))
        (edited,) = lines(server, caplog)
        server.forget_memory()
        late = server.chat(asking("rivers"))
        (restored,) = lines(server, caplog)
        server.forget_memory()
        odd = server.chat([{"role": "user", "content": "x" * 100}])
        (other,) = lines(server, caplog)

    n = cold.prompt_tokens
    assert first == (
        f"prompt of {n} tokens: all to compute (empty: nothing is stored); 3 points stored"
    )
    assert again == f"prompt of {n} tokens: {n - 1} from memory, 1 to compute; nothing new to store"
    assert replay.cached_tokens == n - 1
    assert edited.startswith(
        f"prompt of {edit.prompt_tokens} tokens: {edit.cached_tokens} from disk, "
        f"{edit.prompt_tokens - edit.cached_tokens} to compute, "
        f"it differs from the nearest at token {parting(model, 'rivers', 'wells')}; "
    )
    assert restored.startswith(
        f"prompt of {n} tokens: {late.cached_tokens} from disk, {n - late.cached_tokens} to compute"
    )
    assert f"prompt of {odd.prompt_tokens} tokens: all to compute (unseen: " in other
    assert "differs from the nearest at token" in other


def test_a_request_that_is_not_stored_says_why(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ("--cache-dir", str(tmp_path / "cache"), *OPTIONS)

    with serving_here(model, *arguments, "--read-only") as server:
        server.chat(asking("rivers"))
        (read_only,) = lines(server, caplog)
        server.session.unbind()
        server.chat(asking("rivers"), seed=1)
        (unbound,) = lines(server, caplog)

    assert read_only.endswith("; nothing is stored: --read-only")
    assert unbound.endswith("1 to compute; nothing is stored: its model could not be bound")


@pytest.mark.parametrize(
    ("exact", "matched", "reason", "words"),
    [
        (130, 128, MissReason.UNSEEN, "it differs from the nearest at token 130"),
        (130, 128, None, "it differs from the nearest at token 130"),
        # What is on disk since an earlier run is nearer than what this one has seen.
        (
            3,
            128,
            MissReason.NO_CHECKPOINT,
            "it differs from what is stored at one of the tokens 128 to 143",
        ),
        (None, 0, MissReason.UNSEEN, "it differs from what is stored at one of the tokens 0 to 15"),
        (None, 128, None, ""),
        (5, 0, MissReason.OTHER_NAMESPACE, ""),
    ],
)
def test_a_miss_names_the_first_token_that_differs(
    exact: int | None, matched: int, reason: MissReason | None, words: str
) -> None:
    assert parting_words(exact, matched, reason, 16) == words


@given(st.lists(st.lists(st.integers(-2, 1), min_size=1, max_size=6), min_size=1, max_size=8))
def test_a_prompt_parts_from_the_nearest_of_those_before(prompts: list[list[int]]) -> None:
    seen = MutableSeen()

    for count, prompt in enumerate(prompts):
        found = seen.parting("m", prompt)

        commons = {common(prompt, other) for other in prompts[:count]}
        nearest = [other for other in prompts[:count] if common(prompt, other) == max(commons)]
        # None for one that is the beginning of the other.
        allowed = {
            max(commons) if max(commons) < min(len(prompt), len(other)) else None
            for other in nearest
        }
        assert found in (allowed or {None})
    assert seen.parting("another model", prompts[0]) is None


@pytest.mark.parametrize("at", [0, 1023, 1024, 1025, 2050, 2999])
def test_the_token_at_which_long_prompts_part_is_exact(at: int) -> None:
    seen = MutableSeen()
    prompt = list(range(3000))
    other = [*prompt[:at], -1, *prompt[at + 1 :]]

    assert seen.parting("m", prompt) is None
    assert seen.parting("m", other) == at
    # What stands for an image has more bits than a token id.
    pictures = [-(1 << 250) - each for each in range(2)]
    assert seen.parting("images", [*prompt, pictures[0], 5]) is None
    assert seen.parting("images", [*prompt, pictures[1], 5]) == len(prompt)
    # One that ends where the other goes on does not part from it.
    assert seen.parting("m", prompt[:2000]) is None


# A cache that stores nothing.


def test_a_cache_that_stores_nothing_of_ten_prompts_says_so_once_and_why(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ("--cache-dir", str(tmp_path / "cache"), *OPTIONS, "--disk-floor", "1000T")
    with serving_here(model, *arguments) as server:
        for number in range(PROMPTS_MAX + 2):
            server.chat(asking(f"{number}"), max_tokens=1)
        server.session.teller._lines.submit(lambda: None).result()
        stats = json.loads(server.get("/walkback/stats"))
        metrics = server.get("/metrics")

    warnings = [each for each in caplog.messages if "NOTHING IS BEING STORED" in each]
    assert len(warnings) == 1
    assert "of 10 prompts not one; the reason of 10 was: floor" in warnings[0]
    assert stats["boundaries_stored"] == 0
    assert stats["unstored_prompts"] == PROMPTS_MAX + 2
    assert f"walkback_unstored_prompts {float(PROMPTS_MAX + 2)}" in metrics


def test_a_cache_that_has_stored_something_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = MutableWatch()
    for _ in range(PROMPTS_MAX - 1):
        watch.note_unstored("budget")
    watch.note_stored()
    assert watch.unstored == 0
    for _ in range(2 * PROMPTS_MAX):
        watch.note_unstored("budget")

    assert watch.unstored == 2 * PROMPTS_MAX
    assert caplog.messages == []


def test_the_most_frequent_reason_is_named(caplog: pytest.LogCaptureFixture) -> None:
    watch = MutableWatch()
    for at in range(PROMPTS_MAX):
        watch.note_unstored("floor" if at % 3 else "budget")

    assert "the reason of 6 was: floor" in caplog.text


# Memory, and the lines of the start.


def test_memory_is_a_quarter_of_what_the_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("lfm2")
    arrays: Any = tree_flatten(model.parameters())
    nbytes = sum(array.nbytes for _, array in arrays)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    if not mx.metal.is_available():
        assert memory.working_set_bytes() == physical
    monkeypatch.setattr(memory, "working_set_bytes", lambda: nbytes + 4000)
    assert memory.hot_bytes_for(model) == 1000
    monkeypatch.setattr(memory, "working_set_bytes", lambda: nbytes - 1)
    assert memory.hot_bytes_for(model) == 0


def test_the_start_says_the_effective_values(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ("--cache-dir", str(tmp_path / "cache"), "--ssd-max", "96M", *OPTIONS)
    with serving_here(model, *arguments) as server:
        server.chat(asking("rivers"), max_tokens=1)
        hot = server.session.hot_max
        limit = json.loads(server.get("/walkback/stats"))["memory"]["limit_bytes"]
        staging = server.cache.statistics().staging_limit_bytes

    assert hot is not None and hot == limit == memory.hot_bytes_for(build("lfm2"))
    assert f"the cache {tmp_path / 'cache'} may take 96M and leaves 0 of its volume" in caplog.text
    assert "blocks of 16 tokens, checkpoints every 64" in caplog.text
    words = f"caches in RAM may take {size_text(hot)}, and {size_text(staging)} may wait"
    assert words in caplog.text


@given(st.integers(0, 1 << 50))
def test_a_size_is_read_as_it_is_written(nbytes: int) -> None:
    read = parse_size(size_text(nbytes))

    assert abs(read - nbytes) <= 0.05 * nbytes
