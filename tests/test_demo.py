"""The demo, run as a user runs it, and once over a restore that is broken on purpose."""

# mlx-lm's caches leave their elements untyped.
# pyright: reportUnknownMemberType=false

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import typer
from typer.testing import CliRunner

from walkback.integration.leaves import walk_leaves
from walkback.restore.materialise import MutableAssembly
from walkback.tools import demo as demo_module
from walkback.tools import demo_processes, demo_run

ROOT = Path(__file__).parent.parent

# Qwen3.5 gives the same bits under every plan on a CPU, so its stride may be this small.
STRIDE = 32
OPTIONS = ["--json", "--checkpoint-tokens", str(STRIDE), "--block-tokens", "16"]

# What each row must say: where it resumed, and after how many walk-backs.
EXPECTED = {
    "cold": (0, 0),
    "exact replay": (4 * STRIDE, 0),
    f"rewind to {3 * STRIDE + STRIDE // 2}": (3 * STRIDE, 0),
    f"rewind to {2 * STRIDE + STRIDE // 2}": (2 * STRIDE, 0),
    f"rewind to {1 * STRIDE + STRIDE // 2}": (1 * STRIDE, 0),
    "next turn": (4 * STRIDE, 0),
    f"edit at {2 * STRIDE + STRIDE // 4}": (2 * STRIDE, 0),
    "newest sidecar deleted": (3 * STRIDE, 1),
    "newest sidecar: a byte flipped": (3 * STRIDE, 1),
    f"exactly {3 * STRIDE} tokens": (2 * STRIDE, 0),
    "fresh process after SIGKILL": (4 * STRIDE, 0),
}
FIELDS = [
    "run",
    "prompt_tokens",
    "endpoint_tokens",
    "uncached_tokens",
    "sidecars",
    "walkbacks",
    "header_ms",
    "bytes_ms",
    "prefill_s",
    "first_token_s",
    "equal",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What one run of the demo printed, and its exit status."""

    status: int
    rows: dict[str, dict[str, Any]]
    summary: dict[str, Any]


def shown(output: str, status: int) -> Shown:
    *rows, last = [json.loads(line) for line in output.splitlines()]
    return Shown(status=status, rows={row["run"]: row for row in rows}, summary=last["summary"])


@pytest.fixture(scope="module")
def ran() -> Shown:
    done = subprocess.run(
        [sys.executable, "-m", "walkback.tools", "demo", *OPTIONS],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return shown(done.stdout, done.returncode)


def test_the_demo_finds_no_fault(ran: Shown) -> None:
    assert ran.status == 0
    assert ran.summary["faults"] == []
    assert ran.summary["violations"] == []


def test_every_run_gives_the_bits_of_mlx_lm_alone(ran: Shown) -> None:
    assert [row["equal"] for row in ran.rows.values()] == [True] * len(EXPECTED)


def test_every_run_resumes_where_it_should(ran: Shown) -> None:
    found = {name: (row["endpoint_tokens"], row["walkbacks"]) for name, row in ran.rows.items()}

    assert found == EXPECTED


def test_a_row_has_the_documented_fields_in_their_order(ran: Shown) -> None:
    for row in ran.rows.values():
        assert list(row) == FIELDS
        assert row["uncached_tokens"] == row["prompt_tokens"] - row["endpoint_tokens"] > 0
        assert row["sidecars"] == bool(row["endpoint_tokens"])
        assert row["first_token_s"] >= row["prefill_s"] > 0
        assert (row["bytes_ms"] > 0) == bool(row["endpoint_tokens"])


def test_the_summary_counts_what_the_runs_left_behind(ran: Shown) -> None:
    summary = ran.summary

    assert summary["events"]["Missed"] == 2  # the cold run, and the one that was killed
    assert summary["events"]["Restored"] == len(EXPECTED) - 1
    assert (summary["events"]["Lost"], summary["events"]["Quarantined"]) == (1, 1)
    assert summary["events"]["Opened"] == 3
    assert 0 < summary["sidecar_bytes"] < summary["block_bytes"] + summary["sidecar_bytes"]
    assert 0 < summary["staging_bytes_high_water"] < summary["peak_rss_bytes"]
    assert summary["sidecar_count"] >= 5


def test_a_restore_that_is_broken_makes_the_demo_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = MutableAssembly.finish

    def finish(self: MutableAssembly, make_cache: Any) -> list[Any]:
        """The recurrent state of the first layer is lost."""
        cache = real(self, make_cache)
        slots = next(leaf.cache for _, leaf in walk_leaves(cache) if hasattr(leaf, "cache"))
        slots[1] = mx.zeros_like(slots[1])
        return cache

    monkeypatch.setattr(MutableAssembly, "finish", finish)
    for module in (demo_module, demo_processes, demo_run):
        monkeypatch.setattr(module, "GREEDY_TOKENS", 2)
    app = typer.Typer()
    app.command()(demo_module.demo)

    result = CliRunner().invoke(app, OPTIONS)

    # The last row comes from a process of its own, whose code is as it should be.
    *rows, _ = (found := shown(result.stdout, result.exit_code)).rows.values()
    assert [row["run"] for row in rows if row["equal"]] == ["cold"]
    assert "exact replay: differs from mlx-lm alone" in found.summary["faults"]
    assert found.status == 1
