"""``walkback serve`` and images: real requests with data URLs, on tiny models that see.

The oracle is mlx-lm in this process with its own processor: it embeds the whole prompt and prefills
it from its start in the chunks of the plan that is worked out here. The server needs Pillow.
"""

# mlx-lm has no types of its own, and mlx's stubs leave the arguments of eval untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import base64
import contextlib
import http.server
import io
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.server as upstream
import numpy as np
import pytest
from chat_models import letters_only
from image_models import TOKEN_PIXELS, write_image_model
from inner_servers import InnerServer, serving_here
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.processors import load_processor
from mlx_lm.sample_utils import make_logits_processors
from PIL import Image
from servers import Answer, serving

from walkback.integration.cache import open_cache
from walkback.integration.serving.vision import why_images_do_not_resume
from walkback.journal.words import NotStoredReason
from walkback.store.audit import Audit
from walkback.store.findings import findings

NAMES = ("llama", "qwen3_5")
STRIDE = 256
COUNT = 6
OPTIONS = (
    "--trust-remote-code",
    *("--disk-floor", "0", "--block-tokens", "64", "--checkpoint-tokens", str(STRIDE)),
)
Message = dict[str, Any]


def picture(seed: int, side: int) -> str:
    """A data URL of a square picture of ``side`` by ``side`` tokens."""
    colours = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    size = (side * TOKEN_PIXELS, side * TOKEN_PIXELS)
    image = Image.fromarray(colours).resize(size, Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def shown(url: str, text: str) -> Message:
    image = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [{"type": "text", "text": text}, image]}


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


SYSTEM = said("system", "You look at pictures, and say what is in them. " * 3)
RIVER, LAKE, SNOW = picture(1, 12), picture(2, 10), picture(3, 10)
# The first image lies over the place of the first stop of the grid.
ASKED = [
    SYSTEM,
    shown(RIVER, "What is this? "),
    said("assistant", "It is a river, and there are two boats in it. " * 2),
    shown(LAKE, "And what is that? "),
]
LAST_EDITED = [*ASKED[:3], shown(SNOW, "And what is that? ")]
FIRST_EDITED = [SYSTEM, shown(picture(4, 12), "What is this? "), *ASKED[2:]]


