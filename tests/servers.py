"""A server in a process of its own, and a client that speaks to it over HTTP."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chat_models import letters_only

ROOT = Path(__file__).parent.parent
# A machine that runs other suites too gives a server a tenth of a processor.
START_SECONDS_MAX = 180.0
SETTLE_SECONDS_MAX = 60.0

DEFAULTS = {"max_tokens": 8, "logprobs": True, "logit_bias": letters_only()}

STOCK = "import mlx_lm.server; mlx_lm.server.main()"
OURS = "from walkback.tools.main import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client sees of one answer."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True, kw_only=True)
class Client:
    """Speaks to the server on a port of this machine. HTTPError for every status but 200."""

    port: int
    answer_seconds_max: float = 120.0

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as reply:
            return reply.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=self.answer_seconds_max) as reply:
            return json.load(reply)

    def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> Answer:
        body = {"messages": list(messages), **DEFAULTS, **options}
        return answer_of(self.post("/v1/chat/completions", body))

    def complete(self, prompt: str, **options: Any) -> Answer:
        body = {"prompt": prompt, **DEFAULTS, **options}
        return answer_of(self.post("/v1/completions", body))

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The events of a streamed chat; closing it closes the connection."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps({**DEFAULTS, "stream": True, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=self.answer_seconds_max) as reply:
            for line in reply:
                content = line.decode().removeprefix("data: ").strip()
                if line.startswith(b"data: ") and content != "[DONE]":
                    yield json.loads(content)


@dataclass(slots=True, kw_only=True)
class Server(Client):
    """A running server. ``log`` is what it has written."""

    process: "subprocess.Popen[bytes]"
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def await_durable(self) -> None:
        """Wait until nothing of ours waits for the disk: SIGKILL costs nothing then."""
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        stored = -1
        while True:
            now = json.loads(self.get("/walkback/stats"))
            if now["staging_bytes"] == 0 and now["boundaries_stored"] == stored:
                return
            assert time.monotonic() < deadline, self.log
            stored = now["boundaries_stored"]
            time.sleep(0.3)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(30)


def answer_of(reply: dict[str, Any]) -> Answer:
    (choice,) = reply["choices"]
    content = choice["logprobs"]["content"]
    usage = reply["usage"]
    return Answer(
        text=choice["text"] if "text" in choice else choice["message"]["content"] or "",
        tokens=tuple(each["id"] for each in content),
        logprobs=tuple(each["logprob"] for each in content),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


@contextlib.contextmanager
def serving(
    model: Path,
    *options: str,
    log_path: Path,
    is_stock: bool = False,
    program: Sequence[str] = ("-c", OURS, "serve"),
) -> Generator[Server]:
    """mlx-lm's own server, or ours; it is killed at the end if it still runs."""
    port = _free_port()
    arguments = ["--model", str(model), "--port", str(port), *options]
    command = ("-c", STOCK) if is_stock else program
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *command, *arguments],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        )
    server = Server(process=process, port=port, log_path=log_path)
    try:
        _await(server)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _await(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        assert server.process.poll() is None, server.log
        assert time.monotonic() < deadline, server.log
        with contextlib.suppress(OSError):
            server.get("/health")
            return
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
