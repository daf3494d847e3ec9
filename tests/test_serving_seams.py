"""A release of mlx-lm without one of the names that are joined: it is served, and told of.

In a child process mlx-lm's own source is changed before it is read, so that it works as before.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chat_models import write_chat_model
from servers import OURS, ROOT, serving

from walkback.integration.serving.seams import Way, find_seams
from walkback.store.audit import Audit
from walkback.store.findings import findings

OPTIONS = ("--disk-floor", "0", "--block-tokens", "16", "--checkpoint-tokens", "64")
MESSAGES = [
    {"role": "system", "content": "You are a careful assistant, and kind to all who ask. " * 2},
    {"role": "user", "content": "Tell me of rivers and of the sea."},
]

FOR_STOPS = (
    "insert_segments",
    "end_of_segment",
    "_prompt_batch",
    "_generation_batch",
    "_make_batch",
    "_unprocessed_sequences",
    "BatchGenerator",
    "PromptProcessingBatch",
    "ResponseGenerator",
    "_tokenize",
    "_model_map",
    "_trie",
)
FOR_WHOLE_PROMPTS = (
    "LRUPromptCache",
    "fetch_nearest_cache",
    "insert_cache",
    "ModelProvider",
    "_load",
    "model_key",
    "--prompt-concurrency",
)
FOR_MORE = {"stream_generate": "requests with a seed go uncached", "APIHandler": "/metrics"}
# Served in a process of its own; the others are only looked for.
SERVED = ("_make_batch", "LRUPromptCache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "lfm2"
    write_chat_model(path, "lfm2")
    return path


def test_the_installed_release_has_every_seam() -> None:
    seams = find_seams()

    assert seams.way is Way.STOPS
    assert seams.joins_sequential and seams.joins_pages
    assert seams.lacks == ()


def test_each_seam_that_is_missing_is_named_and_the_next_way_is_taken() -> None:
    """A process for each, forked from one that has imported what they share."""
    names = [*FOR_STOPS, *FOR_WHOLE_PROMPTS, *FOR_MORE]
    code = (
        "import os, sys, renamed, transformers\n"
        "import walkback.integration.serving\n"
        f"for name in {names!r}:\n"
        "    sys.stdout.flush()\n"
        "    if os.fork() == 0:\n"
        "        renamed.rename(name)\n"
        "        from walkback.integration.serving.seams import find_seams\n"
        "        found = find_seams()\n"
        "        print(name, found.way.name, *found.lacks, sep='|', flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )

    found = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines()}
    assert list(found) == names
    for name, (way, *lacks) in found.items():
        expected = (
            Way.WHOLE_PROMPTS
            if name in FOR_STOPS
            else Way.NOTHING
            if name in FOR_WHOLE_PROMPTS
            else Way.STOPS
        )
        assert way == expected.name
        assert any(name in each for each in lacks), lacks
        assert all(words in lacks[0] for words in [FOR_MORE.get(name, "")])


@pytest.mark.parametrize("name", SERVED)
def test_without_a_seam_the_server_answers_and_says_what_it_lacks(
    name: str, model: Path, tmp_path: Path
) -> None:
    tests = f"import sys; sys.path.append({str(ROOT / 'tests')!r})"
    program = ("-c", f"{tests}; import renamed; renamed.rename({name!r}); {OURS}", "serve")
    options = ("--cache-dir", str(tmp_path / "cache"), *OPTIONS)

    with serving(model, *options, log_path=tmp_path / "one.log", program=program) as server:
        cold = server.chat(MESSAGES)
        if name in FOR_STOPS:
            server.await_durable()
        server.stop(signal.SIGKILL)
    with serving(model, *options, log_path=tmp_path / "two.log", program=program) as server:
        warm, seeded = server.chat(MESSAGES), server.chat(MESSAGES, seed=1)
        assert name in FOR_WHOLE_PROMPTS or server.stop() == 0

    assert cold.tokens == warm.tokens == seeded.tokens
    assert "walkback: WARNING: mlx-lm" in server.log and name in server.log
    assert "Traceback" not in server.log
    if name in FOR_WHOLE_PROMPTS:
        assert (warm.cached_tokens, (tmp_path / "cache").exists()) == (0, False)
        return
    assert warm.cached_tokens > 0
    with Audit.open(tmp_path / "cache") as audit:
        assert list(findings(audit)) == []
