"""``walkback serve`` on a disk that is full: it serves, says so once, and stores when it can."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from chat_models import write_chat_model
from oracles import Oracle
from servers import Server, serving

from walkback.store.audit import Audit
from walkback.store.findings import findings

# Without a floor, so that it is the disk itself that refuses.
SHORT = ("--disk-floor", "0", "--block-tokens", "16", "--checkpoint-tokens", "64")
TOKENS = 4
DISK_BYTES = 4 << 20

Message = dict[str, Any]


def asking(about: str) -> list[Message]:
    return [{"role": "user", "content": f"Tell me of {about}, and then of {about} again. " * 3}]


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A small disk of its own; only root can make one."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting takes Linux and root")
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def fill(path: Path) -> None:
    """Write to a file until its disk has no byte left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC


def refusals_in(server: Server) -> int:
    lines = server.get("/metrics").splitlines()
    return sum(
        int(float(line.split()[-1])) for line in lines if line.startswith("walkback_refusals_total")
    )


def stored_by(server: Server) -> int:
    server.await_durable()
    return json.loads(server.get("/walkback/stats"))["boundaries_stored"]


def test_a_server_on_a_full_disk_serves_says_so_once_and_stores_when_there_is_room(
    disk: Path, tmp_path: Path
) -> None:
    model = tmp_path / "lfm2"
    write_chat_model(model, "lfm2")
    oracle = Oracle(model)
    prompts = [asking(f"the {number}th") for number in range(4)]
    options = ("--cache-dir", str(disk / "cache"), "--hot-max", "0", *SHORT)
    with serving(model, *options, log_path=tmp_path / "log") as server:
        server.chat(asking("us"), max_tokens=TOKENS)
        before = stored_by(server)
        fill(disk / "others")

        answers = [server.chat(each, max_tokens=TOKENS) for each in prompts]
        resumed = server.chat(asking("us"), max_tokens=TOKENS)

        assert [each.tokens for each in answers] == [oracle.tokens(e, TOKENS) for e in prompts]
        assert resumed.tokens == oracle.tokens(asking("us"), TOKENS)
        assert before > 0
        assert refusals_in(server) > 0
        assert server.log.count("requests are served all the same") == 1, server.log

        (disk / "others").unlink()
        stored = stored_by(server)
        server.chat(prompts[0], max_tokens=TOKENS)
        assert stored_by(server) > stored
        again = server.chat(prompts[0], max_tokens=TOKENS)
        assert again.cached_tokens > 0
        assert again.tokens == answers[0].tokens
        assert server.log.count("storing goes on (") == 1, server.log
        assert server.stop() == 0, server.log

    with Audit.open(disk / "cache") as audit:
        assert list(findings(audit)) == []
