"""The processes beside the demo's own: mlx-lm alone, one that is killed, one that starts afresh."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .demo_run import GREEDY_TOKENS, Run, Setup


@contextmanager
def oracle(setup: Setup) -> Generator[Callable[[list[int]], dict[str, Any]]]:
    """mlx-lm alone, in a process of its own. Equal prompts are computed once."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("oracle.py").resolve()),
        str(setup.model_dir),
        str(setup.checkpoint_tokens),
        str(GREEDY_TOKENS),
    ]
    answers: dict[tuple[int, ...], dict[str, Any]] = {}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:

        def ask(prompt: list[int]) -> dict[str, Any]:
            key = tuple(prompt)
            if key not in answers:
                assert child.stdin is not None and child.stdout is not None
                child.stdin.write(json.dumps(prompt) + "\n")
                child.stdin.flush()
                line = child.stdout.readline()
                if not line:
                    raise RuntimeError("the oracle process ended; its message is above")
                answers[key] = json.loads(line)
            return answers[key]

        try:
            yield ask
        finally:
            child.kill()


def _worker(setup: Setup, scratch: Path, role: str, prompt: list[int]) -> list[str]:
    prompt_file = scratch / f"{role}.json"
    prompt_file.write_text(json.dumps(prompt))
    command = [sys.executable, "-m", "walkback.tools.demo_worker", role]
    return [*command, setup.to_json(), str(prompt_file)]


def kill_while_storing(setup: Setup, scratch: Path, prompt: list[int]) -> None:
    """Start a process that stores another prompt, and kill it in the middle of that."""
    command = _worker(setup, scratch, "victim", prompt)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        lines: IO[str] | None = child.stdout
        assert lines is not None
        stored = [lines.readline() for _ in range(2)]
        os.kill(child.pid, signal.SIGKILL)
    if not all(line.startswith("storing") for line in stored):
        raise RuntimeError("the process that was to be killed ended before; its message is above")


def replay_in_a_fresh_process(setup: Setup, scratch: Path, prompt: list[int]) -> Run:
    done = subprocess.run(
        _worker(setup, scratch, "replay", prompt), stdout=subprocess.PIPE, text=True, check=True
    )
    return Run(**json.loads(done.stdout))
