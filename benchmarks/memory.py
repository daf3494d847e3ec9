"""Memory of a server: what ours takes at its peak beyond mlx-lm's, by the length of a prompt.

Both prefill the same prompt in the same chunks, so its KV and what mlx needs to compute it are in
both, and what is left of the difference is ours: imports, the cache's state, and what waits for the
disk, which ``--pending-max`` bounds. The writer begins only when that is reached.
"""

import json
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# These two are the tests' own; `make bench` puts their folder on the path.
from chat_models import write_chat_model
from servers import Client, Server, serving

from walkback.integration.serving.options import parse_size

ARCHITECTURE = "falcon_h1"
# A state of 4 MB at each of many checkpoints, and little to compute.
WIDE = {"mamba_d_ssm": 1024, "mamba_d_state": 256, "mamba_d_head": 64, "mamba_n_heads": 16}
PENDING_MAX = "64MB"
# So short that prompts of which a CPU prefills some tens of tokens a second have many of them.
STRIDE_TOKENS = 32
# What is captured of either is more than may wait.
LENGTHS = (768, 6_144)
LENGTHS_QUICK = (128, 256)
ANSWER_SECONDS_MAX = 1800.0
IS_MEASURED = sys.platform == "linux"

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The peaks for one prompt, in bytes. ``captured`` is what went through the staging memory."""

    prompt_tokens: int
    stock: int
    walkback: int
    captured: int
    staging_high_water: int
    staging_limit: int

    @property
    def beyond(self) -> int:
        """What ours took beyond mlx-lm's."""
        return self.walkback - self.stock

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {"topic": "memory", "beyond": self.beyond, **asdict(self)}


def measure_memory(directory: Path, *, quick: bool) -> list[Peak]:
    """Serve one prompt of each length with each server, each in a process of its own."""
    model = directory / "model"
    write_chat_model(model, ARCHITECTURE, changes=WIDE)
    return [_measured(directory, model, each) for each in (LENGTHS_QUICK if quick else LENGTHS)]


def markdown(peaks: list[Peak]) -> str:
    """The peaks as a table, in MiB."""
    lines = [
        "| tokens of the prompt | captured | waited at most | `mlx_lm.server` | `walkback serve` "
        "| beyond |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for peak in peaks:
        figures = (peak.captured, peak.staging_high_water, peak.stock, peak.walkback, peak.beyond)
        cells = [f"{peak.prompt_tokens:,}", *(f"{each / MIB:,.0f}" for each in figures)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _measured(directory: Path, model: Path, tokens: int) -> Peak:
    step = ("--prefill-step-size", str(STRIDE_TOKENS), "--prompt-cache-size", "0")
    grids = ("--block-tokens", str(STRIDE_TOKENS), "--hot-max", "0", *step)
    log_path = directory / f"{tokens}.log"
    with serving(model, *step, log_path=log_path, is_stock=True) as server:
        _ask(server, tokens)
        stock = _peak_of(server)
        server.stop(signal.SIGKILL)
    ours = (
        *("--cache-dir", str(directory / f"cache {tokens}"), "--disk-floor", "0"),
        *("--pending-max", PENDING_MAX, *grids),
    )
    slow = (str(Path(__file__).with_name("slow_writer.py")),)
    with serving(model, *ours, log_path=log_path, program=slow) as server:
        _ask(server, tokens)
        server.await_durable()
        now = json.loads(server.get("/walkback/stats"))
        peak = Peak(
            prompt_tokens=tokens,
            stock=stock,
            walkback=_peak_of(server),
            captured=now["payload_bytes_written"],
            staging_high_water=now["staging_bytes_high_water"],
            staging_limit=now["staging_limit_bytes"],
        )
        server.stop(signal.SIGKILL)
    assert peak.staging_limit == parse_size(PENDING_MAX)
    return peak


def _ask(client: Client, tokens: int) -> None:
    client.answer_seconds_max = ANSWER_SECONDS_MAX
    # A token is a byte.
    client.complete(("All that flows comes from somewhere. " * tokens)[:tokens], max_tokens=1)


def _peak_of(server: Server) -> int:
    """The peak RSS of a server's process in bytes; 0 where no system tells."""
    if not IS_MEASURED:
        return 0
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    line = next(each for each in status.splitlines() if each.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