class Oracle:
    """mlx-lm alone: a prompt's token ids, where images and turns are, and what follows it."""

    def __init__(self, model: Path) -> None:
        load: Any = mlx_lm.load
        self._model, self.tokenizer, config = load(
            str(model), return_config=True, trust_remote_code=True
        )
        self._processor: Any = load_processor(self._model, config)

    def prompt(self, messages: Sequence[Message]) -> tuple[list[int], list[mx.array]]:
        text = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
        urls = [
            part["image_url"]["url"]
            for message in messages
            if not isinstance(message["content"], str)
            for part in message["content"]
            if part["type"] == "image_url"
        ]
        files = [io.BytesIO(base64.b64decode(url.partition(",")[2])) for url in urls]
        images = [np.asarray(Image.open(file).convert("RGB")) for file in files]
        text, pixels = self._processor(text, images=images)
        return self.tokenizer.encode(text, add_special_tokens=False), pixels

    def images(self, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Where the rows of each image stand."""
        start, end = self.tokenizer.convert_tokens_to_ids(["<|image_start|>", "<|image_end|>"])
        ids, _ = self.prompt(messages)
        starts = [at + 1 for at, each in enumerate(ids) if each == start]
        return list(zip(starts, [at for at, each in enumerate(ids) if each == end], strict=True))

    def turn_ends(self, messages: Sequence[Message]) -> list[int]:
        ids, _ = self.prompt(messages)
        return [at + 1 for at, each in enumerate(ids) if each == self.tokenizer.eos_token_id]

    def stops(self, messages: Sequence[Message]) -> list[int]:
        ids, _ = self.prompt(messages)
        inside = {at for start, end in self.images(messages) for at in range(start + 1, end)}
        stops: list[int] = []
        for each in sorted({*range(STRIDE, len(ids), STRIDE), *self.turn_ends(messages)} - inside):
            if each - (stops[-1] if stops else 0) >= 64 and each < len(ids):
                stops.append(each)
        return stops

    def answer(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Greedy token ids and their log probabilities."""
        ids, pixels = self.prompt(messages)
        rows = self._model.embed_inputs(mx.array(ids), pixel_values=pixels)
        mx.eval(rows)
        cache, start = make_prompt_cache(self._model), 0
        with mx.stream(generation_stream):
            for stop in self.stops(messages):
                for at in range(start, stop, STRIDE):
                    end = min(at + STRIDE, stop)
                    embeddings = rows[at:end][None]
                    self._model(mx.array([ids[at:end]]), cache=cache, input_embeddings=embeddings)
                    mx.eval([leaf.state for leaf in cache])
                start = stop
        generate: Any = generate_step
        generated = list(
            generate(
                mx.array(ids[start:]),
                self._model,
                prompt_cache=cache,
                input_embeddings=rows[start:],
                prefill_step_size=STRIDE,
                max_tokens=COUNT,
                logits_processors=make_logits_processors(letters_only()),
            )
        )
        return (
            tuple(int(token) for token, _ in generated),
            tuple(logprobs[int(token)].item() for token, logprobs in generated),
        )


def bits(answer: Answer) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return answer.tokens, answer.logprobs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        write_image_model(root / name, name)
    write_image_model(root / "shifted", "llama", fault="positions")
    return {name: root / name for name in (*NAMES, "shifted")}


def test_images_are_restored_after_a_kill_with_the_same_bits(
    models: dict[str, Path], tmp_path: Path
) -> None:
    model = models["qwen3_5"]
    oracle = Oracle(model)
    first, second = oracle.images(ASKED)
    ends = oracle.turn_ends(ASKED)
    assert first[0] < STRIDE < first[1]
    options = ("--cache-dir", str(tmp_path / "cache"), "--hot-max", "0", *OPTIONS)
    with serving(model, *options, log_path=tmp_path / "one.log") as server:
        cold = server.chat(ASKED, max_tokens=COUNT)
        warm = server.chat(ASKED, max_tokens=COUNT)
        server.await_durable()
        server.stop(signal.SIGKILL)
    turn = [
        *ASKED,
        said("assistant", cold.text),
        said("user", "And the sky, of what colour is it?"),
    ]
    with serving(model, *options, log_path=tmp_path / "two.log") as server:
        answers = [
            server.chat(messages, max_tokens=COUNT)
            for messages in (ASKED, turn, LAST_EDITED, FIRST_EDITED)
        ]
        assert server.stop() == 0
        assert "integration/" not in server.log

    replay, following, last_edited, first_edited = answers
    assert cold.cached_tokens == 0
    # All behind both images, and all of the answer.
    assert warm.cached_tokens >= ends[-1] > second[1]
    assert replay.cached_tokens == warm.cached_tokens
    assert following.cached_tokens == cold.prompt_tokens + COUNT
    # Where it parts from the other, or at most a block before.
    assert ends[2] <= last_edited.cached_tokens <= second[0]
    assert ends[0] <= first_edited.cached_tokens <= first[0]
    expected = {0: ASKED, 1: turn, 2: LAST_EDITED, 3: FIRST_EDITED}
    assert bits(cold) == bits(warm) == oracle.answer(ASKED)
    for number, messages in expected.items():
        assert bits(answers[number]) == oracle.answer(messages), number
    assert len({answer.logprobs for answer in answers}) == 4
    with Audit.open(tmp_path / "cache") as audit:
        assert list(findings(audit)) == []


# Two pictures that mlx-lm takes for one.


class Collision:
    """A hash that gives the same for all: 60 bits of one are what mlx-lm knows an image by."""

    def __init__(self, _: bytes) -> None: ...

    def hexdigest(self) -> str:
        return "0" * 64


@pytest.mark.parametrize(
    ("name", "tier"), [("llama", "memory"), ("qwen3_5", "memory"), ("qwen3_5", "disk")]
)
def test_two_images_of_one_pseudo_id_share_nothing_from_their_start_on(
    name: str,
    tier: str,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oracle = Oracle(models[name])
    monkeypatch.setattr(upstream, "hashlib", SimpleNamespace(sha256=Collision))
    options = ("--cache-dir", str(tmp_path / "cache"), *OPTIONS)
    with serving_here(models[name], *options) as server:
        answers: list[Answer] = []
        for messages in (ASKED, LAST_EDITED, ASKED, LAST_EDITED):
            if tier == "disk":
                server.forget_memory()
            answers.append(server.chat(messages, max_tokens=COUNT))

    _, (start, end) = oracle.images(ASKED)
    assert [each.cached_tokens > end for each in answers] == [False, False, True, True]
    assert 0 < answers[1].cached_tokens <= start
    wanted = [oracle.answer(ASKED), oracle.answer(LAST_EDITED)]
    assert wanted[0] != wanted[1]
    assert [bits(each) for each in answers] == wanted * 2


@pytest.mark.parametrize("tier", ["memory", "off"])
def test_a_url_that_gives_another_picture_now_is_another_image(
    tier: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(models["llama"])
    # What a server that keys by the URL itself would take it for.
    monkeypatch.setattr(upstream, "hashlib", SimpleNamespace(sha256=Collision))
    options = ("--cache-dir", str(tmp_path / "cache"), *OPTIONS)
    with (
        showing(lambda: pictures[0]) as url,
        serving_here(models["llama"], *options, *(["--off"] if tier == "off" else [])) as server,
    ):
        answers: list[Answer] = []
        for data_url in (LAKE, SNOW):
            pictures = [data_url]
            answers.append(server.chat([SYSTEM, shown(url, "What? ")], max_tokens=COUNT))

    prompts = [[SYSTEM, shown(each, "What? ")] for each in (LAKE, SNOW)]
    ((start, _),) = oracle.images(prompts[0])
    assert 0 < answers[1].cached_tokens <= start
    if tier != "off":
        assert [bits(each) for each in answers] == [oracle.answer(each) for each in prompts]
    assert [each.tokens for each in answers] == [oracle.answer(each)[0] for each in prompts]


@contextlib.contextmanager
def showing(picture: Callable[[], str]) -> Generator[str]:
    """A URL of this machine, and what it shows when it is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = base64.b64decode(picture().partition(",")[2])
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_request(self, code: object = "-", size: object = "-") -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}/picture.png"
        finally:
            httpd.shutdown()
            thread.join()


# Models whose prompts cannot be resumed.


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("", ""),
        ("positions", "resumed before an image"),
        ("decoding", "resumed behind an image"),
        ("company", "embedded in another way beside others"),
    ],
)
def test_a_model_is_asked_whether_its_prompts_with_images_resume(
    fault: str, reason: str, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    write_image_model(directory, "llama", fault=fault)
    load: Any = mlx_lm.load
    model, tokenizer, config = load(str(directory), return_config=True, trust_remote_code=True)

    with open_cache(tmp_path / "cache", free_floor_bytes=0) as cache:
        bound = cache.bind(model, directory)
        found = why_images_do_not_resume(bound, load_processor(model, config), tokenizer)

    assert reason in found
    assert bool(found) == bool(fault)


def test_a_model_that_keeps_the_positions_of_images_to_itself_is_refused_and_named(
    models: dict[str, Path], tmp_path: Path
) -> None:
    oracle = Oracle(models["shifted"])
    options = ("--cache-dir", str(tmp_path / "cache"), *OPTIONS)
    with serving_here(models["shifted"], *options) as server:
        seen = [server.chat(ASKED, max_tokens=COUNT) for _ in range(2)]
        refusals = refusals_of(server)
        text = [server.chat([SYSTEM], max_tokens=COUNT) for _ in range(2)]

    first, _ = oracle.images(ASKED)
    assert refusals == {NotStoredReason.IMAGES: 1}
    assert [each.cached_tokens for each in seen] == [0, seen[1].cached_tokens]
    # Memory keeps it under a key that no other request has, and shares the text before.
    assert seen[1].cached_tokens <= first[0]
    assert text[1].cached_tokens > 0


def refusals_of(server: InnerServer) -> dict[str, int]:
    server.cache.flush()
    return dict(server.cache.statistics().not_stored)
