"""Memory that waits for the disk: never more than ``--pending-max``, however slow the disk is."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from chat_models import write_chat_model
from inner_servers import serving_here
from oracles import Oracle

from walkback.store import ordering

# A stop of 64 tokens has some 20 KB of KV and state.
PENDING_BYTES = 48 << 10
OPTIONS = (
    *("--disk-floor", "0", "--block-tokens", "64", "--checkpoint-tokens", "64"),
    *("--pending-max", str(PENDING_BYTES), "--hot-max", "0"),
)
STAGE_SECONDS = 0.4
TOKENS = 4


def asking(sentences: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "All that flows comes from somewhere. " * sentences}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "lfm2"
    write_chat_model(directory, "lfm2")
    return directory


def test_what_waits_for_a_slow_disk_does_not_grow_with_the_prompt(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, oracle = ordering.stage, Oracle(model)

    def slowly(*arguments: Any) -> Any:
        # Far slower than the prefill of a stop, so that the next ones have to wait.
        answered.wait(STAGE_SECONDS)
        return stage(*arguments)

    monkeypatch.setattr(ordering, "stage", slowly)
    high_waters: list[int] = []
    answered = threading.Event()
    for sentences in (8, 32):
        answered.clear()
        cache = tmp_path / str(sentences)
        with serving_here(model, "--cache-dir", str(cache), *OPTIONS) as server:
            answer = server.chat(asking(sentences), max_tokens=TOKENS)
            answered.set()
            server.forget_memory()
            again = server.chat(asking(sentences), max_tokens=TOKENS)
            now = json.loads(server.get("/walkback/stats"))
        assert answer.tokens == again.tokens == oracle.tokens(asking(sentences), TOKENS)
        # Nothing was dropped for want of memory: all of the prompt's grid is there.
        assert again.prompt_tokens - again.cached_tokens < 64
        assert now["not_stored"] == {}
        assert now["backpressure_seconds"] > 0, "the bound was not reached"
        assert now["payload_bytes_written"] > 2 * PENDING_BYTES
        high_waters.append(now["staging_bytes_high_water"])

    assert max(high_waters) <= PENDING_BYTES
