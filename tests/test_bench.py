"""The benchmark runs, and its figures are all there; how fast anything is, no test says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "benchmarks" / "bench.py"


def quick_run(directory: Path, *names: str) -> list[dict[str, Any]]:
    """What a smoke run prints, line by line."""
    only = [part for name in names for part in ("--only", name)]
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))
    done = subprocess.run(
        [sys.executable, str(BENCH), "--quick", "--json", "--dir", str(directory), *only],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
        check=True,
        timeout=600,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_quick_run_gives_every_comparison(tmp_path: Path) -> None:
    names = ("store", "capture", "restore", "open", "lookup", "commit")

    *rows, last = quick_run(tmp_path, *names)

    compared: set[str] = {row["what"] for row in rows if "ratio" in row}
    assert compared >= {"store", "capture", "restore", "open after a kill", "commit"}
    assert all(row["seconds"] >= 0 for row in rows)
    shares = [row for row in rows if row["what"] == "store" and "share" in row]
    assert abs(sum(row["share"] for row in shares) - 1) < 0.01
    summary: dict[str, Any] = last["summary"]
    assert len(summary["ratios"]) == sum("ratio" in row for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_the_servers_are_asked_every_shape_of_request(tmp_path: Path) -> None:
    *rows, _ = quick_run(tmp_path, "serving")

    by_shape = {row["what"]: row for row in rows}
    cold, replay = by_shape["cold"], by_shape["replay"]
    assert (cold["stock"], cold["walkback"], cold["walkback_restarted"]) == (0, 0, None)
    assert replay["stock"] == replay["walkback"] == replay["prompt_tokens"] - 1
    later = [row for row in rows if row["walkback_restarted"] is not None]
    assert len(later) == 9
    assert all(row["stock_restarted"] == 0 < row["walkback_restarted"] for row in later)
    edit = by_shape["edit of the last message"]
    assert edit["stock"] < edit["walkback"] == edit["walkback_restarted"]
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        quick_run(tmp_path, "speed")
