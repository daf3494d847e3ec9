"""The benchmark runs, and its figures are all there; how fast anything is, no test says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[1] / "benchmarks" / "bench.py"


def test_a_quick_run_gives_every_comparison(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--quick", "--json", "--dir", str(tmp_path)]

    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)

    *rows, last = [json.loads(line) for line in done.stdout.splitlines()]
    compared: set[str] = {row["what"] for row in rows if "ratio" in row}
    assert compared >= {"store", "capture", "restore", "open after a kill", "commit"}
    assert all(row["seconds"] >= 0 for row in rows)
    shares = [row for row in rows if row["what"] == "store" and "share" in row]
    assert abs(sum(row["share"] for row in shares) - 1) < 0.01
    summary: dict[str, Any] = last["summary"]
    assert len(summary["ratios"]) == sum("ratio" in row for row in rows)
    assert list(tmp_path.iterdir()) == []
